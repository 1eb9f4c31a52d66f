"""Counterpart: the other side of this rank's calls, by digests, and by words where these differ."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import torch

from commgrid.call_analysis.mismatch import difference
from commgrid.call_records.call import Group
from commgrid.call_records.operations import TRANSFERS, Alike
from commgrid.torch_compat.interposer import Arguments

KEPT = 1024
"""Calls that are held against the other's, the last ones."""

ANY_SOURCE = (1 << 64) - 1
"""The turn that says that a rank receives from any source."""

TAKEN_BACK = 0
"""The digest of a call that was not issued."""


class Words(NamedTuple):
    """The words for a call, which a rank sends when digests differ.

    Args:
        digest: the call's.
        is_issued: whether torch has accepted it; else it may still refuse it.
        alike: what has to be alike.
        said, where: operation and tensor, and line.
    """

    digest: int
    is_issued: bool
    alike: Alike
    said: str
    where: str


@dataclass(slots=True, eq=False)
class Counterpart:
    """Another rank, by the collectives of one communicator, or the messages of one pair and tag.

    Args:
        rank: the other.
        way: its number, the same on both.
        mine, theirs: digests of the last calls, by turn.
        issued: those of this rank that torch has accepted.
        said, words: what this rank and the other have said of them.
        is_open: whether the receiver takes messages from any source: none can be compared.
    """

    rank: int
    way: int
    mine: dict[int, int] = field(default_factory=dict)
    theirs: dict[int, int] = field(default_factory=dict)
    issued: dict[int, int] = field(default_factory=dict)
    said: dict[int, tuple[int, bool]] = field(default_factory=dict)
    words: dict[int, Words] = field(default_factory=dict)
    is_open: bool = False

    def differs(self, turn: int) -> bool:
        """Whether both sides of a call have come, with different digests."""
        mine, theirs = self.mine.get(turn), self.theirs.get(turn, TAKEN_BACK)
        return mine is not None and theirs not in (mine, TAKEN_BACK) and not self.is_open

    def add(self, turn: int, digest: int) -> None:
        """Note a call of this rank's, and forget one of long ago."""
        self.mine[turn] = digest
        old = turn - KEPT
        if old in self.mine:
            for held in (self.mine, self.theirs, self.issued, self.said, self.words):
                held.pop(old, None)

    def event(self, turn: int) -> str:
        """Name of a call, the same on all ranks in it."""
        return f"{self.way} {turn}"


_ACCEPTED = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int8, torch.uint8,
)  # fmt: skip
_REDUCTIONS = ("", "SUM", "PRODUCT", "MIN", "MAX")


def is_accepted(made: Arguments) -> bool:
    """Whether torch is sure to issue a call on gloo, by its tensors and its reduction."""
    kinds = {(each.dtype, each.device) for each in made.tensors}
    return (
        len(kinds) < 2
        and all(dtype in _ACCEPTED for dtype, _ in kinds)
        and made.reduction in _REDUCTIONS
    )


def ending(mine: Alike, theirs: Alike) -> str:
    """The kind of a difference at which gloo ends a process, since messages differ in length.

    >>> ones = Alike("all_reduce", "float32", 8, None, "SUM")
    >>> ending(ones, ones._replace(size=4, reduction="MAX")), ending(ones, ones._replace(size=0))
    ('other shape', '')
    """
    kind = difference(mine._replace(root=None, reduction=""), theirs)
    return "" if kind == "other operation" else kind


def way_of(group: Group, operation: str, mine: int, other: int, tag: int) -> int:
    """Return the number of a counterpart, the same on both ranks."""
    text = group.key
    if operation in TRANSFERS:
        source, target = (mine, other) if operation == "send" else (other, mine)
        text += f" {source}>{target} {tag}"
    return number(text)


def number(text: str) -> int:
    """Eight bytes for a text, an odd number."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") | 1


@lru_cache(KEPT)
def digest_of(alike: Alike, accepted: bool) -> int:
    """Eight bytes for the properties that must agree, the same in all processes.

    Args:
        alike: the properties.
        accepted: whether torch is sure to issue the call; else it is an even number.
    """
    return number(f"{tuple(alike)}") - (not accepted)
