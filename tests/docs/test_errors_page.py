"""docs/errors.md has a row for every error that the source raises, and no other."""

from __future__ import annotations

import inspect
import re

import pytest

import commgrid.errors
import megatron_adapter.errors
from commgrid.errors import CommGridError
from tests.docs.pages import DOCS
from tests.docs.raised import Raised, raised

TEXT = (DOCS / "errors.md").read_text(encoding="utf-8")
ROWS = [row.strip() for _, row in re.findall(r"^\| (`+)(.+?)\1 \| .+ \|$", TEXT, re.M)]
MESSAGES = [row for row in ROWS if not re.fullmatch(r"\w+Error", row)]

CLASSES = [
    one.__name__
    for module in (commgrid.errors, megatron_adapter.errors)
    for one in vars(module).values()
    if inspect.isclass(one) and issubclass(one, CommGridError) and one.__module__ == module.__name__
]

ENOUGH = 12
"""Letters that a text needs for its beginning to tell it from others."""

FILLED_IN = {
    "SpecError: …": [
        "axes: … does not divide … ranks, so …=-1 cannot be filled",
        "axes: … is not the … ranks there are",
        "region …: … does not divide … ranks",
        "Megatron cannot express region … in the order …",
    ],
    "SpecError: …=…: …": ["order=…: expected axes fastest first"],
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
    "SpecError: the … is …": ["the … is …"],
    "SpecError: … of shape … …": ["… of shape … …"],
    "SpecError: …, line …: …": ["…, line …: …"],
    "SpecError: …, line …: expected …, got …": ["…, line …: expected …, got …"],
    "SpecError: …: a tensor on …: …": ["…: a tensor on …: …"],
    "SpecError: nccl_communicator_config_path=…: …": ["nccl_communicator_config_path=…"],
    "ShapeError: …": ["…: the router's logits are NaN or infinite on ranks …"],
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
    "PeerTimeoutError: grid …: …": [
        "grid …: … did not arrive within startup_timeout",
        "grid …: … did not get as far as …",
        "grid …: … have all come, and …",
        "grid …: … came too late; … had given up waiting",
    ],
    "CheckpointError: …: …": ["…: …"],
    "CommGridError: …: …": ["…: …"],
}
"""Errors of which little stands where they are raised: the rows of what they are filled in with."""

BY_NO_CALL = [
    "grid …: ranks disagree: …",
    "rank … failed in …: …",
    "stage … (rank …) is gone or does not answer",
    "a rank is gone or does not answer: …",
    "grid …: rank … failed: …",
]
"""Rows of errors whose class is chosen while the program runs."""


def wild(text: str) -> str:
    """A pattern of what begins like `text`, in which `…` is anything."""
    return r".*?".join(re.escape(part) for part in re.split("…+", text))


def letters(text: str) -> str:
    """What of a text is not filled in."""
    return re.sub(r"[^A-Za-z]", "", text)


def begins(one: str, other: str) -> bool:
    """Whether `other` begins like `one`, which says enough to tell."""
    told = letters(one)
    enough = len(told) >= ENOUGH or told == letters(other)
    return bool(told) and enough and re.match(wild(one), other, re.S) is not None


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
    return (
        re.fullmatch(wild(theirs[0]), ours[0]) is not None
        and (begins(ours[2], theirs[2]) or begins(theirs[2], ours[2]))
    )  # fmt: skip


EVERY = raised(*CLASSES)
KNOWN = {f"{one.error}: {one.message}" for one in EVERY}


@pytest.mark.parametrize("error", EVERY, ids=lambda one: one.where)
def test_every_error_has_a_row(error: Raised) -> None:
    rows = FILLED_IN.get(f"{error.error}: {error.message}")
    if rows is None:
        assert any(fits(row, error.message) for row in MESSAGES), (
            f"{error.where} raises {error.error}, and docs/errors.md has no row for it: "
            f"add | `{error.message}` | cause and fix |"
        )
    else:
        assert set(rows) <= set(MESSAGES), error.where


def test_every_row_is_of_an_error() -> None:
    made = {row for rows in FILLED_IN.values() for row in rows} | {*BY_NO_CALL}
    messages = {one.message for one in EVERY}
    stale = [
        row for row in MESSAGES if row not in made and not any(fits(row, one) for one in messages)
    ]
    assert not stale, f"docs/errors.md has rows that no error says any more: {stale}"
    assert set(FILLED_IN) <= KNOWN
    assert set(BY_NO_CALL) <= set(MESSAGES)


def test_every_class_is_in_a_table_with_what_else_it_is() -> None:
    for name in CLASSES:
        one = getattr(commgrid.errors, name, None) or getattr(megatron_adapter.errors, name)
        row = re.search(rf"^\| \[?`{name}`.*\| (.+?) \|", TEXT, re.M)
        assert row, f"docs/errors.md lacks {name}"
        for base in one.__bases__:
            assert base is CommGridError or f"`{base.__name__}`" in row[0], (name, base)
