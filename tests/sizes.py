"""Sizes of the test run: short (`pytest`), full (`pytest --full`) and nightly (`--nightly`).

A test says its own size:

    @pytest.mark.full              # runs with --full and --nightly
    @pytest.mark.full("8", "*-pp")  # only these cases wait for --full; the others always run
    @pytest.mark.nightly           # runs with --nightly alone

The short run keeps one real case of every layer, schedule, dispatcher, checkpoint path and example.
The full run adds further cuts of the same properties; the nightly run adds exhaustive ones.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

import pytest

SIZES = ("short", "full", "nightly")
VARIABLE = "COMMGRID_TESTS"

T = TypeVar("T")


def size() -> str:
    """Size of this run, also in processes that a test starts."""
    return os.environ.get(VARIABLE, "short")


def full() -> bool:
    """Whether this is a full or a nightly run."""
    return size() != "short"


def nightly() -> bool:
    """Whether this is a nightly run."""
    return size() == "nightly"


def pick(short: T, full: T, nightly: T | None = None) -> T:
    """The value for the size of this run; `nightly` defaults to `full`."""
    if size() == "short":
        return short
    return full if size() == "full" or nightly is None else nightly


def some(cases: Sequence[T], count: int) -> list[T]:
    """Return all cases in a full run, and `count` evenly spaced ones in a short run.

    The first and the last case are always among them: `some(range(7), 3)` is [0, 3, 6].
    """
    if full() or count >= len(cases):
        return list(cases)
    return [cases[i * (len(cases) - 1) // max(count - 1, 1)] for i in range(count)]


def size_of(item: pytest.Item) -> str:
    """The smallest size of run that includes a test."""
    for name in reversed(SIZES[1:]):
        for mark in item.iter_markers(name):
            if not mark.args or any(fnmatchcase(_case(item), pattern) for pattern in mark.args):
                return name
    return SIZES[0]


def unmatched(items: Sequence[pytest.Item]) -> list[str]:
    """Patterns in size markers that match no case of their test."""
    cases: dict[tuple[str, str, str], list[str]] = {}
    for item in items:
        for name in SIZES[1:]:
            for mark in item.iter_markers(name):
                for pattern in mark.args:
                    key = (item.nodeid.partition("[")[0], name, pattern)
                    cases.setdefault(key, []).append(_case(item))
    return [
        f"{test}: @pytest.mark.{name}({pattern!r}) matches no case"
        for (test, name, pattern), ids in cases.items()
        if not any(fnmatchcase(case, pattern) for case in ids)
    ]


def _case(item: pytest.Item) -> str:
    return item.name.partition("[")[2].removesuffix("]")
