"""The best grids for a model, each a bar of its step's parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from commgrid.cost_model.search import describe
from commgrid.cost_model.step import StepCost
from commgrid.cost_model.term import PARTS
from commgrid.cost_model.why import NAMES
from commgrid.viz.figure import INK, colour, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BAR = 0.62
_SHADES = dict(zip(PARTS, (5, 7, 0, 2, 4, 3, 1, 8), strict=True))


def draw_steps(rows: Sequence[StepCost]) -> Figure:
    """A bar for each grid, its parts side by side, the time and the memory behind it."""
    first = rows[0]
    figure = new_figure(6.4, 0.42 * len(rows) + 1.7)
    axes = figure.subplots()
    longest = max(step.seconds for step in rows)
    shown = [part for part in PARTS if any(s.parts[part] > 1e-3 * longest for s in rows)]
    starts = [0.0] * len(rows)
    for part in shown:
        widths = [step.parts[part] for step in rows]
        axes.barh(
            range(len(rows)), widths, _BAR, left=starts, color=colour(_SHADES[part]),
            label=NAMES[part],
        )  # fmt: skip
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for place, step in enumerate(rows):
        said = f"{step.seconds:.3g} s, {step.memory.total / 1e9:.0f} GB"
        axes.annotate(
            said, (starts[place], place), xytext=(4, 0), textcoords="offset points", va="center",
            color=INK,
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), [describe(step.config, step.model) for step in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, longest * 1.22)
    axes.set_xlabel("seconds of a step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(left=False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    axes.set_title(
        f"{first.model.name} on {first.config.world_size:,} devices of {first.cluster.name}",
        loc="left",
    )
    return figure
