"""A sharding in words: who holds which positions, and which keys of other ranks it attends."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from commgrid.context_parallel.balance import Mask
from commgrid.context_parallel.ranges import Range, count
from commgrid.context_parallel.sharding import SequenceSharding
from commgrid.context_parallel.tiles import needed
from commgrid.wording import several


def explain(sharding: SequenceSharding, *, causal: bool = True, window: int | None = None) -> str:
    """Who holds which positions, and which keys of other ranks it attends: a line for each rank.

    These keys are what `ring` and `allgather` send, forward.

    Args:
        sharding: a small one.
        causal, window: the mask.

    Example:
        >>> from commgrid.context_parallel import SequenceSharding
        >>> print(explain(SequenceSharding.packed([3, 9, 4], 2)))
        16 positions in 3 documents over 2 ranks, causal
        documents 0-2, 3-11, 12-15
        rank 0 holds 0-1, 10-15: 8 positions, 30 pairs; attends 3-9 of rank 1
        rank 1 holds 2-9: 8 positions, 31 pairs; attends 0-1 of rank 0
    """
    mask, documents = Mask(causal, window), sharding.documents
    lines = [f"{sharding}, {mask}"]
    if len(documents) > 2:
        lines.append(f"documents {_positions(pairwise(documents))}")
    for rank, own in enumerate(sharding.ranges):
        pairs = sharding.attended_pairs(rank, causal=causal, window=window)
        keys = ((other, needed(own, held, documents, mask)) for other, held in
                enumerate(sharding.ranges) if other != rank)  # fmt: skip
        wanted = [f"{_positions(found)} of rank {other}" for other, found in keys if found]
        lines.append(
            f"rank {rank} holds {_positions(own)}: {several(count(own), 'position')}, {pairs} "
            f"pairs; attends {', '.join(wanted) or 'no others'}"
        )
    return "\n".join(lines)


def _positions(ranges: Iterable[Range]) -> str:
    names = (f"{start}-{stop - 1}" if stop - start > 1 else f"{start}" for start, stop in ranges)
    return ", ".join(names) or "nothing"
