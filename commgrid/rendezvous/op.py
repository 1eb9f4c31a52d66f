"""Operations of a key-value store, which rendezvous protocols yield and a driver carries out.

A protocol is a generator: it yields operations and receives their results. The same protocol runs
over torch's store (`commgrid.store.driver`) and, in virtual time, in the tests' simulator.

    def protocol():                                     # Protocol[bytes]
        count = yield Add("rank count", 1)              # -> 1
        if count == WORLD:
            return (yield Cas("decision", b"", b"go"))  # -> b"go", or what stood there
        return (yield WaitKey("decision", until=90.0))  # -> b"go", or None after 90.0
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar


@dataclass(frozen=True)
class Get:
    """Read keys without waiting: a tuple with each value, or None for a missing key.

    Args:
        stay: whether all of them are there, and are not deleted meanwhile. Then all are read in one
            call, which would wait for a missing key.
    """

    keys: tuple[str, ...]
    stay: bool = False


@dataclass(frozen=True)
class Put:
    """Write a key."""

    key: str
    value: bytes


@dataclass(frozen=True)
class Add:
    """Add to a counter, which begins at 0: the new value."""

    key: str
    by: int


@dataclass(frozen=True)
class Cas:
    """Compare and set: write `new` if the key holds `old`, and return the value that stands.

    An empty `old` stands for a missing key.
    """

    key: str
    old: bytes
    new: bytes


@dataclass(frozen=True)
class WaitKey:
    """Wait for a key to exist: its value, or None if the time `until` comes first."""

    key: str
    until: float


@dataclass(frozen=True)
class Drop:
    """Delete keys, present or not."""

    keys: tuple[str, ...]


@dataclass(frozen=True)
class Now:
    """Read the clock, in seconds."""


Op = Get | Put | Add | Cas | WaitKey | Drop | Now
Result = TypeVar("Result")
Protocol = Generator[Op, Any, Result]


def single(operation: Op) -> Protocol[Any]:
    """A protocol of one operation, with its result."""
    return (yield operation)


class StoreLostError(RuntimeError):
    """The store has ended, or an operation was given up without an answer.

    The outcome of the operation is unknown: it may take effect later, or never.

    Args:
        said: the store's own words.
        silent: whether the store neither answered nor closed the connection.
    """

    def __init__(self, said: str, silent: bool = False) -> None:
        super().__init__(said)
        self.silent = silent
