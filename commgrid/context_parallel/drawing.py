"""Drawings of a sharding: who holds which positions in letters, and who attends what in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from commgrid.context_parallel.balance import Mask, Range, Ranges, check_lengths, pairs_of
from commgrid.context_parallel.ranges import count
from commgrid.context_parallel.sharding import SequenceSharding
from commgrid.context_parallel.tiles import needed
from commgrid.errors import SpecError
from commgrid.wording import several


def draw_ranges(
    lengths: Iterable[int], held: Sequence[Ranges], mask: Mask | None = None, *, width: int = 64
) -> str:
    """A row for each rank, and above them where documents begin.

    Args:
        lengths: tokens of each document, in the order in which they are packed.
        held: for each rank its ranges, as `balanced` gives them.
        mask: what a position attends; None: all before it.
        width: columns at most. Of a longer sequence a column stands for several positions, and
            shows + where a rank holds only some of them.

    Raises:
        SpecError: a range outside the documents, or a width below 1.

    Example:
        >>> from commgrid.context_parallel.balance import balanced
        >>> print(draw_ranges([3, 5, 8], balanced([3, 5, 8], 2)))
        document  0--1----2-------
        rank 0    #####........###  8 tokens  30 pairs
        rank 1    .....########...  8 tokens  27 pairs
    """
    sizes, mask = check_lengths(lengths), mask or Mask()
    if width < 1:
        raise SpecError(f"width={width}: expected 1 column or more")
    total = sum(sizes)
    step = -(-total // width)
    edges = [*range(0, total, step), total]
    counts = [count(own) for own in held]
    pairs = [pairs_of(sizes, own, mask) for own in held]
    wide = [len(f"{max(found, default=0)}") for found in (counts, pairs)]
    lead = max(len("document"), len(f"rank {len(held) - 1}"))
    lines = [f"{'document':<{lead}}  {_documents(sizes, edges)}".rstrip()]
    for rank, own in enumerate(held):
        lines.append(
            f"{f'rank {rank}':<{lead}}  {_row(own, edges)}  {counts[rank]:>{wide[0]}} tokens  "
            f"{pairs[rank]:>{wide[1]}} pairs"
        )
    return "\n".join(lines)


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


def _documents(sizes: Sequence[int], edges: Sequence[int]) -> str:
    """The number of each document over its first columns, where there is room for it."""
    step = edges[1] - edges[0]
    begins = [0, *accumulate(sizes)]
    row = ["-"] * (len(edges) - 1)
    for number, (begin, end) in enumerate(pairwise(begins)):
        first, text = -(-begin // step), str(number)
        apart = step > 1 or number > 9  # else two numbers side by side read as one
        if first + len(text) + apart <= -(-end // step):
            row[first : first + len(text)] = text
    return "".join(row)


def _row(own: Ranges, edges: Sequence[int]) -> str:
    """A letter for each column: the rank holds all, some or none of it."""
    step = edges[1] - edges[0]
    within = [0] * (len(edges) - 1)
    for start, stop in own:
        for column in range(start // step, -(-stop // step)):
            within[column] += min(stop, edges[column + 1]) - max(start, edges[column])
    whole = (stop - start for start, stop in pairwise(edges))
    return "".join(
        "#" if found == size else "+" if found else "."
        for found, size in zip(within, whole, strict=True)
    )
