"""What `commgrid bench` measured of collectives, and the cost model's lines beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from commgrid.cost_model.cluster import Cluster
from commgrid.cost_model.collective import collective_time
from commgrid.cost_model.fit import Measured
from commgrid.viz.figure import INK, PAPER, colour, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SHADES = (5, 10, 2, 1, 4)
_STEPS = 64  # of a line


def draw_costs(fitted: Sequence[Measured], others: Sequence[Measured], cluster: Cluster) -> Figure:
    """A panel for each collective: time by size, a line and a colour for each number of ranks.

    Args:
        fitted: what the cluster's fits are of, as full dots.
        others: what they have not seen, as rings.
        cluster: whose cost model draws the lines.
    """
    collectives = list(dict.fromkeys(row.collective for row in (*fitted, *others)))
    down = -(-len(collectives) // 2)
    across = min(2, len(collectives))
    figure = new_figure(4.8 * across, 3.4 * down)
    panels = figure.subplots(down, across, squeeze=False).flatten()
    spreads = sorted({row.spread for row in (*fitted, *others)})
    for axes, collective in zip(panels, collectives, strict=False):
        axes.set_title(collective, loc="left")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for place, spread in enumerate(spreads):
            shade = colour(_SHADES[place % len(_SHADES)])
            _draw_one(axes, collective, spread, fitted, others, cluster, shade)
        axes.set_xlabel("bytes, as nccl-tests counts them")
        axes.set_ylabel("ms")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[len(collectives) :]:
        axes.set_axis_off()
    panels[0].legend(frameon=False)
    _legend(figure, bool(others))
    return figure


def _legend(figure: Figure, has_others: bool) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=INK, linewidth=1.2, label="fitted")]
    for face, label in ((INK, "measured"), (PAPER, "measured, not fitted to"))[: 1 + has_others]:
        dot = Line2D([], [], linestyle="", marker="o", color=INK, markersize=4.5, label=label)
        dot.set_markerfacecolor(face)
        handles.append(dot)
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def _draw_one(
    axes: Axes,
    collective: str,
    spread: tuple[int, ...],
    fitted: Sequence[Measured],
    others: Sequence[Measured],
    cluster: Cluster,
    shade: str,
) -> None:
    """One line, and what was measured of it."""
    sizes: list[int] = []
    for rows, inside in ((fitted, shade), (others, PAPER)):
        mine = [row for row in rows if (row.collective, row.spread) == (collective, spread)]
        sizes += [row.size for row in mine]
        axes.plot(
            [row.size for row in mine], [row.seconds * 1e3 for row in mine], "o",
            color=shade, markerfacecolor=inside, markersize=4.5,
        )  # fmt: skip
    if not sizes:
        return
    least, most = min(sizes), max(sizes)
    line = [least * (most / least) ** (step / _STEPS) for step in range(_STEPS + 1)]
    times = [collective_time(collective, size, spread, cluster) * 1e3 for size in line]
    shape = "×".join(str(n) for n in spread if n > 1)
    axes.plot(line, times, color=shade, linewidth=1.2, label=f"{shape} ranks")
