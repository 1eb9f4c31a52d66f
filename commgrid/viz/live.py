"""The picture of a live grid, from the process of one of its ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from commgrid.cost_model.cluster import Cluster, nodes_of
from commgrid.planning.spec import GridSpec
from commgrid.viz.figure import check_suffix, drawing, save, write_text
from commgrid.viz.grid_picture import draw_grid
from commgrid.viz.page import draw_page
from commgrid.viz.view import DEFAULT_GPUS_PER_NODE, GridView

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def show(
    spec: GridSpec,
    rank: int,
    path: str | Path | None,
    names: Sequence[str],
    gpus_per_node: int | None,
) -> Figure | None:
    """A figure, or nothing where it was written to a path; see `HyperCommGrid.show`."""
    file = None if path is None else Path(path)
    if file is not None:
        check_suffix(file)
    if gpus_per_node is None:
        told = {key: value for key, value in os.environ.items() if key == "LOCAL_WORLD_SIZE"}
        gpus_per_node = Cluster.from_launcher(nodes_of(DEFAULT_GPUS_PER_NODE), told).per_node
    view = GridView(spec, gpus_per_node, names, rank)
    if file is not None and file.suffix == ".html":
        write_text(file, draw_page(view))
        return None
    with drawing():
        figure = draw_grid(view)
        if file is None:
            return figure
        save(figure, file)
    return None
