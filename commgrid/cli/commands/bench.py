"""`commgrid bench`: under a launcher, latency and bandwidth of every communicator of a grid."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from commgrid.cli.flags import above_zero, count_of_bytes, names, whole
from commgrid.cli.grid_options import add_grid_options, read_spec, refuse_unused
from commgrid.cli.output import give
from commgrid.cost_model.cluster import Cluster, find_cluster
from commgrid.cost_model.collective import COLLECTIVES
from commgrid.errors import SpecError
from commgrid.layout.axis_names import nearest
from commgrid.planning.spec import GridSpec

if TYPE_CHECKING:
    from commgrid.bench import Measured
    from commgrid.runtime.grid import HyperCommGrid

DESCRIPTION = "Measures collectives on the groups of each name."
EXAMPLES = """examples:
  torchrun --standalone --nproc-per-node 8 -m commgrid bench --tp 2
  torchrun --standalone --nproc-per-node 8 -m commgrid bench --tp 2 --groups tp,dp --alone
  torchrun --standalone --nproc-per-node 8 -m commgrid bench grid.yaml \\
      --collectives all_reduce,all_to_all --sizes 64K,1M,16M --json > bench.json

Sizes, counts and bandwidths are nccl-tests'. All groups of a name communicate at once, as
in training; with --alone only its first. Times are medians of --repeats loops, of the
slowest rank.
"""
_START = "torchrun --standalone --nproc-per-node 8 -m commgrid bench --tp 2"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_grid_options(parser, world_size=False)
    add = parser.add_argument_group("what").add_argument
    add("--groups", type=names, metavar="NAMES", help="with commas (default: every communicator)")
    add(
        "--collectives", type=_collectives, default=list(COLLECTIVES), metavar="NAMES",
        help=f"with commas, of {', '.join(COLLECTIVES)}",
    )  # fmt: skip
    size = count_of_bytes
    add("--min-bytes", type=size, metavar="SIZE", help="the smallest message (default 1K)")
    add("--max-bytes", type=size, metavar="SIZE", help="the largest (default 64M)")
    add("--factor", type=whole(2), metavar="N", help="from one size to the next (default 4)")
    add("--sizes", type=_sizes, metavar="SIZES", help="these instead, as 64K,1M")
    add("--alone", action="store_true", help="only the first group of a name communicates")
    add = parser.add_argument_group("how").add_argument
    add(
        "--iters", type=whole(1), default=20, metavar="N", help="calls a loop, at most (default 20)"
    )
    add("--warmup", type=whole(0), default=2, metavar="N", help="calls before (default 2)")
    add("--repeats", type=whole(1), default=5, metavar="N", help="loops (default 5)")
    add(
        "--seconds", type=above_zero("a number above 0"), default=1.0, metavar="S",
        help="of all loops of a row, at most (default 1)",
    )  # fmt: skip
    add("--backend", help="gloo, nccl, … (default: NCCL where there is CUDA)")
    parser.add_argument(
        "--cluster", metavar="NAME", help="whose device and levels --json has, in place of these"
    )


def _collectives(text: str) -> list[str]:
    """Of nccl-tests' spellings as well."""
    chosen = [one.strip().replace("-", "_") for one in names(text)]
    for one in chosen:
        if one not in COLLECTIVES:
            raise argparse.ArgumentTypeError(
                f"{one}: expected some of {', '.join(COLLECTIVES)}{nearest(one, COLLECTIVES)}"
            )
    return list(dict.fromkeys(chosen)) or list(COLLECTIVES)


def _sizes(text: str) -> list[int]:
    return [count_of_bytes(each) for each in text.strip(",").split(",")]


def run(args: argparse.Namespace) -> int:
    sizes = read_sizes(args)
    base = None if args.cluster is None else find_cluster(args.cluster)
    spec = _with_everyone(read_spec(args))
    from commgrid import bench
    from commgrid.runtime.registry import is_initialized, shutdown
    from commgrid.runtime.start import initialize, started_ranks

    if started_ranks() == 1:
        raise SpecError(f"one rank alone measures nothing; start several, as with\n  {_START}")
    grid: HyperCommGrid | None = initialize(config=spec, backend=args.backend, name="bench")
    if grid is None:  # this rank is a spare
        shutdown()
        return 0
    try:
        first = grid.rank == grid.get_ranks()[0]
        cluster = base or bench.find_cluster(grid)
        rows = bench.bench(
            grid,
            args.groups or [],
            args.collectives,
            sizes,
            cluster=cluster,
            effort=bench.Effort(args.iters, args.warmup, args.repeats, args.seconds),
            alone=args.alone,
            progress=partial(print, file=sys.stderr, flush=True) if first else lambda line: None,
        )
        if first:
            backend = grid.communicators[0].backend
            found = as_json(rows, cluster, grid.world_size, backend, args.alone)
            give(args, lambda: found, lambda: as_table(rows, args.alone))
    finally:
        if is_initialized():
            shutdown()
    return 0


# -- what was asked -------------------------------------------------------------------


def read_sizes(args: argparse.Namespace) -> list[int]:
    """The message sizes of the flags, in bytes.

    Raises:
        SpecError: naming the flag.
    """
    if args.sizes is not None:
        why = "is about a range of sizes, and --sizes lists them"
        refuse_unused(args, ("min_bytes", "max_bytes", "factor"), why)
        return list(args.sizes)
    least, most = args.min_bytes or 1 << 10, args.max_bytes or 64 << 20
    factor = args.factor or 4
    if least > most:
        raise SpecError(
            f"--min-bytes {least}: above --max-bytes {most}; expected the smaller one first"
        )
    sizes = [least]
    while sizes[-1] * factor <= most:
        sizes.append(sizes[-1] * factor)
    return sizes


def _with_everyone(spec: GridSpec) -> GridSpec:
    """The spec with the group of all its ranks, over which they meet between loops."""
    whole = spec.resolve_name()
    if spec.create == "all" or whole in spec.create:
        return spec
    return replace(spec, create=(*spec.create, whole))


# -- what was found -------------------------------------------------------------------


def as_json(
    rows: Sequence[Measured], cluster: Cluster, world_size: int, backend: str, alone: bool
) -> Mapping[str, Any]:
    """The rows, times in microseconds and bandwidths in GB/s as nccl-tests prints them."""
    return {
        "world_size": world_size,
        "backend": backend,
        "alone": alone,
        "cluster": cluster.to_dict(),
        "rows": [
            {
                "group": row.group, "names": list(row.names), "ranks": row.ranks,
                "groups": row.groups, "spread": list(row.spread), "collective": row.collective,
                "size": row.size, "count": row.count, "type": "float",
                "time_us": row.seconds * 1e6, "least_us": row.least * 1e6,
                "most_us": row.most * 1e6, "algbw": row.algorithm_bandwidth / 1e9,
                "busbw": row.bus_bandwidth / 1e9,
            }
            for row in rows
        ],
    }  # fmt: skip


def as_table(rows: Sequence[Measured], alone: bool) -> str:
    """nccl-tests' columns for each name, and in the end latency and best bandwidth of each."""
    lines: list[str] = []
    heading = (
        f"  {'collective':14} {'size':>11} {'count':>10} {'type':>6} {'time':>10} {'algbw':>8} "
        f"{'busbw':>8}\n"
        f"  {'':14} {'(B)':>11} {'(elements)':>10} {'':>6} {'(us)':>10} {'(GB/s)':>8} {'(GB/s)':>8}"
    )
    for name in dict.fromkeys(row.group for row in rows):
        mine = [row for row in rows if row.group == name]
        lines += [_headline(mine[0], alone), heading]
        lines += [
            f"  {r.collective:14} {r.size:>11} {r.count:>10} {'float':>6} {r.seconds * 1e6:>10.1f} "
            f"{r.algorithm_bandwidth / 1e9:>8.3f} {r.bus_bandwidth / 1e9:>8.3f}"
            for r in mine
        ]
        lines.append("")
    return "\n".join([*lines, *_summary(rows)])


def _headline(row: Measured, alone: bool) -> str:
    also = f" (also {', '.join(n for n in row.names if n != row.group)})" if row.names[1:] else ""
    if row.groups == 1:
        how = "the first group" if alone else "one group"
        return f"{row.group}{also}: {how} of {row.ranks} ranks"
    return f"{row.group}{also}: {row.groups} groups of {row.ranks} ranks, all at once"


def _summary(rows: Sequence[Measured]) -> list[str]:
    """A line for each group and collective."""
    names = max(len(row.group) for row in rows)
    lines = [
        "Latency and best bus bandwidth:",
        f"  {'group':{names}}  {'collective':14} {'latency (us)':>12} {'busbw (GB/s)':>12} "
        f"{'at (B)':>11}",
    ]
    pairs = dict.fromkeys((row.group, row.collective) for row in rows)
    for group, collective in pairs:
        mine = [r for r in rows if (r.group, r.collective) == (group, collective)]
        quickest = min(mine, key=lambda r: r.size)
        best = max(mine, key=lambda r: r.bus_bandwidth)
        lines.append(
            f"  {group:{names}}  {collective:14} {quickest.seconds * 1e6:>12.1f} "
            f"{best.bus_bandwidth / 1e9:>12.3f} {best.size:>11}"
        )
    return lines
