"""A sharding of packed documents drawn: positions by rank, and what each rank's share comes to."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from commgrid.context_parallel.balance import Mask, Ranges, check_lengths, pairs_of
from commgrid.viz.figure import ALERT, FAINT, INK, colour, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OUTLINED = 200  # above so many documents pieces have no edges, which would hide them


def draw_sharding(
    lengths: Iterable[int], held: Sequence[Ranges], mask: Mask | None = None
) -> Figure:
    """A row of documents, a row for each rank with what it holds of them, and its share of work.

    Args:
        lengths: tokens of each document, in the order in which they are packed.
        held: for each rank its ranges.
        mask: what a position attends; None: all before it.
    """
    sizes, mask = check_lengths(lengths), mask or Mask()
    ends = list(accumulate(sizes))
    figure = new_figure(11.0, 1.3 + 0.34 * (len(held) + 1))
    where, share = figure.subplots(1, 2, sharey=True, width_ratios=[5, 1])
    _rows(where, sizes, [((0, ends[-1]),), *held])
    pairs = [pairs_of(sizes, own, mask) for own in held]
    tokens = [sum(stop - start for start, stop in own) for own in held]
    _shares(share, pairs, tokens)
    where.set_title(_title(sizes, held, mask), fontsize=9.5, loc="left")
    where.set_yticks(
        range(len(held) + 1), ["documents", *(f"rank {rank}" for rank in range(len(held)))]
    )
    return figure


def _title(sizes: Sequence[int], held: Sequence[Ranges], mask: Mask) -> str:
    kind = (
        "full" if not mask.causal else "causal" if mask.window is None else f"window {mask.window}"
    )
    documents, ranges = len(sizes), sum(map(len, held))
    return (
        f"{sum(sizes)} tokens in {documents} document{'s' * (documents > 1)} over {len(held)} "
        f"rank{'s' * (len(held) > 1)}, {kind}: {ranges} range{'s' * (ranges > 1)}"
    )


def pieces(sizes: Sequence[int], own: Ranges) -> Iterator[tuple[int, int, int]]:
    """Start, stop and document of each piece of a document in some ranges."""
    ends = list(accumulate(sizes))
    for start, stop in own:
        document = bisect_right(ends, start)
        while start < stop:
            end = min(stop, ends[document])
            yield start, end, document
            start, document = end, document + 1


def _rows(axes: Axes, sizes: Sequence[int], rows: Sequence[Ranges]) -> None:
    """Bars in the colours of their documents."""
    outlined = len(sizes) <= _OUTLINED
    for row, own in enumerate(rows):
        drawn = list(pieces(sizes, own))
        axes.broken_barh(
            [(start, stop - start) for start, stop, _ in drawn],
            (row - 0.39, 0.78),
            facecolors=[colour(document) for _, _, document in drawn],
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
