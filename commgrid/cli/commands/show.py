"""`commgrid show`: pictures of a grid and of a schedule."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from commgrid.cli.commands import plan_model
from commgrid.cli.flags import file_of, names, whole
from commgrid.cli.grid_options import (
    GRID_FLAGS,
    add_cluster_options,
    add_grid_options,
    flag_of,
    is_given,
    read_cluster,
    read_nodes,
    read_spec,
    refuse_unused,
    resolve,
)
from commgrid.cli.output import columns, give
from commgrid.cost_model.cluster import nodes_of
from commgrid.cost_model.crossing import check_within
from commgrid.errors import SpecError
from commgrid.pipeline_schedules.schedule import Schedule, make_schedule
from commgrid.pipeline_schedules.simulator import Simulation, simulate
from commgrid.viz.figure import SUFFIXES, drawing, save, write_text
from commgrid.viz.grid_picture import draw_grid
from commgrid.viz.page import draw_page, page_data
from commgrid.viz.schedule_picture import draw_schedule
from commgrid.viz.view import DEFAULT_GPUS_PER_NODE, GridView

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DESCRIPTION = "Draws a grid's groups on its nodes, or a pipeline's schedule."
EXAMPLES = """examples:
  commgrid show --tp 2 --pp 2 --world-size 16                     (a table)
  commgrid show --tp 8 --pp 4 --world-size 512 -o grid.svg
  commgrid show --tp 16 --world-size 64 --cluster h100 -o grid.svg
  commgrid show --tp 8 --pp 4 --world-size 128 --cluster h100 --model gpt-175b -o grid.html
  commgrid show --tp 4 --ep 8 --etp 1 --world-size 64 --groups ep,edp --rank 37 -o grid.png
  commgrid show grid.yaml --world-size 64 -o grid.html            (a page to explore)
  commgrid show --schedule zb-h1 --stages 4 --microbatches 8 -o schedule.svg

The suffix of -o says what is written: .svg, .png and .pdf need matplotlib, .html needs nothing.
"""
_SIZES = {
    "stages": "of the pipeline",
    "microbatches": "of a step",
    "virtual_stages": "of a rank, of interleaved (default 1)",
}
_OF_A_GRID = ("groups", "rank", "model", "cluster", "gpus_per_node", "nodes")
_MOST_DRAWN = 100_000  # actions of a schedule
_PARTS = 4  # of a staircase that is folded to the terminal's width


def add_options(parser: argparse.ArgumentParser) -> None:
    add_grid_options(parser)
    parser.add_argument(
        "-o", "--output", type=file_of(*SUFFIXES, ".html"), metavar="FILE",
        help=".svg, .png, .pdf or .html",
    )  # fmt: skip
    parser.add_argument(
        "--groups",
        type=names,
        metavar="NAMES",
        help="groups to draw, with commas (default: the axes)",
    )
    parser.add_argument("--rank", type=whole(0), metavar="R", help="a global rank to point out")
    add_cluster_options(parser)
    parser.add_argument(
        "--model", metavar="NAME",
        help="with --cluster: what a step of it sends on each name, and over the links between",
    )  # fmt: skip
    pipeline = parser.add_argument_group("schedule")
    pipeline.add_argument("--schedule", help="gpipe, 1f1b, interleaved or zb-h1")
    for size, meaning in _SIZES.items():
        pipeline.add_argument(flag_of(size), type=whole(1), metavar="N", help=meaning)


def run(args: argparse.Namespace) -> int:
    _check(args)
    read_nodes(args)
    simulation = _simulation(args)
    if simulation is not None and not _has_grid(args):
        return _show_schedule(args, simulation)
    _check_beside_grid(args)
    view = _view(args)
    simulations = () if simulation is None else (simulation,)
    if args.output is not None and args.output.suffix == ".html":
        write_text(args.output, draw_page(view, simulations))
        return _written(args)
    return _give(args, lambda: page_data(view), view.as_text, lambda: draw_grid(view))


def _show_schedule(args: argparse.Namespace, simulation: Simulation) -> int:
    about = {
        "schedule": simulation.schedule.name,
        "makespan": simulation.makespan,
        "bubble_fraction": simulation.bubble_fraction,
        "peak_live": list(simulation.peak_live),
    }
    return _give(
        args,
        lambda: about,
        lambda: _staircase(simulation, columns()),
        lambda: draw_schedule(simulation),
    )


def _staircase(simulation: Simulation, room: int | None) -> str:
    """The schedule in letters; on a terminal in parts as wide as it, of many only the first."""
    parts = simulation.draw(columns=room).split("\n\n")
    if len(parts) <= _PARTS:
        return "\n\n".join(parts)
    note = f"… the first {_PARTS} of {len(parts)} parts; -o schedule.svg draws all of it"
    return "\n\n".join([*parts[:_PARTS], note])


def _check(args: argparse.Namespace) -> None:
    """What does not go together."""
    if not args.schedule:
        refuse_unused(args, _SIZES, "goes with --schedule, as --schedule 1f1b")
    if args.schedule and not _has_grid(args):
        refuse_unused(args, _OF_A_GRID, "goes with a grid, and there is none; give its sizes")


def _has_grid(args: argparse.Namespace) -> bool:
    return any(is_given(args, key) for key in GRID_FLAGS)


def _check_beside_grid(args: argparse.Namespace) -> None:
    """Only a page shows a grid and a schedule."""
    if args.schedule and (args.output is None or args.output.suffix != ".html"):
        raise SpecError(
            f"--schedule {args.schedule} beside a grid: only a page shows both, as -o grid.html; "
            "leave one of them out"
        )


def _view(args: argparse.Namespace) -> GridView:
    cluster = read_cluster(args)
    spec = resolve(read_spec(args), args.world_size)
    if cluster is None:
        if args.model is not None:
            raise SpecError(f"--model {args.model}: goes with --cluster, as --cluster h100")
        check_within(spec, nodes_of(DEFAULT_GPUS_PER_NODE))
        return GridView(spec, DEFAULT_GPUS_PER_NODE, args.groups or [], args.rank)
    check_within(spec, cluster)
    notes: dict[str, str] = {}
    if args.model is not None:
        model, cluster = plan_model.read_job(args)
        notes = plan_model.traffic_notes(plan_model.given_step(spec, model, cluster))
    return GridView(
        spec, names=args.groups or [], rank=args.rank, cluster=cluster, notes=notes
    )  # fmt: skip


def _simulation(args: argparse.Namespace) -> Simulation | None:
    if not args.schedule:
        return None
    for size in ("stages", "microbatches"):
        if getattr(args, size) is None:
            raise SpecError(f"--schedule {args.schedule}: needs --{size} N")
    num = args.stages * args.microbatches * (args.virtual_stages or 1)
    if num > _MOST_DRAWN:
        raise SpecError(
            f"--stages {args.stages} × --microbatches {args.microbatches} × --virtual-stages "
            f"{args.virtual_stages or 1}: {num:,} forwards are too many to show; expected at most "
            f"{_MOST_DRAWN:,}, so show fewer microbatches"
        )
    schedule: Schedule = make_schedule(
        args.schedule,
        num_stages=args.stages,
        num_microbatches=args.microbatches,
        num_chunks=args.virtual_stages or 1,
    )
    return simulate(schedule)


def _give(
    args: argparse.Namespace,
    found: Callable[[], Mapping[str, Any]],
    text: Callable[[], str],
    draw: Callable[[], Figure],
) -> int:
    """The picture where -o says so, else JSON or text."""
    if args.output is None:
        give(args, found, text)
        return 0
    if args.output.suffix == ".html":
        raise SpecError(
            f"-o {args.output}: this picture is written as .svg, .png or .pdf; a page, .html, "
            "shows a grid"
        )
    with drawing():
        save(draw(), args.output)
    return _written(args)


def _written(args: argparse.Namespace) -> int:
    path = str(args.output)
    give(args, lambda: {"written": path}, lambda: f"wrote {path}")
    return 0
