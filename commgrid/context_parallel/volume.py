"""How much each way sends: counted from the plan, and estimated before there is one."""

from __future__ import annotations

from dataclasses import dataclass

from commgrid.context_parallel.balance import Mask
from commgrid.context_parallel.plans import Held, gathering, ring_steps
from commgrid.context_parallel.ranges import count, pieces, union


@dataclass(frozen=True)
class Heads:
    """What a position carries.

    Args:
        heads, kv_heads: of queries, and of keys and values.
        size: numbers of a head, times the batch.
    """

    heads: int
    kv_heads: int
    size: int


def sent_in_ring(
    ranges: Held, documents: tuple[int, ...], rank: int, mask: Mask, heads: Heads
) -> tuple[int, int]:
    """Numbers that a rank sends in ring attention, forward and backward.

    Keys and values to those who attend them; backward these again, and the gradients of those it
    was given.

    Example:
        >>> ranges = ((0, 4),), ((4, 8),)
        >>> sent_in_ring(ranges, (0, 8), 0, Mask(causal=False), Heads(4, 2, 16))
        (256, 512)
    """
    steps = ring_steps(ranges, documents, rank, mask)
    row = 2 * heads.kv_heads * heads.size
    given = sum(count(step.send) for step in steps) * row
    return given, given + sum(step.receive for step in steps) * row


def sent_gathered(
    ranges: Held, documents: tuple[int, ...], rank: int, mask: Mask, heads: Heads
) -> tuple[int, int]:
    """The same of all-gather attention, which sends what ring attention does, at once."""
    plan = gathering(ranges, documents, rank, mask)
    row = 2 * heads.kv_heads * heads.size
    given = sum(count(runs) for to, runs in enumerate(plan.send) if to != rank) * row
    got = (sum(plan.receive) - plan.receive[rank]) * row
    return given, given + got


def sent_for_heads(ranges: Held, rank: int, heads: Heads) -> tuple[int, int]:
    """The same of Ulysses attention among the ranks that hold `ranges`.

    Example:
        >>> sent_for_heads((((0, 4),), ((4, 8),)), 0, Heads(4, 2, 16))
        (384, 384)
    """
    parts, own = len(ranges), count(ranges[rank])
    others = sum(map(count, ranges)) - own
    out = heads.heads // parts * heads.size
    row = out + 2 * max(heads.kv_heads // parts, 1) * heads.size
    to, back = (parts - 1) * own * row, others * out
    return to + back, others * row + (parts - 1) * own * out


def sent_two_level(
    ranges: Held, documents: tuple[int, ...], rank: int, mask: Mask, heads: Heads, inner: int
) -> tuple[int, int]:
    """The same of two levels, Ulysses among `inner` ranks that follow each other."""
    block = rank // inner * inner
    outside = tuple(
        union(one for held in ranges[i : i + inner] for one in held)
        for i in range(0, len(ranges), inner)
    )
    first = sent_for_heads(ranges[block : block + inner], rank % inner, heads)
    local = Heads(heads.heads // inner, max(heads.kv_heads // inner, 1), heads.size)
    then = sent_in_ring(outside, documents, rank // inner, mask, local)
    return first[0] + then[0], first[1] + then[1]


def rows_to_exchange(ranges: Held, documents: tuple[int, ...], mask: Mask) -> int:
    """How many positions' keys go from rank to rank in ring attention, over all ranks.

    Counted by documents and ranks alone, so that it takes no time; with a window at most so many.

    Example:
        >>> rows_to_exchange((((0, 5), (13, 16)), ((5, 13),)), (0, 3, 8, 16), Mask())
        7
    """
    total = 0
    for held in ranges:
        for document, own in pieces(held, documents).items():
            start, stop = documents[document], documents[document + 1]
            last = own[-1].stop if mask.causal else stop
            wanted = last - start - sum(piece.stop - piece.start for piece in own)
            if mask.window is not None:
                wanted = min(wanted, len(own) * (mask.window - 1))
            total += wanted
    return total
