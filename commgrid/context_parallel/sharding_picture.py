"""A sharding of packed documents drawn: positions by rank, and what each rank's share comes to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from commgrid.context_parallel.balance import Mask, Ranges, check_lengths, pairs_of
from commgrid.context_parallel.ranges import count, pieces
from commgrid.viz.figure import ALERT, FAINT, INK, colour, new_figure
from commgrid.wording import several

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OUTLINED = 200  # above so many documents pieces have no edges, which would hide them


def draw_sharding(
    lengths: Iterable[int], held: Sequence[Ranges], mask: Mask | None = None
) -> Figure:
    """A row of documents, and for each rank a row of its ranges with its share of work.

    Args:
        lengths: tokens of each document, in the order in which they are packed.
        held: for each rank its ranges.
        mask: what a position attends; None: all before it.
    """
    sizes, mask = check_lengths(lengths), mask or Mask()
    figure = new_figure(11.0, 1.3 + 0.34 * (len(held) + 1))
    where, share = figure.subplots(1, 2, sharey=True, width_ratios=[5, 1])
    _rows(where, sizes, [((0, sum(sizes)),), *held])
    pairs = [pairs_of(sizes, own, mask) for own in held]
    tokens = [count(own) for own in held]
    _shares(share, pairs, tokens)
    where.set_title(_title(sizes, held, mask), fontsize=9.5, loc="left")
    where.set_yticks(
        range(len(held) + 1), ["documents", *(f"rank {rank}" for rank in range(len(held)))]
    )
    return figure


def _title(sizes: Sequence[int], held: Sequence[Ranges], mask: Mask) -> str:
    documents, ranges = several(len(sizes), "document"), several(sum(map(len, held)), "range")
    tokens, ranks = several(sum(sizes), "token"), several(len(held), "rank")
    return f"{tokens} in {documents} over {ranks}, {mask}: {ranges}"


def _rows(axes: Axes, sizes: Sequence[int], rows: Sequence[Ranges]) -> None:
    """Bars in the colours of their documents."""
    outlined, bounds = len(sizes) <= _OUTLINED, (0, *accumulate(sizes))
    for row, own in enumerate(rows):
        drawn = [(d, piece) for d, found in pieces(own, bounds).items() for piece in found]
        axes.broken_barh(
            [(piece.start, piece.stop - piece.start) for _, piece in drawn],
            (row - 0.39, 0.78),
            facecolors=[colour(document) for document, _ in drawn],
            edgecolor="white" if outlined else "none",
            linewidth=0.5 if outlined else 0.0,
        )
    axes.set_xlim(0, sum(sizes))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("position in the packed sequence")
    _bare(axes)


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
