"""Kernels, collectives and waits of the host in a training step of each layer, counted.

    python tests/benchmarks/counts.py --json

The same contestants as `layers.py` and `expert.py`, on 4 gloo ranks: forward and backward, and for
reducers and optimizers the whole step. Nothing is timed, so the numbers do not depend on the
machine. Counted as torch dispatches them, in the first step in which nothing is compared any more:

- kernels: operations that compute; views and allocations are none
- collectives: calls of torch.distributed
- waits: reads of a tensor's values by the host (`item`, `tolist`, `bool`, `nonzero`, …), each of
  which waits for the device on CUDA

Checks that layers make on the CPU alone, such as those of token numbers, are counted too; copies
by `to("cpu")`, which wait as well, are not seen on the CPU.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import commgrid
from tests import megatron_layers, megatron_moe
from tests.benchmarks import expert, layers
from tests.benchmarks.race import Build
from tests.benchmarks.report import Row, compare, main, run_on_ranks

RANKS = 4
METRICS = ("kernels", "collectives", "waits")
READS = ("tolist", "numpy", "cpu")  # which torch does not dispatch for a CPU tensor
WAITS = {
    "_local_scalar_dense", "bincount", "equal", "is_nonzero", "masked_select", "nonzero",
    "unique", "_unique2",
}  # fmt: skip
ALLOCATIONS = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
VIEWS = {"detach", "lift_fresh", "_unsafe_view", "_reshape_alias", "alias"}

CASES: dict[str, tuple[dict[str, int], Callable[[], dict[str, Build]]]] = {
    "column, gelu, row": ({"tp": RANKS}, lambda: layers.blocks(False, 64, 64)),
    "the same, sequence parallel": ({"tp": RANKS}, lambda: layers.blocks(True, 64, 64)),
    "embedding, cross-entropy": ({"tp": RANKS}, lambda: layers.vocabularies(256, 32, 64)),
    "MoE layer of 8 experts": ({"ep": RANKS, "etp": 1}, lambda: experts(8)),
    "MoE layer of 64 experts": ({"ep": RANKS, "etp": 1}, lambda: experts(64)),
    "average gradients of 12 tensors": ({}, lambda: layers.reducers(64, 6, 8)),
    "average gradients of 48 tensors": ({}, lambda: layers.reducers(64, 24, 8)),
    "sharded AdamW, 2 steps, 12 tensors": ({}, lambda: layers.optimizers(False, 64, 6, 8)),
    "sharded AdamW, 2 steps, 48 tensors": ({}, lambda: layers.optimizers(False, 64, 24, 8)),
}


def experts(count: int) -> dict[str, Build]:
    """A whole MoE layer; the same number of tokens for each expert."""
    return expert.whole(expert.Case(True, RANKS, 1024, count, False), commgrid.get_grid())


class Count(TorchDispatchMode):
    """Counts what is dispatched while it is entered, by `METRICS`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self._plain = {name: getattr(Tensor, name) for name in READS}

    def __enter__(self) -> Count:
        for name, read in self._plain.items():
            setattr(Tensor, name, self._counted(read))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for name, read in self._plain.items():
            setattr(Tensor, name, read)

    def _counted(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def reading(*args: Any, **kwargs: Any) -> Any:
            self.found["waits"] += 1
            return read(*args, **kwargs)

        return reading

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[_metric(func)] += 1
        return func(*args, **(kwargs or {}))


def _metric(func: Any) -> str:
    name = func.overloadpacket.__name__
    if func.namespace in ("c10d", "_c10d_functional"):
        return "collectives" if "wait" not in name else "other"
    if name in WAITS:
        return "waits"
    first = func._schema.returns[0].alias_info if func._schema.returns else None
    is_view = first is not None and not first.is_write
    return "other" if is_view or name in VIEWS | ALLOCATIONS else "kernels"


def on_a_rank(case: str, warm_up: int) -> dict[str, dict[str, int]]:
    """For each contestant the counts of a step."""
    warnings.simplefilter("ignore")
    sizes, build = CASES[case]
    grid = commgrid.initialize(**sizes)
    if "ep" in sizes:
        megatron_moe.prepare(grid)
    else:
        megatron_layers.prepare(grid.get_group("tp"))
    found = {}
    for name, make in build().items():
        once = make()
        for _ in range(warm_up):
            once()
        with Count() as count:
            once()
        found[name] = {metric: count.found[metric] for metric in METRICS}
    return found


def measure(args: argparse.Namespace) -> Iterator[Row]:
    for case in CASES:
        if args.only and args.only not in case:
            continue
        ranks = run_on_ranks(on_a_rank, RANKS, case, args.warm_up, timeout=600)
        ours, *peers = ranks[0]
        for peer in peers:
            for metric in METRICS:
                mine, theirs = (max(rank[who][metric] for rank in ranks) for who in (ours, peer))
                yield compare(case, metric, "calls", peer, [mine], [theirs])


if __name__ == "__main__":
    main(
        __doc__, measure,
        ("--warm-up", {"type": int, "default": 25,
                       "help": "steps before the counted one; replicas are compared in the first "
                               "20 (default 25)"}),
        ("--only", {"metavar": "TEXT", "help": "cases whose name has this in it"}),
    )  # fmt: skip
