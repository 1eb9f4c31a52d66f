"""`commgrid audit`: a training script on several grids, and where they part."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from commgrid.cli.output import give
from commgrid.errors import SpecError
from commgrid.layout.ranks import as_ranks
from commgrid.planning.audited import AuditedGrid

DESCRIPTION = (
    "Runs a training script, unchanged, on several grids, and compares losses, "
    "weights, gradients and buffers step by step."
)
EXAMPLES = """examples:
  commgrid audit train.py --grids "dp=1" "tp=2" "dp=2" "pp=2" -- --layers 2 --steps 3
  commgrid audit train.py --grids "dp=1" "tp=2 --sequence-parallel" -- --dtype fp64
  commgrid audit --dry train.py --grid "tp=4 pp=2" --world-size 64 -o runs/dry -- --layers 4
  commgrid audit pretrain.py --same-weights --grids "tp=1" "tp=2 --tensor-model-parallel-size 2"

Everything after -- is the script's; so is what follows a grid's sizes, on that grid alone. Each
grid is run on as many ranks as its sizes make, with torchrun's variables; commgrid.initialize takes
the sizes instead of its own. Take a small model, fp64, no dropout. Exit status: 0 if no grid parts
from the first, 1 if one does, 2 if the script fails or an argument is wrong, 3 if no grid parts and
some cannot be compared as a whole, since names of parameters do not say which are the same.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "script", type=Path, nargs="?", metavar="SCRIPT",
        help="the program, as torchrun would be given it",
    )  # fmt: skip
    add(
        "--grids", "--grid", nargs="+", required=True, metavar="GRID",
        help="sizes as 'tp=2 dp=2', and the script's flags for this grid; the first is the "
        "reference",
    )  # fmt: skip
    add("--steps", type=int, default=3, metavar="N", help="optimizer steps (default 3)")
    add(
        "--tolerance", type=float, metavar="X",
        help="relative, of norms (default 1e-9 for fp64 weights, 1e-4 for fp32)",
    )  # fmt: skip
    add(
        "--same-weights", action="store_true",
        help="begin with the first grid's weights, where the script draws others on other grids",
    )  # fmt: skip
    add("--timeout", type=float, default=600.0, metavar="S", help="seconds a grid (default 600)")
    add("--keep", type=Path, metavar="DIR", help="keep the records there")
    add(
        "--dry", action="store_true",
        help="run nothing: record the collectives of one step of a grid that may be large",
    )  # fmt: skip
    add("--world-size", type=int, metavar="N", help="with --dry: ranks; dp is what sizes leave")
    add("--ranks", metavar="LIST", help="with --dry: which are recorded, as 0-7,16 (default all)")
    add("-o", "--output", type=Path, metavar="DIR", help="with --dry: where records are left")


def run(args: argparse.Namespace) -> int:
    if args.script is None:
        args.script = _script_behind(args.grids)
    for flag, value in (("--steps", args.steps), ("--timeout", args.timeout)):
        if value <= 0:
            raise SpecError(f"{flag} {value}: expected above 0")
    if args.tolerance is not None and not 0 < args.tolerance < 1:
        raise SpecError(f"--tolerance {args.tolerance}: expected between 0 and 1")
    if not args.script.is_file():
        raise SpecError(f"{args.script}: there is no such program; name a Python file")
    if args.dry:
        return _dry(args)
    for flag, given in (
        ("--world-size", args.world_size), ("--ranks", args.ranks), ("-o", args.output)
    ):  # fmt: skip
        if given is not None:
            raise SpecError(f"{flag} is about --dry; the sizes of each grid say its ranks")
    grids = [AuditedGrid.parse(text) for text in args.grids]
    from commgrid.audit.auditing import audit

    found = audit(
        args.script, grids, args.rest, steps=args.steps, tolerance=args.tolerance,
        timeout=args.timeout, same_weights=args.same_weights, keep=args.keep,
        tell=partial(print, file=sys.stderr, flush=True),
    )  # fmt: skip
    give(args, found.as_dict, lambda: found.text)
    return 1 if found.parts else 0 if found.complete else 3


def _script_behind(grids: list[str]) -> Path:
    """The program, where it was given after the grids, which argparse takes it for one of."""
    if len(grids) > 1 and grids[-1].endswith(".py"):
        return Path(grids.pop())
    raise SpecError("SCRIPT is not given; expected commgrid audit train.py --grids dp=1 tp=2")


def _dry(args: argparse.Namespace) -> int:
    if len(args.grids) != 1 or args.output is None:
        raise SpecError("--dry records one grid in a folder; give one --grid, and -o DIR")
    grid = AuditedGrid.parse(args.grids[0], args.world_size)
    ranks = None if args.ranks is None else as_ranks(args.ranks)
    from commgrid.audit.dry import dry
    from commgrid.launching.script import run_script

    run = partial(run_script, args.script, (*args.rest, *grid.flags))
    found = dry(run, args.script.name, grid, args.output, ranks=ranks, timeout=args.timeout)
    give(
        args, found.as_dict,
        lambda: f"{found.script} on {found.grid}: {found.ranks:,} of {found.world_size:,} ranks, "
        f"{found.calls:,} calls in {found.folder}; see commgrid verify and commgrid trace",
    )  # fmt: skip
    return 0
