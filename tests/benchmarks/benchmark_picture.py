"""A benchmark's numbers beside a peer's, from its `--json` output."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commgrid.errors import SpecError
from commgrid.viz.figure import INK, colour, new_figure
from tests.benchmarks.json_file import read_json
from tests.benchmarks.report import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BAR = 0.36
_LOG_FROM = 30.0
"""The least ratio of the largest to the smallest value for a logarithmic scale."""


def read_benchmark(path: Path, wanted: Sequence[str] = ()) -> list[Row]:
    """The rows of a benchmark's JSON, or those whose metric or case holds one of `wanted`.

    Raises:
        SpecError: a file that is not there, is no such object, or has no row that is wanted.
    """
    rows = read_json(
        path,
        "the object that a benchmark prints with --json, "
        '{"machine": …, "versions": …, "rows": […]}',
        lambda found: [_row(row) for row in _filled(found["rows"])],
    )
    kept = [r for r in rows if not wanted or any(w in r.metric or w in r.case for w in wanted)]
    if not kept:
        metrics = ", ".join(sorted({repr(row.metric) for row in rows})) or "none"
        raise SpecError(f"{path}: no row of {', '.join(wanted)}; its metrics are {metrics}")
    return kept


def _filled(rows: Any) -> list[Any]:
    """The rows, of which there is one at least.

    Raises:
        TypeError, ValueError: they are no list, or none.
    """
    if not isinstance(rows, list):
        raise TypeError(f"{rows!r} is no list")
    if not rows:
        raise ValueError("it has no rows")
    return rows


def _row(row: Any) -> Row:
    theirs, ratio, spread = row["peer_value"], row.get("ratio"), row.get("spread")
    return Row(
        str(row["case"]), str(row["metric"]), str(row["unit"]), float(row["ours"]),
        str(row["peer"]), None if theirs is None else float(theirs), ratio, spread,
    )  # fmt: skip


def as_text(rows: Sequence[Row]) -> str:
    """A line for each row."""
    width = max(len(f"{row.case}: {row.metric}") for row in rows)
    return "\n".join(
        f"{f'{row.case}: {row.metric}':{width}}  {value(row.ours)} {row.unit}"
        + ("" if row.peer_value is None else f"   {row.peer} {value(row.peer_value)} {row.unit}")
        for row in rows
    )


def value(number: float) -> str:
    """Three digits, or all of a whole number.

    >>> value(45197.0), value(0.02414), value(2.2766)
    ('45,197', '0.0241', '2.28')
    """
    return f"{number:,.0f}" if number == int(number) or number >= 1000 else f"{number:.3g}"


def draw_benchmark(rows: Sequence[Row]) -> Figure:
    """A panel for each metric and peer; in it two bars for each case."""
    panels: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        panels.setdefault((row.metric, row.unit, row.peer), []).append(row)
    across = min(2, len(panels))
    down = -(-len(panels) // across)
    tallest = max(map(len, panels.values()))
    figure = new_figure(4.6 * across, (0.62 * tallest + 0.9) * down)
    grid = figure.subplots(down, across, squeeze=False).flatten()
    for axes, (about, panel) in zip(grid, panels.items(), strict=False):
        _draw_panel(axes, *about, panel)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    return figure


def _draw_panel(axes: Axes, metric: str, unit: str, peer: str, rows: Sequence[Row]) -> None:
    values = [v for row in rows for v in (row.ours, row.peer_value) if v]
    if values and max(values) / min(values) > _LOG_FROM:
        axes.set_xscale("log")
        axes.set_xlim(min(values) / 3, max(values) * 12)
    else:
        axes.set_xlim(0, max(values, default=1.0) * 1.25)
    for place, row in enumerate(rows):
        for offset, number, shade in ((-1, row.ours, 5), (1, row.peer_value, 1)):
            y = place + offset * _BAR / 2
            axes.barh(y, number or 0.0, _BAR * 0.92, color=colour(shade))
            said = "not run" if number is None else value(number)
            at = axes.get_xlim()[0] if number is None else number
            axes.annotate(
                said, (at, y), xytext=(4, 0), textcoords="offset points", va="center", color=INK
            )
    axes.set_yticks(range(len(rows)), [row.case for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(unit)
    axes.set_title(metric, loc="left", pad=18)
    for shade, who, at in ((5, "commgrid", 0.0), (1, peer, 0.32)):
        axes.text(at, 1.02, f"■ {who}", color=colour(shade), transform=axes.transAxes, va="bottom")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(left=False)
