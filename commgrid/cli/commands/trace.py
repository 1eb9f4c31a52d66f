"""`commgrid trace`: what ranks have recorded, summed up, or for Perfetto."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from commgrid.call_analysis import diagnosis
from commgrid.call_records import files as trace_files
from commgrid.call_records.call import Call
from commgrid.call_records.price import pricer, world_size
from commgrid.call_records.table import Sum, as_table, summed
from commgrid.call_records.timeline import as_events
from commgrid.call_records.trace import Trace
from commgrid.cli.flags import file_of, whole
from commgrid.cli.grid_options import new_command, refuse_unused
from commgrid.cli.output import give
from commgrid.cost_model.cluster import Cluster, find_cluster
from commgrid.viz.page import draw_trace_page, write_page

_EXAMPLES = """examples:
  COMMGRID_TRACE=runs/trace torchrun --nproc-per-node 8 train.py
  commgrid trace runs/trace
  commgrid trace runs/trace -o trace.html       (a page: a timeline, who waits for whom)
  commgrid trace runs/trace -o trace.json       (open it at ui.perfetto.dev)
  commgrid trace runs/dry --cluster h100        (modelled time of each call of audit --dry)

The table has a line for each group, operation and place in the program, of the rank that spent most
time there.
"""


def add_parser(commands: Any) -> None:
    parser = new_command(
        commands,
        "trace",
        description="Sums up what ranks have recorded, or writes a page or a file for Perfetto.",
        examples=_EXAMPLES,
        run=run,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="where ranks saved rank_*.json")
    parser.add_argument(
        "-o", "--output", type=file_of(".html", ".json"), metavar="FILE",
        help="a page, .html, or a Chrome trace for Perfetto, .json",
    )  # fmt: skip
    parser.add_argument(
        "--cluster", metavar="NAME|FILE",
        help="seconds as the cost model has them there, instead of those recorded",
    )  # fmt: skip
    parser.add_argument("--top", type=whole(1), metavar="N", help="lines of the table (default 30)")


def run(args: argparse.Namespace) -> int:
    if args.output is not None:
        refuse_unused(args, ["cluster", "top"], "is about the table; leave -o out")
    found = trace_files.read(args.folder)
    if args.output is not None:
        if args.output.suffix == ".html":
            seen = diagnosis.diagnose(diagnosis.read(args.folder))
            page = draw_trace_page(args.folder, seen.as_dict() if seen else None)
            write_page(page, args.output)
        else:
            write_page(json.dumps(as_events(found)), args.output)
        give(args, lambda: {"written": str(args.output)}, lambda: f"wrote {args.output}")
        return 0
    cluster = None if args.cluster is None else find_cluster(args.cluster)
    price = None
    if cluster is not None:
        cluster.check_ranks((world_size(found) - 1,))
        price = pricer(cluster)
    sums = summed(found, price)
    unknown = _without_price(found, price)
    give(
        args,
        lambda: {
            "ranks": [trace.rank for trace in found],
            "dropped": sum(trace.dropped for trace in found),
            "cluster": None if cluster is None else cluster.name,
            "without_price": unknown,
            "rows": [asdict(each) for each in sums],
        },
        lambda: _as_text(found, sums, args.top or 30, cluster, unknown),
    )
    return 0


def _without_price(found: list[Trace], price: Callable[[Trace, Call], float] | None) -> list[str]:
    """The operations of which the model has no cost."""
    if price is None:
        return []
    return sorted({c.operation for t in found for c in t.calls if math.isnan(price(t, c))})


def _as_text(
    found: list[Trace],
    sums: list[Sum],
    top: int,
    cluster: Cluster | None,
    unknown: list[str],
) -> str:
    calls = sum(len(trace.calls) for trace in found)
    head = f"{len(found)} ranks, {calls:,} calls"
    if cluster is not None:
        head += f"; seconds as the cost model has them on {cluster.name}, each call by itself"
    lines = [head, "", as_table(sums, top)]
    if unknown:
        lines += ["", f"no cost model for: {', '.join(unknown)}"]
    if dropped := sum(trace.dropped for trace in found):
        more = "commgrid.trace.start(capacity=…) keeps more"
        lines += ["", f"{dropped:,} earlier calls were not kept; {more}"]
    return "\n".join(lines)
