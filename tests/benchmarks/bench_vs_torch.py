"""`commgrid bench` beside a plain torch loop on the same groups, the two in turn.

python tests/benchmarks/bench_vs_torch.py --json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

import commgrid
from commgrid.bench import Effort, bench
from commgrid.cost_model.cluster import CLUSTERS
from commgrid.cost_model.collective import COLLECTIVES
from tests.benchmarks.report import Row, compare, main, run_on_ranks

GROUPS = ("tp", "dp_cp", "pp_dp_cp_tp")  # of 2, 4 and 8 ranks
SIZES = (1 << 16, 1 << 22)
REPEATS, LOOP_SECONDS = 7, 0.1

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def plain_loop(collective: str, size: int, group: dist.ProcessGroup, calls: int) -> float:
    """Seconds of a call, as one writes it: a barrier, a loop, and the slowest rank's mean."""
    ranks = dist.get_process_group_ranks(group)
    n, me = len(ranks), group.rank()
    whole, other = torch.zeros(size // 4), torch.zeros(size // 4)
    part = torch.zeros(size // 4 // n)

    def once() -> None:
        if collective == "all_reduce":
            dist.all_reduce(whole, group=group)
        elif collective == "all_gather":
            all_gather(whole, part, group=group)
        elif collective == "reduce_scatter":
            reduce_scatter(part, whole, group=group)
        elif collective == "all_to_all":
            dist.all_to_all_single(other, whole, group=group)
        elif collective == "broadcast":
            dist.broadcast(whole, ranks[0], group=group)
        else:
            sent = dist.isend(whole, ranks[(me + 1) % n], group=group)
            received = dist.irecv(other, ranks[me - 1], group=group)
            sent.wait()
            received.wait()

    for _ in range(2):
        once()
    dist.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        once()
    spent = torch.tensor([(time.perf_counter() - started) / calls], dtype=torch.float64)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return spent.item()


def on_rank() -> list[tuple[str, str, int, list[float], list[float]]]:
    grid = commgrid.initialize(tp=2, cp=2)
    cluster = CLUSTERS["h100"].with_node(8)
    found = []
    for name in GROUPS:
        for collective in COLLECTIVES:
            for size in SIZES:

                def ours(
                    effort: Effort, name: str = name, collective: str = collective, size: int = size
                ) -> float:
                    rows = bench(grid, [name], [collective], [size], cluster=cluster, effort=effort)
                    return rows[0].seconds

                first = ours(Effort(iters=3, repeats=3))
                effort = Effort(
                    iters=max(1, min(100, int(LOOP_SECONDS / first))), repeats=1, seconds=1e9
                )
                pairs: list[tuple[float, float]] = []
                for repeat in range(REPEATS):
                    args = (collective, size, grid.get_group(name), effort.iters)
                    if repeat % 2:
                        theirs = plain_loop(*args)
                        pairs.append((ours(effort), theirs))
                    else:
                        mine = ours(effort)
                        pairs.append((mine, plain_loop(*args)))
                found.append((name, collective, size, [a for a, _ in pairs], [b for _, b in pairs]))
    commgrid.destroy()
    return found


def measure(args: argparse.Namespace) -> Iterator[Row]:
    ratios = []
    for name, collective, size, ours, theirs in run_on_ranks(on_rank, 8, timeout=1200)[0]:
        row = compare(
            f"8 ranks, gloo, {name}", f"{collective} of {size // 1024} KB", "us", "torch loop",
            [t * 1e6 for t in ours], [t * 1e6 for t in theirs],
        )  # fmt: skip
        assert row.ratio is not None
        ratios.append(row.ratio)
        yield row
    off = [abs(ratio - 1) * 100 for ratio in ratios]
    yield Row(
        f"{len(off)} rows", "off, median", "%", statistics.median(off), "torch loop", None, None,
        None,
    )  # fmt: skip
    yield Row(
        f"{len(off)} rows", "ratio, median", "", statistics.median(ratios), "torch loop", None,
        None, None,
    )  # fmt: skip


if __name__ == "__main__":
    main(__doc__, measure)
