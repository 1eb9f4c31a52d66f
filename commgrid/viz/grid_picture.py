"""A grid drawn: a panel for each name, ranks as cells by node, a colour for each group."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING

from commgrid.layout.axis_names import sizes_text
from commgrid.planning.plan import GroupPlan
from commgrid.viz.figure import ALERT, FAINT, INK, colour, ink_on, new_figure
from commgrid.viz.view import GridView
from commgrid.wording import several

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_PER_ROW = 8  # cells of a node that stand side by side
_GAP = 0.45  # between nodes, in cells
_NUMBERED = 128  # above so many ranks only the first of each row has its number
_PANEL = 5.0  # inches
_LINE = 0.84  # where a line starts in a cell, from its top
_COLOURED = 256  # above so many ranks only one rank's groups stand out
_LINKS = 64  # members of a group that lines join


@dataclass(frozen=True)
class CellPlaces:
    """Where the cells of a panel are, in cells, from the upper left corner.

    Args:
        cells: rank to the corner of its cell.
        nodes: node to the corner of its box.
        box: a node's width and height.
        extent: the width and height of all.
    """

    cells: dict[int, tuple[float, float]]
    nodes: dict[int, tuple[float, float]]
    box: tuple[float, float]
    extent: tuple[float, float]


def place(view: GridView) -> CellPlaces:
    """Nodes in columns, the whole about 1.5 times as wide as high."""
    per_node = max(len(ranks) for ranks in view.nodes.values())
    across = min(per_node, _MOST_PER_ROW)
    high = math.ceil(per_node / across)
    width, height = across + _GAP, high + _GAP
    columns = max(1, round(math.sqrt(1.5 * len(view.nodes) * height / width)))
    rows = math.ceil(len(view.nodes) / columns)
    columns = math.ceil(len(view.nodes) / rows)
    cells, nodes = {}, {}
    for number, (node, ranks) in enumerate(view.nodes.items()):
        x, y = number // rows * width, number % rows * height
        nodes[node] = (x, y)
        for i, rank in enumerate(ranks):
            cells[rank] = (x + i % across, y + i // across)
    extent = (columns * width - _GAP, rows * height - _GAP)
    return CellPlaces(cells, nodes, (float(across), float(high)), extent)


def draw_grid(view: GridView) -> Figure:
    """A panel for each name that the view shows, one below the other, as a narrow page has room.

    Where the view has a rank, its group stands out in every panel and lines join its members, red
    where they leave a node; else that is done for the first group that leaves one. Of many ranks
    it is the first one's: hundreds of groups have too few colours.
    """
    if view.rank is None and view.spec.world_size > _COLOURED:
        view = replace(view, rank=view.spec.grid_ranks[0])
    places = place(view)
    tall = _PANEL * places.extent[1] / places.extent[0]
    title = 0.55 + 0.2 * max(view.describe(name).count("; ") for name in view.shown)
    count = len(view.shown)
    figure = new_figure(_PANEL, max(count * (tall + title), 1.6) + 0.6)
    for axes, name in zip(figure.subplots(count, squeeze=False).flat, view.shown, strict=True):
        _panel(axes, view, places, name)
    figure.suptitle(_title(view), fontsize=9.5, ha="center")
    return figure


def _title(view: GridView) -> str:
    dense, *others = (sizes_text(dict(region.numbers)) for region in view.spec.regions)
    title = several(view.spec.world_size, "rank") + (f": {dense}" if dense else "")
    for region, sizes in zip(view.spec.regions[1:], others, strict=True):
        title += f"; {region.name} {sizes}" if sizes else ""
    if len(view.nodes) > 1:
        title += f" on {several(len(view.nodes), 'node')}"
    if view.rank is None:
        return title
    return f"{title}\nrank {view.rank} is {GroupPlan.for_rank(view.spec, view.rank).place}"


def _panel(axes: Axes, view: GridView, places: CellPlaces, name: str) -> None:
    from matplotlib.patches import Rectangle

    axes.set_title(view.describe(name).replace("; ", "\n"), fontsize=9.5, loc="left")
    axes.set_xlim(-0.25, places.extent[0] + 0.25)
    axes.set_ylim(places.extent[1] + 0.25, -0.25)
    axes.set_aspect("equal")
    axes.set_axis_off()
    numbers, chosen = view.numbers(name), _chosen(view, name)
    size = 8.0 if len(places.cells) <= 16 else 6.0 if len(places.cells) <= 64 else 4.0
    for x, y in places.nodes.values() if len(view.nodes) > 1 else ():
        corner = (x - 0.12, y - 0.12)
        box = Rectangle(corner, places.box[0] + 0.24, places.box[1] + 0.24, fill=False)
        box.set(edgecolor="#8a929c", linewidth=0.6)
        axes.add_patch(box)
    for rank, (x, y) in places.cells.items():
        faded = view.rank is not None and rank not in chosen
        face = colour(numbers[rank]) if rank in numbers else FAINT
        cell = Rectangle((x + 0.04, y + 0.04), 0.92, 0.92, facecolor=face, linewidth=0)
        cell.set_alpha(0.3 if faded else 1.0)
        axes.add_patch(cell)
        if len(places.cells) <= _NUMBERED or x == places.nodes[view.node_of(rank)][0]:
            axes.text(
                x + 0.5, y + 0.46, str(rank), ha="center", va="center", fontsize=size,
                color=INK if faded else ink_on(face),
            )  # fmt: skip
    _links(axes, view, places, chosen)
    if view.rank is not None:
        x, y = places.cells[view.rank]
        frame = Rectangle((x, y), 1, 1, fill=False, edgecolor=INK, linewidth=2.0)
        axes.add_patch(frame)


def _chosen(view: GridView, name: str) -> tuple[int, ...]:
    """The group with joined members: the rank's own, or the first one across nodes."""
    groups = view.groups(name)
    if view.rank is not None:
        return next((group for group in groups if view.rank in group), ())
    return next((g for g in groups if len({view.node_of(rank) for rank in g}) > 1), ())


def _links(axes: Axes, view: GridView, places: CellPlaces, group: tuple[int, ...]) -> None:
    for one, other in islice(pairwise(group), _LINKS - 1):
        leaves = view.node_of(one) != view.node_of(other)
        (x, y), (u, v) = places.cells[one], places.cells[other]
        axes.plot(
            [x + 0.5, u + 0.5], [y + _LINE, v + _LINE],  # below the numbers
            color=ALERT if leaves else INK, linewidth=1.3 if leaves else 0.8,
            marker="o", markersize=2.5, alpha=0.85, solid_capstyle="round",
        )  # fmt: skip
