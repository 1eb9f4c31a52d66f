"""Ranks that cannot finish: each rank's call, and the rank it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from commgrid.call_analysis.verification import Box, Verdict
from commgrid.layout.rank_text import describe_ranks
from commgrid.viz.figure import ALERT, FAINT, INK, PAPER, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = tuple[tuple[int, ...], tuple[Box, ...]]
"""Ranks that issue the same and stand in the same, and what that is."""

MOST = 32  # rows
_WIDE, _HIGH, _GAP = 2.5, 0.62, 0.5  # inches of a box, and between two
_NAME = 1.6  # inches that ranks get beside it
_NARROWEST = 7.0  # inches of the title


def rows_of(verdict: Verdict) -> list[Row]:
    """Rows of the drawing: one for all ranks that do the same."""
    found: dict[tuple[Box, ...], list[int]] = {}
    for rank, boxes in verdict.rows().items():
        found.setdefault(tuple(boxes), []).append(rank)
    return [(tuple(ranks), boxes) for boxes, ranks in found.items()]


def draw_verdict(verdict: Verdict) -> Figure:
    """The smallest part that cannot finish.

    The framed call is a rank's current one. An arrow goes from there to the same call of ranks
    that do not come to it.

    Args:
        verdict: that ranks do not finish.
    """
    every = rows_of(verdict)
    rows = every[:MOST]
    wide = max(max(len(boxes) for _, boxes in rows) * (_WIDE + _GAP) + _GAP, _NARROWEST - _NAME)
    high = len(rows) * (_HIGH + _GAP) + _GAP
    figure = new_figure(wide + _NAME, high + 0.4)
    axes = figure.subplots()
    axes.set_xlim(-_NAME, wide)
    axes.set_ylim(high, 0)
    axes.axis("off")
    for row, (ranks, boxes) in enumerate(rows):
        axes.text(0.2, _middle(row), describe_ranks(ranks), ha="right", va="center", weight="bold")
        for column, box in enumerate(boxes):
            _draw_box(axes, box, _left(column), _middle(row))
        if not boxes:
            axes.text(_left(0), _middle(row), "never issues it", va="center", color=ALERT)
    for start, end in arrows(rows):
        _draw_arrow(axes, start, end)
    more = f"; {len(every) - len(rows):,} more rows are not drawn" if len(every) > len(rows) else ""
    title = f"{verdict}".partition("\n")[0]
    axes.set_title(f"{title}{more}", loc="left")
    return figure


def arrows(rows: Sequence[Row]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Arrows as rows and columns: from a rank in a call to a rank outside it."""
    places = [
        (row, column, box)
        for row, (_, boxes) in enumerate(rows) for column, box in enumerate(boxes)
    ]  # fmt: skip
    return [
        ((row, column), (other, place))
        for row, column, box in places if box.stands
        for other, place, same in places if same.event == box.event and not same.stands
    ]  # fmt: skip


def _middle(row: int) -> float:
    return _GAP + row * (_HIGH + _GAP) + _HIGH / 2


def _left(column: int) -> float:
    return _GAP + column * (_WIDE + _GAP)


def _draw_box(axes: Axes, box: Box, left: float, middle: float) -> None:
    from matplotlib.patches import FancyBboxPatch

    axes.add_patch(
        FancyBboxPatch(
            (left, middle - _HIGH / 2), _WIDE, _HIGH, boxstyle="round,pad=0,rounding_size=0.08",
            facecolor=FAINT if box.is_over else PAPER, edgecolor=ALERT if box.stands else INK,
            linewidth=2.2 if box.stands else 0.8,
        )
    )  # fmt: skip
    center: dict[str, Any] = {"ha": "center", "va": "center"}
    ink = ALERT if box.stands else INK
    axes.text(left + _WIDE / 2, middle - 0.1 * bool(box.where), box.call, color=ink, **center)
    axes.text(left + _WIDE / 2, middle + 0.14, box.where, fontsize=7.0, **center)


def _draw_arrow(axes: Axes, start: tuple[int, int], end: tuple[int, int]) -> None:
    """Between the sides of boxes that face each other."""
    (row, column), (to_row, to_column) = start, end
    if column == to_column:
        down = 1 if to_row > row else -1
        here = _left(column) + _WIDE / 2, _middle(row) + down * _HIGH / 2
        there = here[0], _middle(to_row) - down * _HIGH / 2
    else:
        right = to_column > column
        here = _left(column) + _WIDE * right, _middle(row)
        there = _left(to_column) + _WIDE * (not right), _middle(to_row)
    axes.annotate(
        "", xy=there, xytext=here,
        arrowprops={"arrowstyle": "-|>", "color": ALERT, "shrinkA": 1, "shrinkB": 1, "lw": 1.4},
    )  # fmt: skip
