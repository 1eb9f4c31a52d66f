"""`commgrid check`: starts the grid under a launcher and tries every communicator."""

from __future__ import annotations

import argparse

from commgrid.cli.flags import above_zero
from commgrid.cli.grid_options import add_grid_options, read_spec
from commgrid.cli.output import give

DESCRIPTION = "Starts the grid on real ranks and runs a collective on every communicator."
EXAMPLES = """examples:
  torchrun --standalone --nproc-per-node 8 -m commgrid check --tp 2 --pp 2
  srun python -m commgrid check grid.yaml --backend nccl --json

Every rank starts the grid, gathers its peers' ranks over each communicator and compares
them with the plan. Exit status 0: all good; 2: wrong input, a rank that did not come, or
a communicator with other members, which the message names.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_grid_options(parser, world_size=False)
    parser.add_argument("--backend", help="gloo, nccl, … (default: NCCL where there is CUDA)")
    parser.add_argument(
        "--timeout",
        type=above_zero("seconds above 0"),
        default=60.0,
        metavar="S",
        help="seconds for start-up, and for each communicator (default 60)",
    )


def run(args: argparse.Namespace) -> int:
    # torch, which the other commands do without
    from commgrid.runtime.registry import shutdown
    from commgrid.runtime.start import initialize

    grid = initialize(
        config=read_spec(args), backend=args.backend, startup_timeout=args.timeout, name="check"
    )
    try:
        report = None if grid is None else grid.check(timeout=args.timeout)
        if report is not None and grid.rank == grid.get_ranks()[0]:
            rows = [
                {"names": list(names), "size": size, "seconds": seconds}
                for names, size, seconds in report.rows
            ]
            found = {"world_size": grid.world_size, "ok": True, "rank": grid.rank, "rows": rows}
            give(args, lambda: found, lambda: f"{grid}\n{report}")
    finally:
        shutdown()
    return 0
