"""HTML pages that need no network: a grid to hover, tap or type a rank, and traces over time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from commgrid.errors import SpecError
from commgrid.pipeline_schedules.simulator import Simulation
from commgrid.planning.plan import GroupPlan
from commgrid.version import VERSION
from commgrid.viz.view import GridView
from commgrid.wording import several

MOST_RANKS = 32_768
"""Each rank is an element of the page, which browsers stand only so many of."""


def page_data(view: GridView, simulations: tuple[Simulation, ...] = ()) -> dict[str, Any]:
    """Data of the page: for each name, the number of every rank's group (-1: in none)."""
    spec = view.spec
    ranks = [rank for held in view.nodes.values() for rank in held]
    names = {}
    for name, definition in spec.definitions.items():
        if name in spec.created_names:
            numbers = view.numbers(name)
            names[name] = {
                "region": definition.region,
                "groups": [numbers.get(rank, -1) for rank in ranks],
                "about": view.describe(name),
            }
    return {
        "commgrid": VERSION,
        "title": several(spec.world_size, "rank"),
        "ranks": ranks,
        "nodes": {str(node): len(held) for node, held in view.nodes.items()},
        "regions": [
            {"name": region.name, "axes": [list(pair) for pair in region.numbers]}
            for region in spec.regions
        ],
        "coordinates": _coordinates(view, ranks),
        "names": names,
        "shown": view.shown[0],
        "rank": view.rank,
        "schedules": [_schedule(simulation) for simulation in simulations],
    }


def _coordinates(view: GridView, ranks: list[int]) -> dict[str, list[int]]:
    """Axis to the index of every rank."""
    found: dict[str, list[int]] = {}
    for rank in ranks:
        for axis, index in GroupPlan.for_rank(view.spec, rank).coordinate.items():
            found.setdefault(axis, []).append(index)
    return found


def _schedule(simulation: Simulation) -> dict[str, Any]:
    return {
        "name": str(simulation.schedule),
        "stages": simulation.schedule.num_stages,
        "bubble": simulation.bubble_fraction,
        "end": simulation.makespan,
        "actions": [
            [
                action.stage,
                action.letter,
                action.microbatch,
                action.chunk,
                *simulation.spans[action],
            ]
            for order in simulation.schedule.orders
            for action in order
        ],
    }


def draw_page(
    view: GridView,
    simulations: tuple[Simulation, ...] = (),
) -> str:
    """The page.

    Args:
        view: what it opens with.
        simulations: schedules below the grid.

    Raises:
        SpecError: more ranks than a page can show.
    """
    if view.spec.world_size > MOST_RANKS:
        raise SpecError(
            f"a page shows at most {MOST_RANKS:,} ranks, the grid has {view.spec.world_size:,}; "
            "show a smaller dp, which looks the same"
        )
    return _filled("page.html", page_data(view, simulations))


def _filled(file: str, data: Mapping[str, Any]) -> str:
    """A page of this folder with its data, and what all pages have."""
    page, style, elements = (
        (files("commgrid.viz") / each).read_text(encoding="utf-8")
        for each in (file, "style.css", "elements.js")
    )
    text = json.dumps(data, separators=(",", ":"))
    # Within a script element only these could end or change it; JSON reads them back the same.
    safe = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    page = page.replace("/*STYLE*/", style).replace("/*ELEMENTS*/", elements)
    return page.replace("/*DATA*/null", safe)


MOST_CALLS = 200_000
"""A browser goes through all of them for every picture."""


def draw_trace_page(found: Mapping[str, Any], diagnosis: Mapping[str, Any] | None = None) -> str:
    """The page of the ranks' records.

    Args:
        found: as `commgrid trace --json` prints it.
        diagnosis: as `commgrid diagnose --json` prints it; None: none is shown.

    Raises:
        SpecError: more calls than a page shows.
    """
    calls = sum(len(each["calls"]) for each in found["traces"])
    if calls > MOST_CALLS:
        raise SpecError(
            f"a page shows at most {MOST_CALLS:,} calls, these are {calls:,}; choose --ranks or a "
            "--group, or write -o trace.json for Perfetto"
        )
    return _filled("trace.html", {"found": found, "diagnosis": diagnosis})
