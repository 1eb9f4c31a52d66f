"""A sharding in words: who holds which positions, and who sends what when."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from commgrid.context_parallel.balance import Mask, Ranges
from commgrid.context_parallel.choice import WAYS, check_way
from commgrid.context_parallel.plans import gathering, ring_steps
from commgrid.context_parallel.ranges import count
from commgrid.context_parallel.sharding import SequenceSharding
from commgrid.errors import SpecError
from commgrid.planning.rank_lists import describe_ranks
from commgrid.planning.summary import several


def explain(
    sharding: SequenceSharding,
    way: str | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    inner: int | None = None,
) -> str:
    """Who holds which positions, and for a way who sends what when, forward.

    Args:
        sharding: a small one; every rank has its lines.
        way: "ring", "allgather", "ulysses" or "2d"; None: positions only.
        causal, window: the mask.
        inner: of "2d": how many ranks that follow each other exchange heads.

    Raises:
        SpecError: another way, or an `inner` that does not divide the ranks.

    Example:
        >>> print(explain(SequenceSharding.zigzag(8, 2), "ring"))
        8 positions in 1 document over 2 ranks, causal
        rank 0 holds 0-1, 6-7: 4 positions, 18 pairs
        rank 1 holds 2-5: 4 positions, 18 pairs
        ring, forward:
          step 1: rank 0 sends keys and values 0-1 to rank 1
          step 1: rank 1 sends keys and values 2-5 to rank 0
    """
    mask = Mask(causal, window)
    lines = [f"{sharding}, {mask}"]
    if len(sharding.documents) > 2:
        bounds = pairwise(sharding.documents)
        lines.append(f"documents {', '.join(_range(*bound) for bound in bounds)}")
    for rank, held in enumerate(sharding.ranges):
        pairs = sharding.attended_pairs(rank, causal=causal, window=window)
        lines.append(
            f"rank {rank} holds {_ranges(held)}: {several(count(held), 'position')}, {pairs} pairs"
        )
    if way is not None:
        sent = messages(sharding, way, mask, inner) or ["nothing is sent"]
        lines += [f"{way}, forward:", *(f"  {line}" for line in sent)]
    return "\n".join(lines)


def messages(
    sharding: SequenceSharding, way: str, mask: Mask, inner: int | None = None
) -> list[str]:
    """Who sends what to whom when, forward, a line each; as `explain`."""
    check_way(way)
    if way == "auto":
        raise SpecError(f"way='auto' depends on heads; choose() says which of {', '.join(WAYS)}")
    if way == "ring":
        return list(_ring(sharding, mask, "", 1))
    if way == "allgather":
        return list(_gathered(sharding, mask))
    size = sharding.parts if way == "ulysses" else inner
    if size is None:
        raise SpecError("way='2d': give inner=, how many ranks exchange heads inside")
    merged = sharding.merged(size)
    return [
        *_heads(sharding, size),
        *_ring(merged, mask, f" of its 1/{size} of the heads", size),
        *_back(sharding, size),
    ]


def _ring(sharding: SequenceSharding, mask: Mask, what: str, size: int) -> Iterator[str]:
    every = [
        ring_steps(sharding.ranges, sharding.documents, rank, mask)
        for rank in range(sharding.parts)
    ]
    for i in range(1, sharding.parts):
        for rank, steps in enumerate(every):
            if steps[i].send:
                sent = _ranges(_held(steps[i].send, sharding.ranges[rank]))
                yield (
                    f"step {i}: {_block(rank, size)} keys and values {sent}{what} to "
                    f"{_block(steps[i].target, size, sends=False)}"
                )


def _gathered(sharding: SequenceSharding, mask: Mask) -> Iterator[str]:
    for rank, held in enumerate(sharding.ranges):
        plan = gathering(sharding.ranges, sharding.documents, rank, mask)
        for to, runs in enumerate(plan.send):
            if to != rank and runs:
                yield f"rank {rank} sends keys and values {_ranges(_held(runs, held))} to rank {to}"


def _heads(sharding: SequenceSharding, size: int) -> Iterator[str]:
    for rank, held in enumerate(sharding.ranges):
        if size > 1 and held:
            first = rank // size * size
            others = [other for other in range(first, first + size) if other != rank]
            yield (
                f"rank {rank} sends queries, keys and values {_ranges(held)} to "
                f"{describe_ranks(others)}, to each 1/{size} of the heads"
            )


def _back(sharding: SequenceSharding, size: int) -> Iterator[str]:
    for rank in range(sharding.parts if size > 1 else 0):
        block = range(rank // size * size, rank // size * size + size)
        for to in block:
            if to != rank and sharding.ranges[to]:
                yield (
                    f"rank {rank} sends outputs {_ranges(sharding.ranges[to])} of its 1/{size} of "
                    f"the heads back to rank {to}"
                )


def _held(runs: Ranges, held: Ranges) -> Ranges:
    """The positions that rows of a rank are."""
    found = []
    row = 0
    for start, stop in held:
        for first, last in runs:
            left, right = max(first, row), min(last, row + stop - start)
            if left < right:
                found.append((start + left - row, start + right - row))
        row += stop - start
    return tuple(found)


def _block(rank: int, size: int, *, sends: bool = True) -> str:
    if size == 1:
        return f"rank {rank} sends" if sends else f"rank {rank}"
    ranks = f"ranks {rank * size}-{rank * size + size - 1}"
    return f"each of {ranks} sends" if sends else f"its like in {ranks}"


def _range(start: int, stop: int) -> str:
    return f"{start}-{stop - 1}" if stop - start > 1 else f"{start}"


def _ranges(ranges: Ranges) -> str:
    return ", ".join(_range(*one) for one in ranges) or "nothing"
