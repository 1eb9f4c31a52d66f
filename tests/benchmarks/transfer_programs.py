"""A transfer between two programs beside the same within one world, for `transfer.py`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import commgrid
from commgrid.resharding import transport
from commgrid.testing import Ranks, free_port
from commgrid.transfer import Transfer
from tests.benchmarks.race import PEAKS
from tests.benchmarks.report import Row, compare
from tests.benchmarks.transfer_model import build
from tests.memory import peak_in_use
from tests.transfer.cuts import Cut
from tests.transfer.pairs import Counted, on

TWO, ONE = "two programs", "one world"
TREES = {"both": (4, ONE), "trainer": (2, TWO), "engine": (2, TWO)}  # ranks, and what they run
PROGRAMS = {
    "two programs, tp 2 → pp 2": (on(2, tp=2), on(2, 2, pp=2)),
    "two programs, dp 2 → tp 2": (on(2, dp=2), on(2, 2, tp=2)),
    "two programs, fsdp 2 → tp 2": (on(2, dp=2, way="fsdp"), on(2, 2, tp=2)),
}
# The unit of each metric, and a function of the values of all ranks.
METRICS: dict[str, tuple[str, Callable[[tuple[float, ...]], float]]] = {
    "run": ("ms", max), "bytes": ("MB", sum), "peak above the tensors": ("MiB", max)
}  # fmt: skip


def transfer_of(
    tree: str, pair: tuple[Cut, Cut], layers: int, store: dist.Store
) -> tuple[Callable[[], Transfer], dict[str, Tensor]]:
    """A function that makes this rank's transfer, and the target's tensors, which are filled."""
    cuts = dict(zip(("source", "target"), pair, strict=True))
    programs: dict[str, Any] = {}
    if tree != "both":
        side, peer = ("source", "engine") if tree == "trainer" else ("target", "trainer")
        cuts = {side: replace(cuts[side], ranks=tuple(range(len(cuts[side].ranks))))}
        programs = {"store": store, "peer": peer}
    grids = {
        side: commgrid.initialize(**cut.axes, ranks=list(cut.ranks), name=side)
        for side, cut in cuts.items()
    }
    models = {
        side: build(cuts[side], grid, layers) for side, grid in grids.items() if grid is not None
    }
    given = {f"{side}_grid": grid for side, grid in grids.items()}
    make = partial(Transfer, models.get("source"), models.get("target"), **given, **programs)
    return make, dict(models["target"].named_parameters()) if "target" in models else {}


@torch.no_grad()
def clear(tensors: dict[str, Tensor]) -> None:
    """Give tensors numbers that no transfer brings."""
    for tensor in tensors.values():
        tensor.fill_(-7.0)


def in_a_tree(
    tree: str, pair: tuple[Cut, Cut], layers: int, repeats: int, ports: tuple[int, int]
) -> dict[str, list[float]]:
    """Each metric of this rank, by repeat. Ranks of all trees take turns; the first is not kept."""
    warnings.simplefilter("ignore")
    commgrid.join()
    turns, store = (dist.TCPStore("127.0.0.1", port, wait_for_workers=False) for port in ports)
    make, target = transfer_of(tree, pair, layers, store)
    expected = {name: tensor.detach().clone() for name, tensor in target.items()}
    found: dict[str, list[float]] = {metric: [] for metric in METRICS}
    time_taken, moved, peaks = found.values()
    transport.start_transfers = counted = Counted()  # type: ignore[assignment]
    transfer = make()

    def timed() -> None:
        counted.size = 0
        started = time.perf_counter()
        transfer.run()
        time_taken.append((time.perf_counter() - started) * 1e3)
        moved.append(counted.size / 1e6)

    def twice() -> None:
        made = make()
        made.run()
        made.run()
        made.close()

    for turn in range(repeats + PEAKS + 2):
        for contestant in (ONE, TWO) if turn % 2 else (TWO, ONE):  # each is as often the first
            if contestant == TREES[tree][1]:
                clear(target)
            if turns.add(f"{turn} {contestant}", 1) == sum(ranks for ranks, _ in TREES.values()):
                turns.set(f"{turn} {contestant} begins", "")
            turns.wait([f"{turn} {contestant} begins"])
            if contestant != TREES[tree][1]:
                continue
            if turn <= repeats:
                timed()
            else:
                transfer.close()
                peaks.append(peak_in_use(twice) / 2**20)
        wrong = [name for name, one in target.items() if not torch.equal(one, expected[name])]
        assert not wrong, f"{tree}: turn {turn} leaves {wrong} as they should not be"
    commgrid.shutdown()
    return {metric: values[1:] for metric, values in found.items()}


def two_programs(case: str, *given: Any) -> Iterator[Row]:
    """Rows of a case, of two programs beside one world."""
    ports = free_port(), free_port()  # where ranks take turns, and where two programs meet
    ranks: dict[str, list[dict[str, list[float]]]] = {ONE: [], TWO: []}
    with ThreadPoolExecutor() as pool, ExitStack() as started:
        trees = [
            Ranks(
                in_a_tree, count, tree, *given, ports, backend=None, launcher="torchrun",
                timeout=900, check=False,
            )
            for tree, (count, _) in TREES.items()
        ]  # fmt: skip
        for tree in trees:
            started.enter_context(tree)
        stores = [
            dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
            for port in ports
        ]
        ends = {
            pool.submit(tree.results): contestant
            for tree, (_, contestant) in zip(trees, TREES.values(), strict=True)
        }
        for end in as_completed(ends):  # the first to fail is the cause of the others
            ranks[ends[end]] += end.result()
        del stores  # which have served them until here
    for metric, (unit, of_ranks) in METRICS.items():
        ours, theirs = (
            [of_ranks(values) for values in zip(*(r[metric] for r in ranks[which]), strict=True)]
            for which in (TWO, ONE)
        )
        yield compare(case, metric, unit, ONE, ours, theirs)
