"""`commgrid trace`: what ranks have recorded, summed up, side by side, or for Perfetto."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from commgrid.call_analysis import diagnosis
from commgrid.call_records import files as trace_files
from commgrid.call_records.table import as_table, summed
from commgrid.call_records.timeline import as_events
from commgrid.call_records.trace import Trace
from commgrid.cli.flags import file_of, whole
from commgrid.cli.output import give
from commgrid.errors import SpecError
from commgrid.layout.rank_text import describe_ranks
from commgrid.layout.ranks import as_ranks
from commgrid.viz.figure import write_text
from commgrid.viz.page import draw_trace_page
from commgrid.viz.side_by_side import side_by_side, steps_table, waited_in_steps

DESCRIPTION = "Sums up what ranks have recorded, shows it side by side, or writes a page."
EXAMPLES = """examples:
  COMMGRID_TRACE=runs/trace torchrun --nproc-per-node 8 train.py
  commgrid trace runs/trace
  commgrid trace runs/trace --ranks 0-3 --group dp --last 20    (calls of ranks side by side)
  commgrid trace runs/trace --steps             (seconds that each rank waits in each step)
  commgrid trace runs/trace -o trace.html       (a page: a timeline, who waits for whom)
  commgrid trace runs/trace -o trace.json       (open it at ui.perfetto.dev)

The table has a line for each group, operation and place in the program, of the rank that spent most
time there. --json prints every call.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder of COMMGRID_TRACE")
    parser.add_argument("--ranks", metavar="LIST", help="only these, as 0-7,16")
    parser.add_argument("--group", metavar="NAME", help="only calls on this group")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--top", type=whole(1), metavar="N", help="lines of the table (default 30)")
    shown.add_argument(
        "--last", type=whole(1), metavar="N",
        help="the last calls side by side: a row each, a column for each rank",
    )  # fmt: skip
    shown.add_argument(
        "--steps", action="store_true", help="seconds that each rank has waited in each step"
    )
    shown.add_argument(
        "-o", "--output", type=file_of(".html", ".json"), metavar="FILE",
        help="a page, .html, or a Chrome trace for Perfetto, .json",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    found = _chosen(trace_files.read(args.folder), args)
    if args.output is not None:
        _write(found, args)
        give(args, lambda: {"written": str(args.output)}, lambda: f"wrote {args.output}")
        return 0
    if args.steps:
        text = steps_table(waited_in_steps(found))
    elif args.last is not None:
        text = side_by_side(found, args.last)
    else:
        text = _summary(found, args.top or 30)
    give(args, lambda: as_dict_of(found), lambda: text)
    return 0


def _chosen(found: Sequence[Trace], args: argparse.Namespace) -> list[Trace]:
    """The records of `--ranks`, with the calls of `--group`.

    Raises:
        SpecError: there are none.
    """
    ranks = None if args.ranks is None else set(as_ranks(args.ranks))
    kept = [trace for trace in found if ranks is None or trace.rank in ranks]
    if not kept:
        there = describe_ranks([trace.rank for trace in found])
        raise SpecError(
            f"--ranks {args.ranks}: {args.folder} has records of {there}; name some of these"
        )
    if args.group is None:
        return kept
    names = {name for t in found for call in t.calls for name in call.group.name.split(",")}
    if args.group not in names:
        listed = ", ".join(sorted(names)) or "none"
        raise SpecError(f"--group {args.group}: no call is on it; those recorded are on {listed}")
    return [
        replace(t, calls=tuple(c for c in t.calls if args.group in c.group.name.split(",")))
        for t in kept
    ]


def _write(found: Sequence[Trace], args: argparse.Namespace) -> None:
    if args.output.suffix == ".html":
        seen = diagnosis.diagnose(diagnosis.read(args.folder))
        page = draw_trace_page(as_dict_of(found), seen.as_dict() if seen else None)
        write_text(args.output, page)
    else:
        write_text(args.output, json.dumps(as_events(found)))


def as_dict_of(found: Sequence[Trace]) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "ranks": [trace.rank for trace in found],
        "dropped": sum(trace.dropped for trace in found),
        "rows": [asdict(each) for each in summed(found)],
        "steps": waited_in_steps(found),
        "traces": [trace.as_dict() for trace in found],
    }


def _summary(found: Sequence[Trace], top: int) -> str:
    calls = sum(len(trace.calls) for trace in found)
    lines = [f"{len(found)} ranks, {calls:,} calls", "", as_table(summed(found), top)]
    if dropped := sum(trace.dropped for trace in found):
        more = "commgrid.trace.start(capacity=…) keeps more"
        lines += ["", f"{dropped:,} earlier calls were not kept; {more}"]
    return "\n".join(lines)
