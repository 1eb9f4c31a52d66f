"""Arrivals of ranks in one place, as bitmaps at the store: two bits a rank, 30 ranks a counter.

An arrival is one operation, and a list of the absent is one operation for 30 ranks. The second bit
of a rank keeps two processes that arrive as the same rank from marking its neighbour.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

from commgrid.rendezvous.op import Add, Drop, Protocol

BLOCK = 30
"""Ranks of one counter: a store's counters are signed and have 64 bits."""


class Arrival(Enum):
    """Result of an arrival."""

    EARLY = "other ranks are still to arrive"
    LAST = "all ranks have arrived"
    TWICE = "another process has arrived as this rank"


def arrive(
    at: str, rank: int, members: Sequence[int], sweep: Iterable[str] = ()
) -> Protocol[Arrival]:
    """Mark a rank as arrived: one operation, and a few more for the last of every 30 ranks.

    Args:
        at: key of the place.
        rank: the rank that arrives.
        members: ranks that are expected. Other ranks are marked too, and complete nothing.
        sweep: other places with the same members that are over; their counters are deleted along
            the way.
    """
    block, bit = rank // BLOCK, 1 << 2 * (rank % BLOCK)
    marks = yield Add(f"{at}/{block}", bit)
    if _count(marks, rank) > 1:
        yield Add(f"{at}/{block}", -bit)
        return Arrival.TWICE
    expected = members if isinstance(members, range) else frozenset(members)
    near = range(block * BLOCK, (block + 1) * BLOCK)
    if rank not in expected or not all(_count(marks, r) for r in near if r in expected):
        return Arrival.EARLY
    if swept := tuple(f"{other}/{block}" for other in sweep):
        yield Drop(swept)
    blocks = len({member // BLOCK for member in expected})
    if blocks > 1 and (yield Add(f"{at}/blocks", 1)) < blocks:
        return Arrival.EARLY
    return Arrival.LAST


def arrived(at: str, among: Iterable[int]) -> Protocol[list[int]]:
    """Return which of some ranks have arrived, rising."""
    marks: dict[int, int] = {}
    for rank in (wanted := sorted(set(among))):
        if rank // BLOCK not in marks:
            marks[rank // BLOCK] = yield Add(f"{at}/{rank // BLOCK}", 0)
    return [rank for rank in wanted if _count(marks[rank // BLOCK], rank)]


def counters(at: str, ranks: Iterable[int]) -> list[str]:
    """Return the keys that arrivals of some ranks have made."""
    return [f"{at}/{block}" for block in (*sorted({r // BLOCK for r in ranks}), "blocks")]


def _count(marks: int, rank: int) -> int:
    """Number of processes that have arrived as a rank."""
    return marks >> 2 * (rank % BLOCK) & 3
