"""`commgrid show`: pictures of a grid, of a schedule, and of runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commgrid.cli.grid_options import add_command, grid_flags_given, read_spec, resolve
from commgrid.cli.show_sharding import ShownSharding, add_sharding_options
from commgrid.errors import SpecError
from commgrid.pipeline.schedule import Schedule, make_schedule
from commgrid.pipeline.simulator import Simulation, simulate
from commgrid.viz.curves_picture import draw_curves, read_curve
from commgrid.viz.figure import drawing, save
from commgrid.viz.grid_picture import draw_grid
from commgrid.viz.page import draw_page, page_data, write_page
from commgrid.viz.schedule_picture import draw_schedule, read_spans
from commgrid.viz.view import DEFAULT_GPUS_PER_NODE, GridView

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_EXAMPLES = """examples:
  commgrid show --tp 2 --pp 2 --world-size 16                     (a table)
  commgrid show --tp 8 --pp 4 --world-size 512 -o grid.svg
  commgrid show --tp 4 --ep 8 --etp 1 --world-size 64 --names ep,edp --rank 37 -o grid.png
  commgrid show grid.yaml --world-size 64 -o grid.html            (a page to explore)
  commgrid show --schedule zb-h1 --stages 4 --microbatches 8 -o schedule.svg
  commgrid show --schedule 1f1b --stages 2 --microbatches 4 --spans runs/spans*.jsonl -o run.svg
  commgrid show --metrics a.jsonl b.jsonl -o loss.svg
  commgrid show --sharding 900,90x4,400 --cp 4 -o sharding.svg
  commgrid show --sharding 30,4,9 --cp 3 --way ring

The suffix of -o says what is written: .svg, .png and .pdf need matplotlib, .html needs nothing.
"""
_SIZES = ("stages", "microbatches", "chunks")


def add_parser(commands: Any) -> None:
    parser = add_command(
        commands,
        "show",
        summary="pictures of a grid, a pipeline's schedule, or the losses of runs",
        description="Draws a grid's groups on its nodes, a schedule, or loss curves.",
        examples=_EXAMPLES,
        run=run,
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help=".svg, .png, .pdf or .html"
    )
    parser.add_argument(
        "--names", metavar="NAMES", help="groups to draw, with commas (default: the axes)"
    )
    parser.add_argument("--rank", metavar="R", help="a global rank to point out")
    parser.add_argument(
        "--gpus-per-node",
        default=DEFAULT_GPUS_PER_NODE,
        type=int,
        metavar="N",
        help=f"ranks of a node (default {DEFAULT_GPUS_PER_NODE})",
    )
    pipeline = parser.add_argument_group("schedule")
    pipeline.add_argument("--schedule", help="gpipe, 1f1b, interleaved or zb-h1")
    for size in _SIZES:
        pipeline.add_argument(f"--{size}", type=int, metavar="N")
    pipeline.add_argument(
        "--spans", nargs="+", type=Path, default=[], metavar="FILE",
        help="what Pipeline.write_spans wrote on each stage, drawn beside the plan",
    )  # fmt: skip
    add_sharding_options(parser)
    runs = parser.add_argument_group("runs")
    runs.add_argument(
        "--metrics", nargs="+", type=Path, default=[], metavar="FILE",
        help="what train_gpt --metrics wrote: loss curves of several grids on one plot",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    _check(args)
    if args.sharding:
        shown = ShownSharding(args)
        return _give(args, shown.as_dict(), shown.as_text(), shown.draw)
    if args.metrics:
        curves = [read_curve(path) for path in args.metrics]
        rows = [{"run": c.name, "steps": list(c.steps), "losses": list(c.losses)} for c in curves]
        text = "\n".join(
            f"{c.name}: steps {c.steps[0]} to {c.steps[-1]}, loss {c.losses[0]:.6g} to "
            f"{c.losses[-1]:.6g}" for c in curves
        )  # fmt: skip
        return _give(args, {"curves": rows}, text, lambda: draw_curves(curves))
    simulation = _simulation(args)
    if simulation is not None and not grid_flags_given(args):
        measured = read_spans(args.spans, simulation.schedule) if args.spans else None
        about = {
            "schedule": simulation.schedule.name,
            "makespan": simulation.makespan,
            "bubble_fraction": simulation.bubble_fraction,
            "peak_live": list(simulation.peak_live),
        }
        return _give(
            args, about, simulation.draw(), lambda: draw_schedule(simulation, measured)
        )  # fmt: skip
    _check_beside_grid(args)
    view = _view(args)
    simulations = () if simulation is None else (simulation,)
    if args.output is not None and args.output.suffix == ".html":
        write_page(draw_page(view, simulations), args.output)
        return _written(args.output)
    return _give(args, page_data(view), view.as_text(), lambda: draw_grid(view))


def _check(args: argparse.Namespace) -> None:
    """What does not go together."""
    if args.metrics and (args.schedule or grid_flags_given(args)):
        raise SpecError("--metrics: draws runs alone; leave the grid and --schedule out")
    if args.mask and not args.sharding:
        raise SpecError(f"--mask {args.mask}: goes with --sharding LENGTHS")
    if args.way and not args.sharding:
        raise SpecError(f"--way {args.way}: goes with --sharding LENGTHS")
    beside = [size for size in (*_SIZES, "spans") if getattr(args, size)]
    if beside and not args.schedule:
        raise SpecError(f"--{beside[0]}: goes with --schedule, as --schedule 1f1b")


def _check_beside_grid(args: argparse.Namespace) -> None:
    """Only a page shows a grid and a schedule."""
    if args.spans:
        raise SpecError("--spans: are drawn beside a schedule alone; leave the grid out")
    if args.schedule and (args.output is None or args.output.suffix != ".html"):
        raise SpecError(
            f"--schedule {args.schedule} beside a grid: only a page shows both, as -o grid.html; "
            "leave one of them out"
        )


def _view(args: argparse.Namespace) -> GridView:
    names = args.names.split(",") if args.names else []
    if args.rank is not None and not args.rank.isdigit():
        raise SpecError(f"--rank {args.rank}: expected a rank from 0 on")
    rank = None if args.rank is None else int(args.rank)
    return GridView(resolve(read_spec(args), args.world_size), args.gpus_per_node, names, rank)


def _simulation(args: argparse.Namespace) -> Simulation | None:
    if not args.schedule:
        return None
    for size in ("stages", "microbatches"):
        if getattr(args, size) is None:
            raise SpecError(f"--schedule {args.schedule}: needs --{size} N")
    schedule: Schedule = make_schedule(
        args.schedule,
        num_stages=args.stages,
        num_microbatches=args.microbatches,
        num_chunks=args.chunks or 1,
    )
    return simulate(schedule)


def _give(
    args: argparse.Namespace, found: dict[str, Any], text: str, draw: Callable[[], Figure]
) -> int:
    """The picture where -o says so, else JSON or text."""
    if args.output is None:
        print(json.dumps(found) if args.json else text)
        return 0
    if args.output.suffix == ".html":
        raise SpecError(f"-o {args.output}: a page shows a grid; give its sizes or GRID.yaml")
    with drawing():
        save(draw(), args.output)
    return _written(args.output)


def _written(path: Path) -> int:
    print(f"wrote {path}")
    return 0
