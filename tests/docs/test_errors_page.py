"""docs/errors.md has rows of errors that the source raises; messages say what to do."""

from __future__ import annotations

import re
from functools import cache

from tests.docs.pages import DOCS
from tests.docs.raised import Raised, raised
from tests.docs.test_mirrors import CLASSES

TEXT = (DOCS / "errors.md").read_text(encoding="utf-8")
ROWS = [row.strip() for _, row in re.findall(r"^\| (`+)(.+?)\1 \| .+ \|$", TEXT, re.M)]
MESSAGES = [row for row in ROWS if not re.fullmatch(r"\w+Error", row)]

ENOUGH = 12
"""Letters that a text needs for its beginning to tell it from others."""

BY_NO_CALL = [
    "axes: … does not divide … ranks, so …=-1 cannot be filled",
    "region …: … does not divide … ranks",
    "grid …: within.…=…: …, a group of …, run on hosts …",
    "no rank that is left has all of … in memory, and …; start again",
    "rank … is gone: its process has ended",
    "… did not come to the first call on … within … s",
    "grid …: … did not arrive within startup_timeout",
    "…: … did not report within … s after …",
    "…: …; all ranks have reported since, so call it again",
    "grid …: ranks disagree: …",
    "rank … failed in …: …",
    "…: rank … is gone or has not come to …",
    "…: … did not come to …, to which … have come",
    "a rank is gone or does not answer: …",
    "rank … ended without an error, and without this call: …",
    "rank … has closed the transfer, or its program has ended",
    "grid …: rank … failed: …",
    "rebuild of grid …: … (… came); leave ranks= out to go on with whoever does",
    "rebuild of grid …: rank … came too late",
    "rebuild of grid …: only … of its … ranks came",
    "rank … was stopped, or its host was, for over … s, and rank … went on without it",
    "… not come to call … on …, for which rank … has waited",
    "ranks wait for each other: …; let all ranks of a group make the same calls in the same order",
]
"""Rows of errors whose text is put together while the program runs."""


@cache
def parts(text: str) -> list[str]:
    """What of a text is not filled in, piece by piece."""
    return re.split("…+", text)


@cache
def letters(text: str) -> str:
    """The letters of a text that are not filled in."""
    return re.sub(r"[^A-Za-z]", "", text)


def matches(one: str, other: str) -> int | None:
    """Where in `other` the text `one` ends, in which `…` is anything; None: it does not begin so.

    >>> matches("axes.…: an axis", "axes.2x: an axis needs a name"), matches("axes", "order")
    (16, None)
    """
    first, *rest = parts(one)
    if not other.startswith(first):
        return None
    at = len(first)
    for part in rest:
        found = other.find(part, at)
        if found < 0:
            return None
        at = found + len(part)
    return at


def begins(one: str, other: str) -> bool:
    """Whether `other` begins like `one`, which says enough to tell."""
    told = letters(one)
    enough = len(told) >= ENOUGH or told == letters(other)
    return bool(told) and enough and matches(one, other) is not None


def fits(row: str, message: str) -> bool:
    """Whether a row is of this message: it may be shorter, and say what the source leaves open.

    >>> fits("axes.…=…: expected a positive integer", "…=…: expected a positive integer, or …")
    True
    >>> fits("axes.…=…: expected a mapping", "…=…: expected a positive integer")
    False
    """
    if begins(row, message) or begins(row.removeprefix("…: "), message):
        return True
    ours, theirs = row.partition(": "), message.partition(": ")
    ends = theirs[0].endswith("…") or matches(theirs[0], ours[0]) == len(ours[0])
    if matches(theirs[0], ours[0]) is None or not ends:
        return False
    return begins(ours[2], theirs[2]) or begins(theirs[2], ours[2])


@cache
def every() -> list[Raised]:
    """All of them; not where tests are only collected."""
    return raised(*(one.__name__ for one in CLASSES))


def test_every_row_is_of_an_error() -> None:
    messages = {one.message for one in every()}
    stale = [
        row
        for row in MESSAGES
        if row not in BY_NO_CALL and not any(fits(row, one) for one in messages)
    ]
    assert not stale, f"docs/errors.md has rows that no error says any more: {stale}"
    assert set(BY_NO_CALL) <= set(MESSAGES)


_FIX = re.compile(
    r"expected|; |\b(add|call|choose|first|give|install|instead|leave|load|make|name|needs?|pass|"
    r"rename|run|save|set|should|start|take|unknown|use|write)\b"
)
WITHOUT_A_FIX = 90
"""Messages that say what is wrong, and neither what was expected nor what to do; never more."""


def test_messages_say_what_to_do() -> None:
    lacking = [
        f"{one.where}: {one.message}"
        for one in every()
        if letters(one.message) and not _FIX.search(one.message)
    ]
    assert len(lacking) <= WITHOUT_A_FIX, "\n".join(lacking)
