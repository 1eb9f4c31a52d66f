"""`commgrid dump`: has the ranks of a job on this host write down where they are."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from commgrid.call_records.processes import Dumped, dump, gather, of_one_job, running
from commgrid.cli.output import give
from commgrid.errors import SpecError
from commgrid.layout.rank_text import describe_ranks

DESCRIPTION = "Has the ranks of a job on this host write down stacks and recorded calls."
EXAMPLES = """examples:
  commgrid dump                                 (on a host where the job hangs)
  commgrid dump --all-hosts                     (on one host of the job: all ranks' calls)
  srun --overlap --jobid 1234 commgrid dump -o /shared/dump     (on each: stacks too)
  commgrid dump --pid 4711 -o hang              (of several jobs, the one with this process)
  commgrid diagnose commgrid_dump

Writes where all threads of each rank are, rank_00003.stacks, the last calls as torch's own flight
recorder has them, torch_trace_rank_3, and copies its recorded calls,
rank_00003.ring. The job continues. Exit status 1: a rank has written nothing.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("commgrid_dump"), metavar="DIR",
        help="where to write (default commgrid_dump)",
    )  # fmt: skip
    parser.add_argument(
        "--all-hosts", action="store_true",
        help="also the recorded calls of ranks on other hosts, through the job's store",
    )  # fmt: skip
    parser.add_argument("--pid", type=int, metavar="PID", help="a rank of the job, if several run")
    parser.add_argument(
        "--timeout", type=float, default=10.0, metavar="SECONDS",
        help="how long to wait for the ranks (default 10)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    if not args.timeout > 0:
        raise SpecError(f"--timeout {args.timeout:g}: expected seconds, more than 0")
    job = of_one_job(running(), args.pid)
    found = dump(job, args.output, args.timeout)
    if args.all_hosts:
        found = gather(job, found, args.output, args.timeout)
    give(
        args,
        lambda: {"folder": str(args.output), "ranks": [asdict(each) for each in found]},
        lambda: _as_text(found, args.output),
    )
    return 0 if all(each.stacks or each.records or each.torch for each in found) else 1


def _as_text(found: list[Dumped], folder: Path) -> str:
    stacks = [each.rank for each in found if each.stacks]
    records = [each.rank for each in found if each.records]
    torch = [each.rank for each in found if each.torch]
    lines = [f"wrote {folder}: stacks of {describe_ranks(stacks)}"]
    lines[0] += f", calls of {describe_ranks(records)}, torch's calls of {describe_ranks(torch)}"
    for why in sorted({each.why for each in found if each.why}):
        ranks = [each.rank for each in found if each.why == why]
        lines.append(f"no stacks of {describe_ranks(ranks)}: {why}")
    if records or torch:
        lines.append(f"commgrid diagnose {folder} says which rank they wait for")
    else:
        lines.append("the ranks record no calls; COMMGRID_TRACE=DIR on every rank has them do so")
    return "\n".join(lines)
