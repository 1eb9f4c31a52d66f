"""`commgrid bench`: under a launcher, latency and bandwidth of every communicator of a grid."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commgrid.advisor.cluster import Cluster, find_cluster
from commgrid.advisor.collectives import COLLECTIVES
from commgrid.advisor.fitting import Measured, fit, too_fast
from commgrid.cli.grid_options import add_command, read_spec, whole
from commgrid.cli.output import give
from commgrid.cli.terminal import BOLD, CYAN
from commgrid.errors import SpecError
from commgrid.planning.names import canonical
from commgrid.planning.spec import GridSpec

if TYPE_CHECKING:
    from commgrid.observe.bench import Effort
    from commgrid.runtime.grid import HyperCommGrid

_EXAMPLES = """examples:
  torchrun --standalone --nproc-per-node 8 -m commgrid bench --tp 2
  torchrun --standalone --nproc-per-node 8 -m commgrid bench --tp 2 --groups tp,dp --alone
  torchrun --standalone --nproc-per-node 8 -m commgrid bench grid.yaml \\
      --collectives all_reduce,all_to_all --sizes 64K,1M,16M -o cluster.yaml

Sizes, counts and bandwidths are nccl-tests'. All groups of a name communicate at once, as
in training; with --alone only its first. Times are medians of --repeats loops, of the
slowest rank.
"""
_START = "torchrun --standalone --nproc-per-node 8 -m commgrid bench --tp 2"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def add_parser(commands: Any) -> None:
    parser = add_command(
        commands,
        "bench",
        description="Measures collectives on the groups of each name, and fits a cluster to them.",
        examples=_EXAMPLES,
        run=run,
        world_size=False,
    )
    what = parser.add_argument_group("what")
    what.add_argument("--groups", metavar="NAMES", help="with commas (default: every communicator)")
    what.add_argument(
        "--collectives", metavar="NAMES", help=f"with commas, of {', '.join(COLLECTIVES)}"
    )
    what.add_argument("--min-bytes", metavar="SIZE", help="the smallest message (default 1K)")
    what.add_argument("--max-bytes", metavar="SIZE", help="the largest (default 64M)")
    what.add_argument("--factor", metavar="N", help="from one size to the next (default 4)")
    what.add_argument("--sizes", metavar="SIZES", help="these instead, as 64K,1M")
    what.add_argument(
        "--alone", action="store_true", help="only the first group of a name communicates"
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--iters", default="20", metavar="N", help="calls a loop, at most (default 20)"
    )
    how.add_argument("--warmup", default="2", metavar="N", help="calls before (default 2)")
    how.add_argument("--repeats", default="5", metavar="N", help="loops (default 5)")
    how.add_argument(
        "--seconds", default="1", metavar="S", help="of all loops of a row, at most (default 1)"
    )
    how.add_argument("--backend", help="gloo, nccl, … (default: NCCL where there is CUDA)")
    parser.add_argument("-o", "--output", metavar="CLUSTER.yaml", help="a cluster fitted to it")
    parser.add_argument(
        "--cluster", metavar="NAME", help="whose device and levels the file has, in place of these"
    )


def run(args: argparse.Namespace) -> int:
    collectives, sizes = read_collectives(args.collectives), read_sizes(args)
    effort = _read_effort(args)
    if args.output is not None:
        _check_output(args)
    base = None if args.cluster is None else find_cluster(args.cluster)
    spec = _with_everyone(read_spec(args))
    from commgrid.observe import bench
    from commgrid.runtime.registry import is_initialized, shutdown
    from commgrid.runtime.starting import initialize, started_ranks

    if started_ranks() == 1:
        raise SpecError(f"one rank alone measures nothing; start several, as with\n  {_START}")
    grid: HyperCommGrid | None = initialize(config=spec, backend=args.backend, name="bench")
    if grid is None:  # this rank is a spare
        shutdown()
        return 0
    try:
        first = grid.rank == grid.get_ranks(bench.whole_name(grid))[0]
        cluster = base or bench.find_cluster(grid)
        rows = bench.bench(
            grid,
            _listed(args.groups),
            collectives,
            sizes,
            cluster=cluster,
            effort=effort,
            alone=args.alone,
            progress=_say if first else _say_nothing,
        )
        if first:
            backend = grid.communicators[0].backend
            found = as_json(rows, grid.world_size, backend, args.alone)
            marks = {r"^\S.*$": BOLD, r"^  \w+": CYAN}
            give(args, lambda: found, lambda: as_table(rows, args.alone), marks)
            if args.output is not None:
                fitted = fit(rows, cluster)
                _write(Path(args.output), fitted)
                for line in too_fast(rows, fitted):
                    _say(line)
    finally:
        if is_initialized():
            shutdown()
    return 0


# -- what was asked -------------------------------------------------------------------


def read_collectives(given: str | None) -> list[str]:
    """The collectives of `--collectives`, of which nccl-tests' spellings do as well.

    Raises:
        SpecError: an unknown one.
    """
    from commgrid.advisor.collectives import bus_factor

    chosen = [one.strip().replace("-", "_") for one in _listed(given)] or list(COLLECTIVES)
    for one in chosen:
        bus_factor(one, 2)  # or it is an error that names the nearest
    return list(dict.fromkeys(chosen))


def read_sizes(args: argparse.Namespace) -> list[int]:
    """The message sizes of the flags, in bytes.

    Raises:
        SpecError: naming the flag.
    """
    if args.sizes is not None:
        beside = [flag for flag in ("min_bytes", "max_bytes", "factor") if getattr(args, flag)]
        if beside:
            raise SpecError(
                f"--sizes beside --{beside[0].replace('_', '-')}: give a list or a range, not both"
            )
        return [_bytes("sizes", each) for each in _listed(args.sizes)]
    least = _bytes("min-bytes", args.min_bytes or "1K")
    most = _bytes("max-bytes", args.max_bytes or "64M")
    factor = whole("factor", args.factor or "4", 2)
    if least > most:
        raise SpecError(f"--min-bytes {args.min_bytes or '1K'}: above --max-bytes {most}")
    sizes = [least]
    while sizes[-1] * factor <= most:
        sizes.append(sizes[-1] * factor)
    return sizes


def _read_effort(args: argparse.Namespace) -> Effort:
    from commgrid.observe.bench import Effort

    try:
        seconds = float(args.seconds)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise SpecError(f"--seconds {args.seconds}: expected a number above 0")
    return Effort(
        iters=whole("iters", args.iters, 1),
        warmup=whole("warmup", args.warmup, 0),
        repeats=whole("repeats", args.repeats, 1),
        seconds=seconds,
    )


def _check_output(args: argparse.Namespace) -> None:
    """Before anything is measured."""
    if args.alone:
        raise SpecError(
            f"--output {args.output} with --alone: a cluster is fitted to groups that communicate "
            "at once, as in training; leave --alone out"
        )
    if not args.output.endswith((".yaml", ".yml")):
        raise SpecError(f"--output {args.output}: expected a name that ends in .yaml")
    if not Path(args.output).absolute().parent.is_dir():
        raise SpecError(f"--output {args.output}: there is no such folder")


def _with_everyone(spec: GridSpec) -> GridSpec:
    """The spec with the group of all its ranks, over which they meet between loops."""
    axes = spec.regions[0].axes
    whole = canonical(axes, axes)
    if spec.create == "all" or whole in spec.create:
        return spec
    return replace(spec, create=(*spec.create, whole))


def _listed(given: str | None) -> list[str]:
    return [] if given is None else [one for one in given.split(",") if one]


def _bytes(flag: str, text: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not found or not int(found[1]):
        raise SpecError(f"--{flag} {text}: expected bytes, such as 65536, 64K or 1M")
    return int(found[1]) * _UNITS[found[2].upper()]


# -- what was found -------------------------------------------------------------------


def as_json(
    rows: Sequence[Measured], world_size: int, backend: str, alone: bool
) -> Mapping[str, Any]:
    """The rows, times in microseconds and bandwidths in GB/s as nccl-tests prints them."""
    return {
        "world_size": world_size,
        "backend": backend,
        "alone": alone,
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


def _write(path: Path, cluster: Cluster) -> None:
    import yaml

    for level in cluster.levels:
        if not level.bandwidth > 0:
            raise SpecError(
                f"--output {path}: no measured group is within level {level.name!r} alone; "
                "measure one, or give numbers with --cluster"
            )
    text = yaml.safe_dump(cluster.to_dict(), sort_keys=False, default_flow_style=None, width=100)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(f"--output {path}: cannot be written, {error.strerror}") from error


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _say_nothing(line: str) -> None:
    pass
