"""What torch.compile gives and takes: a block in training on 4 ranks, compiled and as it is.

    python tests/benchmarks/compile.py --json

Column → gelu → row over 2 ranks, gradients averaged over 2 by a GradientReducer: one forward,
backward and `finish`, timed from barrier to barrier, the two in turn; memory is the most a rank
has in use at once for parameters, activations, gradients and what travels. Compiled code has
fused kernels, but no collective runs beside a matmul, and gradients come through `.grad`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import commgrid
from commgrid.data_parallel import GradientReducer
from commgrid.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from tests.benchmarks.race import Build, race, weigh
from tests.benchmarks.report import Row, compare, main, run_on_ranks

RANKS, TP = 4, 2
CASES = {"block 512": False, "block 512, sequence parallel": True}


class Block(nn.Module):
    """column → gelu → row."""

    def __init__(self, hidden: int, sequence_parallel: bool) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(hidden, 4 * hidden, sequence_parallel=sequence_parallel)
        self.down = RowParallelLinear(4 * hidden, hidden, sequence_parallel=sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


def contestants(
    sequence_parallel: bool, backend: str, hidden: int = 512, tokens: int = 1024
) -> dict[str, Build]:
    """The block compiled, and not."""
    rows = tokens // TP if sequence_parallel else tokens
    inputs = torch.randn(rows, 1, hidden)
    upstream = torch.randn(rows, 1, hidden)

    def build(compiled: bool) -> Callable[[], object]:
        block = Block(hidden, sequence_parallel)
        reducer = GradientReducer(block)
        run = torch.compile(block, fullgraph=True, backend=backend) if compiled else block

        def once() -> None:
            x = inputs.detach().requires_grad_()
            block.zero_grad()
            run(x).backward(upstream)
            reducer.finish()

        return once

    return {"compiled": lambda: build(True), "not compiled": lambda: build(False)}


def on_a_rank(case: str, repeats: int, backend: str) -> dict[str, list[float]]:
    """Times of both, or for no repeats their peaks."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    commgrid.initialize(tp=TP)
    both = contestants(CASES[case], backend)
    return race(both, repeats, "cpu") if repeats else weigh(both, "cpu")


def measure(args: argparse.Namespace) -> Iterator[Row]:
    for case in CASES:
        for metric, unit, repeats in (("time", "ms", args.repeats), ("peak memory", "MiB", 0)):
            ranks = run_on_ranks(on_a_rank, RANKS, case, repeats, args.backend, timeout=600)
            compiled, plain = (
                [statistics.mean(found) for found in zip(*(r[name] for r in ranks), strict=True)]
                for name in ("compiled", "not compiled")
            )
            yield compare(case, metric, unit, "not compiled", compiled, plain)


if __name__ == "__main__":
    main(
        __doc__, measure,
        ("--repeats", {"type": int, "default": 30, "help": "of each (default 30)"}),
        ("--backend", {"default": "inductor", "help": "of torch.compile (default inductor)"}),
    )  # fmt: skip
