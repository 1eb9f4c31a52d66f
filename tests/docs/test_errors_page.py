"""docs/errors.md has a row for every error that the source raises, and no other."""

from __future__ import annotations

import re
from functools import cache

from tests.docs.pages import DOCS
from tests.docs.raised import Raised, raised
from tests.docs.test_mirrors import CLASSES
from tests.docs.test_yaml_page import WRONG

TEXT = (DOCS / "errors.md").read_text(encoding="utf-8")
ROWS = [row.strip() for _, row in re.findall(r"^\| (`+)(.+?)\1 \| .+ \|$", TEXT, re.M)]
MESSAGES = [row for row in ROWS if not re.fullmatch(r"\w+Error", row)]

ENOUGH = 12
"""Letters that a text needs for its beginning to tell it from others."""

FILLED_IN = {
    "TransferError: nothing was moved: …": ["nothing was moved: …"],
    "SpecError: …": [
        "axes: … does not divide … ranks, so …=-1 cannot be filled",
        "axes: … is not the … ranks there are",
        "region …: … does not divide … ranks",
        "Megatron cannot express region … in the order …",
    ],
    "SpecError: …=…: …": ["…=…: expected axes fastest first"],
    "SpecError: groups.….of=…: ……": [
        "groups.….of=…: no group has this name",
        "groups.….of=…: these entries are made of each other",
    ],
    "SpecError: groups.….nccl.…=…: expected …": ["groups.….nccl.…=…: expected …"],
    "SpecError: groups.…: … …; split a combination of axes": [
        "groups.…: … is itself a pick or a part; split a combination of axes",
        "groups.…: … has listed ranks; split a combination of axes",
    ],
    "SpecError: …: …": ["…: there is no such file", "…: line …: key … is given twice"],
    "SpecError: …=…: expected ……": [
        "create=…: expected all, or a list of group names",
        "connect=…: expected axes, all, none, or a list of group names",
        "share=…: expected aliases, region, all",
    ],
    "SpecError: place=…: expected ……": ["place=…: expected by_rank or by_host"],
    "SpecError: within.…=…: …": ["within.…=…: level …: cluster … has …"],
    "SpecError: grid …: …": ["grid …: within.…=…: …, a group of …, run on hosts …"],
    "SpecError: … of shape … …": ["… of shape … …"],
    "SpecError: …: a tensor on …: …": ["…: a tensor on …: …"],
    "SpecError: nccl_communicator_config_path=…: …": ["nccl_communicator_config_path=…"],
    "ShapeError: …": [
        "…: the router's logits are NaN or infinite on ranks …",
        "rank …'s shard of shape … has … positions in dim …",
        "a sharding over … ranks, but group … has …",
    ],
    "ShapeError: …: …": [
        "…: num_kv_heads=… does not divide num_heads=…",
        "…: num_kv_heads=… neither is a multiple of the … ranks of group … nor divides them",
        "…: hidden=… is no multiple of num_heads=…; give head_size",
    ],
    "PeerTimeoutError: …": [
        "nobody serves the store at …",
        "rank … on … serves the store but does not reach it at …",
        "what listens at … did not answer as a store",
    ],
    "CheckpointError: …: …": [
        "step … was not saved to …: …",
        "nothing was loaded…: …",
        "nothing was recovered: …",
        "step … was not kept in memory: …",
    ],
    "CheckpointError: …, and …; start again": [
        "no rank that is left has all of … in memory, and …; start again",
        "no rank has a state in memory of grid … (checkpoint.keep keeps some), and …; start again",
    ],
    "GridMismatchError: …": ["the ranks of … have sharded different values of …"],
    "CommGridError: …: …": ["…: …"],
    "PeerFailedError: …": ["rank … is gone: its process has ended"],
}
"""Errors of which little stands where they are raised: the rows of what they are filled in with."""

BY_NO_CALL = [
    "… is suspended; call grid.resume() on all ranks of the grid first",
    "this is a communicator of grid … before it was rebuilt",
    "…; grid … cannot be used any more",
    "… did not come to the first call on … within … s",
    "rank … came too late to the first call on …",
    "all members came to the first call on …, and the first of them did not write the id",
    "the store ended or did not answer before the first call on … (…)",
    "a call or message on …, for which rank … has waited … s after call …, did not end: …",
    "grid …: … did not arrive within startup_timeout",
    "grid …: … did not get as far as …",
    "grid …: … have all come, and …",
    "grid …: … came too late; … had given up waiting",
    "…: … did not report within … s after …",
    "…: …; all ranks have reported since, so call it again",
    "grid …: ranks disagree: …",
    "rank … failed in …: …",
    "stage … (rank …) is gone or does not answer",
    "…: rank … is gone or has not come to …",
    "…: … did not come to …, to which … have come",
    "a rank is gone or does not answer: …",
    "deadlock: …",
    "rank … ended without an error, and without this call: …",
    "rank … has closed the transfer, or its program has ended",
    "rank … ended with …: …",
    "grid …: rank … failed: …",
    "rebuild of grid …: … (… came); leave ranks= out to go on with whoever does",
    "rebuild of grid …: rank … came too late",
    "rebuild of grid …: the store of torch.distributed is gone, and of … standby stores none",
    "rebuild: …",
    "the store of rank …: …",
    "rebuild: the store has gone meanwhile (…)",
    "rebuild of grid …: only … of its … ranks came",
    "rebuild of grid …: rank … gave ranks=…, and who came first ranks=…",
    "rank … is gone: its process has ended",
    "rank … cannot be reached: its connection is closed, and no other can be made",
    "rank … was stopped, or its host was, for over … s, and rank … went on without it",
    "rank … has aborted grid …",
    "rank … says nothing for … s",
    "… not come to call … on …, for which rank … has waited",
    "… have waited … s for each other",
    "ranks wait for each other: …; let all ranks of a group make the same calls in the same order",
]
"""Rows of errors whose class is chosen while the program runs."""


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


def test_every_error_has_a_row() -> None:
    missing = []
    for error in every():
        rows = FILLED_IN.get(f"{error.error}: {error.message}")
        if rows is None and not any(fits(row, error.message) for row in MESSAGES):
            missing.append(f"{error.where} raises {error.error}: | `{error.message}` | … |")
        missing += [f"{error.where}: {row}" for row in rows or () if row not in MESSAGES]
    assert not missing, "docs/errors.md needs rows for\n" + "\n".join(missing)


def test_every_row_is_of_an_error() -> None:
    made = {row for rows in FILLED_IN.values() for row in rows} | {*BY_NO_CALL}
    messages = {one.message for one in every()}
    stale = [
        row for row in MESSAGES if row not in made and not any(fits(row, one) for one in messages)
    ]
    assert not stale, f"docs/errors.md has rows that no error says any more: {stale}"
    assert set(FILLED_IN) <= {f"{one.error}: {one.message}" for one in every()}
    assert set(BY_NO_CALL) <= set(MESSAGES)


def test_what_yaml_can_have_wrong_is_found_by_its_words() -> None:
    """The messages that docs/yaml.md quotes, and that come, each begin like a row."""
    assert len(WRONG) > 40
    for _, _, said in WRONG:
        rows = [row for row in MESSAGES if len(letters(row)) >= ENOUGH]
        # In a file that is read, its name comes first.
        assert any(matches(row, one) is not None for row in rows for one in (said, f"a: {said}")), (
            said
        )
