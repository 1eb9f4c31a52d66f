"""What a rank's initial weights cost on one core, against torch's full weight and its slice.

python tests/benchmarks/initial_weights.py --json

Nanoseconds per element that a rank keeps, of a row of blocks and of a column of them.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from commgrid.tensor_parallel.init import Init, draw
from tests.benchmarks.report import Row, compare, main

INITS: dict[str, Init] = {
    "normal": partial(nn.init.normal_, std=0.02),
    "uniform": partial(nn.init.uniform_, a=-0.02, b=0.02),
    "truncated": partial(nn.init.trunc_normal_, std=0.02, a=-0.04, b=0.04),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def full_then_slice(parameter: Tensor, full_shape: tuple[int, int], init: Init, dim: int) -> None:
    """As layers do that let torch draw: the weight of all ranks, and the first of its parts."""
    full = torch.empty(full_shape, dtype=parameter.dtype)
    init(full)
    parameter.copy_(full.narrow(dim, 0, parameter.shape[dim]))


def nanoseconds(
    contestants: dict[str, Callable[[], object]], elements: int, repeats: int
) -> dict[str, list[float]]:
    """Of the core's own time for each repeat, in another order each, per element."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    shuffle = random.Random(0).shuffle
    for repeat in range(repeats + 1):
        order = list(contestants)
        shuffle(order)
        for name in order:
            started = time.process_time()
            contestants[name]()
            if repeat:
                found[name].append((time.process_time() - started) * 1e9 / elements)
    return found


def measure(args: argparse.Namespace) -> Iterator[Row]:
    torch.set_num_threads(1)
    for init in INITS:
        for dtype in DTYPES:
            for tp, dim in ((1, 0), (8, 0), (8, 1)):
                yield one(args, init, dtype, tp, dim)


def one(args: argparse.Namespace, init: str, dtype: str, tp: int, dim: int) -> Row:
    shape = (args.size, args.size)
    local = list(shape)
    local[dim] //= tp
    parameter = nn.Parameter(torch.empty(local, dtype=DTYPES[dtype]), requires_grad=False)
    group: Any = SimpleNamespace(rank=0, size=tp)
    spent = nanoseconds(
        {
            "ours": lambda: draw(parameter, shape, INITS[init], dim, group),
            "torch": lambda: full_then_slice(parameter, shape, INITS[init], dim),
        },
        parameter.numel(), args.repeats,
    )  # fmt: skip
    case = f"{init}, {dtype}, tp {tp}, dim {dim} of {args.size}²"
    peer = "torch, full weight"
    return compare(case, "an element of a rank's slice", "ns", peer, spent["ours"], spent["torch"])


if __name__ == "__main__":
    main(
        __doc__, measure,
        ("--size", {"type": int, "default": 4096, "help": "rows and columns of the weight"}),
        ("--repeats", {"type": int, "default": 7}),
    )  # fmt: skip
