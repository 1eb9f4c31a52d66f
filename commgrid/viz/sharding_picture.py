"""A sharding of packed documents drawn: positions by rank, and what each rank's share comes to.

Its arguments: `lengths`, tokens of each document, in the order in which they are packed; `held`,
for each rank its (start, stop) ranges; `pairs`, how many (query, key) pairs its positions attend.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from commgrid.errors import SpecError
from commgrid.viz.figure import ALERT, FAINT, INK, colour, new_figure
from commgrid.wording import several

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Ranges = Sequence[tuple[int, int]]

_OUTLINED = 200  # above so many documents pieces have no edges, which would hide them


def draw_ranges(
    lengths: Sequence[int], held: Sequence[Ranges], pairs: Sequence[int], *, width: int = 64
) -> str:
    """A row of letters for each rank, and above them where documents begin.

    Args:
        lengths, held, pairs: of the sharding.
        width: columns at most. Of a longer sequence a column stands for several positions, and
            shows + where a rank holds only some of them.

    Raises:
        SpecError: a width below 1.

    Example:
        >>> print(draw_ranges([3, 5, 8], [[(0, 5), (13, 16)], [(5, 13)]], [30, 27]))
        document  0--1----2-------
        rank 0    #####........###  8 tokens  30 pairs
        rank 1    .....########...  8 tokens  27 pairs
    """
    if width < 1:
        raise SpecError(f"width={width}: expected 1 column or more")
    total = sum(lengths)
    step = -(-total // width)
    edges = [*range(0, total, step), total]
    counts = _counts(held)
    wide = [len(f"{max(found, default=0)}") for found in (counts, pairs)]
    lead = max(len("document"), len(f"rank {len(held) - 1}"))
    lines = [f"{'document':<{lead}}  {_documents(lengths, edges)}".rstrip()]
    for rank, own in enumerate(held):
        lines.append(
            f"{f'rank {rank}':<{lead}}  {_letters(own, edges)}  {counts[rank]:>{wide[0]}} tokens  "
            f"{pairs[rank]:>{wide[1]}} pairs"
        )
    return "\n".join(lines)


def _counts(held: Sequence[Ranges]) -> list[int]:
    return [sum(stop - start for start, stop in own) for own in held]


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


def _letters(own: Ranges, edges: Sequence[int]) -> str:
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


def draw_sharding(
    lengths: Sequence[int], held: Sequence[Ranges], pairs: Sequence[int], mask: str
) -> Figure:
    """A row of documents, and for each rank a row of its ranges with its share of work.

    Args:
        lengths, held, pairs: of the sharding.
        mask: what a position attends, for the title.
    """
    figure = new_figure(11.0, 1.3 + 0.34 * (len(held) + 1))
    where, share = figure.subplots(1, 2, sharey=True, width_ratios=[5, 1])
    _rows(where, lengths, [((0, sum(lengths)),), *held])
    _shares(share, pairs, _counts(held))
    documents, ranges = several(len(lengths), "document"), several(sum(map(len, held)), "range")
    tokens, ranks = several(sum(lengths), "token"), several(len(held), "rank")
    title = f"{tokens} in {documents} over {ranks}, {mask}: {ranges}"
    where.set_title(title, fontsize=9.5, loc="left")
    where.set_yticks(
        range(len(held) + 1), ["documents", *(f"rank {rank}" for rank in range(len(held)))]
    )
    return figure


def _rows(axes: Axes, sizes: Sequence[int], rows: Sequence[Ranges]) -> None:
    """Bars in the colours of their documents."""
    outlined, bounds = len(sizes) <= _OUTLINED, (0, *accumulate(sizes))
    for row, own in enumerate(rows):
        drawn = [*_pieces(own, bounds)]
        axes.broken_barh(
            [(start, stop - start) for _, start, stop in drawn],
            (row - 0.39, 0.78),
            facecolors=[colour(document) for document, _, _ in drawn],
            edgecolor="white" if outlined else "none",
            linewidth=0.5 if outlined else 0.0,
        )
    axes.set_xlim(0, sum(sizes))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("position in the packed sequence")
    _bare(axes)


def _pieces(own: Ranges, bounds: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The parts of ranges that lie in one document: its number, start, stop."""
    for start, stop in own:
        first, last = bisect_right(bounds, start) - 1, bisect_left(bounds, stop)
        for document in range(first, last):
            yield document, max(start, bounds[document]), min(stop, bounds[document + 1])


def _shares(axes: Axes, pairs: Sequence[int], tokens: Sequence[int]) -> None:
    """Pairs and tokens of each rank, as shares of their means."""
    for offset, counts, face, label in (
        (-0.2, pairs, INK, "attended pairs"),
        (0.2, tokens, FAINT, "tokens"),
    ):
        mean = sum(counts) / len(counts)
        places = [rank + 1 + offset for rank in range(len(counts))]
        axes.barh(places, [n / mean for n in counts], height=0.34, color=face, label=label)
    axes.plot([1, 1], [0.5, len(pairs) + 0.5], color=ALERT, linewidth=0.8)
    axes.set_xlabel("of the mean")
    axes.legend(loc="upper left", fontsize=7, frameon=False, ncols=2, bbox_to_anchor=(-0.08, 1.02))
    _bare(axes)


def _bare(axes: Axes) -> None:
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
