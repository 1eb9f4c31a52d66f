"""Layers, gradient reduction and sharded optimizer on 4 ranks, against their peers.

    python tests/benchmarks/layers.py --json
    python tests/benchmarks/layers.py --device cuda --json   # NCCL, bf16, hidden 4096

Each row is one forward and backward (and step), timed from barrier to barrier, the contestants
in turn; memory is the most a rank has in use at once for parameters, activations, gradients and
what travels. Peers: megatron-core's layers, DTensor's parallelize_module, DistributedDataParallel,
ZeroRedundancyOptimizer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import commgrid
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from tests import megatron_layers
from tests.benchmarks.race import Build, race, weigh
from tests.benchmarks.report import Row, compare, main, run_on_ranks
from tests.gpu.on_gpus import on_gpus

warnings.simplefilter("ignore")
RANKS = 4


# -- the contestants ----------------------------------------------------------------------


def blocks(sequence_parallel: bool, hidden: int, tokens: int) -> dict[str, Build]:
    """column → gelu → row, on x of (tokens, hidden)."""
    grid = commgrid.get_grid()
    group = grid.get_group("tp")
    rows = tokens // RANKS if sequence_parallel else tokens
    inputs = torch.randn(rows, 1, hidden)
    upstream = torch.randn(rows, 1, hidden)

    def run(column: Callable[[Tensor], Tensor], row: Callable[[Tensor], Tensor], model: nn.Module):  # type: ignore[no-untyped-def]  # fmt: skip
        def once() -> None:
            model.zero_grad()
            x = inputs.detach().requires_grad_()
            row(F.gelu(column(x))).backward(upstream)

        return once

    def ours() -> Callable[[], object]:
        column = ColumnParallelLinear(hidden, 4 * hidden, sequence_parallel=sequence_parallel)
        row = RowParallelLinear(4 * hidden, hidden, sequence_parallel=sequence_parallel)
        return run(column, row, nn.ModuleList([column, row]))

    def megatron() -> Callable[[], object]:
        column = megatron_layers.column(
            (hidden, 4 * hidden), group, sequence_parallel=sequence_parallel
        )
        row = megatron_layers.row((4 * hidden, hidden), group, sequence_parallel=sequence_parallel)
        return run(lambda x: column(x)[0], lambda x: row(x)[0], nn.ModuleList([column, row]))

    def dtensor() -> Callable[[], object]:
        mesh = torch.distributed.device_mesh.DeviceMesh.from_group(group, inputs.device.type)
        outside = Shard(0) if sequence_parallel else Replicate()
        model = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )
        parallelize_module(
            model, mesh,
            {"0": ColwiseParallel(input_layouts=outside),
             "2": RowwiseParallel(output_layouts=outside)},
        )  # fmt: skip
        return run(lambda x: x, model, model)

    return {"ours": ours, "megatron-core": megatron, "DTensor": dtensor}


def vocabularies(vocabulary: int, hidden: int, tokens: int) -> dict[str, Build]:
    """Embedding, a projection to logits by the same table, cross-entropy."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy as theirs

    group = commgrid.get_group("tp")
    torch.manual_seed(0)
    ids = torch.randint(vocabulary, (tokens, 1))
    table = torch.randn(vocabulary // RANKS, hidden)
    states = torch.randn(tokens, 1, hidden)
    upstream = torch.randn(tokens, 1, hidden)

    def run(embedding: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]):  # type: ignore[no-untyped-def]  # fmt: skip
        def once() -> None:
            embedding.zero_grad()
            embedding(ids).backward(upstream)
            x = states.detach().requires_grad_()
            loss(F.linear(x, table), ids).sum().backward()

        return once

    return {
        # Megatron's loss always works in its logits' place; ours does when told to.
        "ours": lambda: run(
            VocabParallelEmbedding(vocabulary, hidden),
            partial(vocab_parallel_cross_entropy, overwrite_logits=True),
        ),
        "megatron-core": lambda: run(
            megatron_layers.embedding((vocabulary, hidden), group),
            theirs,
        ),
    }


def stack(width: int, depth: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])


def reducers(width: int, depth: int, samples: int) -> dict[str, Build]:
    """Backward of a stack of linear layers, and its gradients averaged."""
    x = torch.randn(samples, width)

    def ours() -> Callable[[], object]:
        model = stack(width, depth)
        reducer = GradientReducer(model)

        def once() -> None:
            model.zero_grad()
            model(x).square().mean().backward()
            reducer.finish()

        return once

    def ddp() -> Callable[[], object]:
        model = DistributedDataParallel(stack(width, depth), process_group=commgrid.get_group("dp"))

        def once() -> None:
            model.zero_grad()
            model(x).square().mean().backward()

        return once

    return {"ours": ours, "DDP": ddp}


def optimizers(overlap: bool, width: int, depth: int, samples: int) -> dict[str, Build]:
    """Two whole steps of AdamW whose state is sharded; the second forward may overlap gathers."""
    x = torch.randn(samples, width)

    def ours() -> Callable[[], object]:
        model = stack(width, depth)
        reducer = GradientReducer(model, shard=True)
        units = list(model) if overlap else None
        optimizer = ShardedOptimizer(
            reducer, torch.optim.AdamW, lr=1e-3, overlap=overlap, units=units
        )

        def once() -> None:
            for _ in range(2):
                model(x).square().mean().backward()
                reducer.finish()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.wait()  # the next forward would; the clock stops here

        return once

    def theirs() -> Callable[[], object]:
        group = commgrid.get_group("dp")
        model = DistributedDataParallel(stack(width, depth), process_group=group)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, process_group=group, lr=1e-3
        )

        def once() -> None:
            for _ in range(2):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        return once

    return {"ours": ours, "DDP + ZeroRedundancyOptimizer": theirs}


CASES: dict[str, Callable[[], dict[str, Build]]] = {
    "block 512": lambda: blocks(False, 512, 1024),
    "block 512, sequence parallel": lambda: blocks(True, 512, 1024),
    "embedding, cross-entropy 32k": lambda: vocabularies(32_768, 256, 512),
    "reduce gradients, 25 MB": lambda: reducers(1024, 6, 64),
    "sharded AdamW, 25 MB, overlap=False": lambda: optimizers(False, 1024, 6, 64),
    "sharded AdamW, 25 MB, overlap=True": lambda: optimizers(True, 1024, 6, 64),
}
CUDA_CASES: dict[str, Callable[[], dict[str, Build]]] = {
    "block 4096": lambda: blocks(False, 4096, 4096),
    "block 4096, sequence parallel": lambda: blocks(True, 4096, 4096),
    "embedding, cross-entropy 128k": lambda: vocabularies(131_072, 4096, 4096),
    "reduce gradients, 200 MB": lambda: reducers(4096, 6, 4096),
    "sharded AdamW, 200 MB, overlap=False": lambda: optimizers(False, 4096, 6, 4096),
    "sharded AdamW, 200 MB, overlap=True": lambda: optimizers(True, 4096, 6, 4096),
}


def on_a_rank(case: str, repeats: int, device: str) -> dict[str, list[float]]:
    """Times of a case's contestants, or for no repeats their peaks."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if device == "cuda":
        torch.set_default_dtype(torch.bfloat16)
    sharded = not case.startswith(("reduce", "sharded"))
    commgrid.initialize(tp=RANKS if sharded else 1)
    megatron_layers.prepare(commgrid.get_group("tp"))
    with torch.device(device):
        contestants = (CUDA_CASES if device == "cuda" else CASES)[case]()
    return (
        race(contestants, repeats, device)
        if repeats
        else weigh(contestants, device, megatron_layers.forget_buffers)
    )


def measure(args: argparse.Namespace) -> Iterator[Row]:
    for case in CUDA_CASES if args.device == "cuda" else CASES:
        if args.only and args.only not in case:
            continue
        run = on_gpus if args.device == "cuda" else run_on_ranks
        for metric, unit, repeats in (("time", "ms", args.repeats), ("peak memory", "MiB", 0)):
            ranks = run(on_a_rank, RANKS, case, repeats, args.device, timeout=600)
            ours, *peers = ranks[0]
            for peer in peers:
                mine, theirs = (
                    [statistics.mean(found) for found in zip(*(r[n] for r in ranks), strict=True)]
                    for n in (ours, peer)
                )
                yield compare(case, metric, unit, peer, mine, theirs)


if __name__ == "__main__":
    main(
        __doc__, measure,
        ("--repeats", {"type": int, "default": 30, "help": "of each contestant (default 30)"}),
        ("--device", {"choices": ("cpu", "cuda"), "default": "cpu",
                      "help": "gloo and fp32, or NCCL and bf16 at larger sizes (default cpu)"}),
        ("--only", {"metavar": "TEXT", "help": "cases whose name has this in it"}),
    )  # fmt: skip
