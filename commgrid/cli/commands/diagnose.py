"""`commgrid diagnose`: faults among ranks, from their records."""

from __future__ import annotations

import argparse
from pathlib import Path

from commgrid.call_analysis import diagnosis
from commgrid.call_records import flight_recorder
from commgrid.cli.output import give
from commgrid.errors import SpecError

DESCRIPTION = "Says what is wrong among ranks, the first cause first."
EXAMPLES = """examples:
  COMMGRID_TRACE=runs/trace torchrun --nproc-per-node 8 train.py
  commgrid dump                                 (while it hangs, also without a trace)
  commgrid diagnose runs/trace

The first line is the cause; `also:` lines are further causes, `then:` lines are ranks that wait
because of them. Exit status: 0: no fault found in the records; 1: a fault is found; 2: the folder
cannot be read; 3: undecided, the ranks waited for left no trace, or are silent.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, metavar="DIR",
        help="the folder of COMMGRID_TRACE or of commgrid dump, or torch's flight recorder's dumps",
    )  # fmt: skip
    parser.add_argument(
        "--patience", type=float, default=diagnosis.PATIENCE, metavar="SECONDS",
        help=f"shorter waits are not worth a word (default {diagnosis.PATIENCE:g})",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    if not args.patience >= 0:
        raise SpecError(f"--patience {args.patience:g}: expected seconds, 0 or more")
    found = diagnosis.diagnose(diagnosis.read(args.folder), args.patience)
    dumps = sorted(args.folder.glob("*_trace_rank_*"))
    if not found and dumps:  # torch has recorded what never came through Python
        torchs = diagnosis.with_stacks(args.folder, flight_recorder.read(dumps))
        found = diagnosis.diagnose(torchs, args.patience) or found
    give(args, found.as_dict, lambda: str(found))
    return 3 if found.is_open else 1 if found else 0
