"""The cost model fitted to `commgrid bench`, and what it predicts of sizes and groups not fitted.

python tests/benchmarks/cost_model.py --json --plot costs.png
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

import commgrid
from commgrid.bench import Effort, Measured, bench, find_cluster
from commgrid.cost_model.cluster import Cluster
from commgrid.cost_model.collective import collective_time
from tests.benchmarks.fit_cluster import draw_costs, fit
from tests.benchmarks.report import Row, main, run_on_ranks

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
FITTED = ("tp", "cp_tp", "pp_dp_cp_tp")  # of 2, 4 and 8 ranks
OTHERS = ("dp", "dp_cp")  # of 2 and 4, none of them one of the above
KB, MB = 1 << 10, 1 << 20
FITTED_SIZES = (64 * KB, 256 * KB, MB, 4 * MB, 16 * MB, 32 * MB, 64 * MB)
OTHER_SIZES = (128 * KB, 512 * KB, 2 * MB, 8 * MB, 24 * MB, 48 * MB)
ROUNDS, ENOUGH_SECONDS = 9, 240.0
EFFORT = Effort(iters=100, warmup=1, repeats=2, seconds=0.12)


def on_rank() -> tuple[Cluster, list[list[Measured]]]:
    """Sizes that are near each other soon after each other, and all of it several times: what else
    a machine does comes in bursts of seconds. An odd number of rounds, for their median."""
    grid = commgrid.initialize(tp=2, cp=2)
    cluster = find_cluster(grid)
    rounds: list[list[Measured]] = []
    started, stop = time.monotonic(), [False]
    while not stop[0]:
        rows: list[Measured] = []
        for collective in COLLECTIVES:
            for size in sorted((*FITTED_SIZES, *OTHER_SIZES)):
                names = FITTED if size in FITTED_SIZES else OTHERS
                rows += bench(grid, names, [collective], [size], cluster=cluster, effort=EFFORT)
        rounds.append(rows)
        spent = time.monotonic() - started
        stop = [len(rounds) == ROUNDS or spent * (1 + 1 / len(rounds)) > ENOUGH_SECONDS]
        dist.broadcast_object_list(stop)
    commgrid.destroy()
    return cluster, rounds


def middle(rounds: Sequence[Sequence[Measured]]) -> list[Measured]:
    """Each row with the median of its rounds."""
    return [
        replace(same[0], seconds=statistics.median(row.seconds for row in same))
        for same in zip(*rounds, strict=True)
    ]


def measure(args: argparse.Namespace) -> Iterator[Row]:
    cluster, rounds = run_on_ranks(on_rank, 8, timeout=1200)[0]
    rows = middle(rounds)
    known = [row for row in rows if row.group in FITTED]
    others = [row for row in rows if row.group in OTHERS]
    fitted = fit(known, cluster)
    fewer = fit([row for row in known if row.ranks != 4], cluster)
    if args.plot is not None:
        from commgrid.viz.figure import drawing, save

        with drawing():
            save(draw_costs(known, others, fitted), Path(args.plot))
    yield from _rows("fitted to 2, 4 and 8 ranks", others, fitted)
    fours = [row for row in others if row.ranks == 4]
    yield from _rows("fitted to 2 and 8 ranks", fours, fewer)
    yield from _rows("what it was fitted to", known, fitted)
    if len(rounds) > 1:  # what no model could do better
        halves = [middle(rounds[start::2]) for start in (0, 1)]
        off = [abs(a.seconds / b.seconds - 1) * 100 for a, b in zip(*halves, strict=True)]
        yield from _summary(f"{len(rounds)} rounds, measured twice", "all", off)


def _rows(case: str, rows: list[Measured], cluster: Cluster) -> Iterator[Row]:
    off: dict[str, list[float]] = {}
    for row in rows:
        predicted = collective_time(row.collective, row.size, row.spread, cluster)
        ratio = predicted / row.seconds
        off.setdefault(row.collective, []).append(abs(ratio - 1) * 100)
        yield Row(
            f"{case}: {row.group} of {row.ranks}", f"{row.collective} of {row.size // 1024} KB",
            "us", predicted * 1e6, "measured", row.seconds * 1e6, ratio, None,
        )  # fmt: skip
    off["all"] = [each for found in off.values() for each in found]
    for collective, found in off.items():
        yield from _summary(case, collective, found)


def _summary(case: str, collective: str, off: Sequence[float]) -> Iterator[Row]:
    for metric, value in (("median", statistics.median(off)), ("worst", max(off))):
        yield Row(
            f"{case}: {len(off)} rows", f"{collective}, off by, {metric}", "%", value,
            "measured", None, None, None,
        )  # fmt: skip


if __name__ == "__main__":
    main(__doc__, measure, ("--plot", {"metavar": "PATH", "help": "draw it, as .png or .svg"}))
