"""Experts on 4 and 8 ranks, against megatron-core's with its all-to-all dispatcher.

    python tests/benchmarks/expert.py --json
    python tests/benchmarks/expert.py --device cuda --json   # NCCL, bf16

Each row is one forward and backward, timed from barrier to barrier, the contestants in turn; memory
is the most a rank has in use at once. "dispatch, combine" has experts that return what they get,
times its weight; "layer" is router, dispatch, experts with an inner width of 1024, and combine,
whose gradients are added up in the buffers of a GradientReducer, and in those of Megatron's
DistributedDataParallel.
With skewed routing half of all choices go to an eighth of the experts. Tokens are those of all
ranks, of 512 numbers each, top 2.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor

import commgrid
from commgrid.data_parallel import GradientReducer
from commgrid.expert import MoELayer, Routing
from tests import megatron_layers, megatron_moe
from tests.benchmarks.race import Build, race, weigh
from tests.benchmarks.report import Row, compare, main, run_on_ranks
from tests.gpu.on_gpus import on_gpus

HIDDEN, FFN, TOP_K = 512, 1024, 2
PEER = "megatron-core"


@dataclass(frozen=True)
class Case:
    """What is measured, on how many ranks, with how many tokens and experts."""

    whole: bool
    ranks: int
    tokens: int
    experts: int
    skewed: bool

    def __str__(self) -> str:
        what = "layer" if self.whole else "dispatch, combine"
        load = "skewed" if self.skewed else "balanced"
        return f"{what}: {self.ranks} ranks, {self.tokens // 1024}k, {self.experts} experts, {load}"


CASES = [
    Case(whole, ranks, tokens, experts, skewed)
    for whole in (False, True)
    for ranks, tokens, experts in ((4, 4096, 8), (4, 16384, 64), (8, 4096, 64), (8, 16384, 8))
    for skewed in (False, True)
]


def layers(case: Case, grid: commgrid.HyperCommGrid) -> tuple[MoELayer, Any]:
    """Ours and Megatron's, with the same weights."""
    torch.manual_seed(grid.get_local_rank("ep"))
    ours = MoELayer(HIDDEN, FFN, case.experts, TOP_K)
    generator = torch.Generator("cpu").manual_seed(0)
    weight = torch.randn(case.experts, HIDDEN, generator=generator) / HIDDEN**0.5
    if case.skewed:  # tokens have a constant in their first number
        weight[: case.experts // 8, 0] += 1.0
    with torch.no_grad():
        ours.router.weight.copy_(weight)
    return ours, megatron_moe.layer(grid, ours, moe_router_load_balancing_type="none")


def tokens(case: Case, grid: commgrid.HyperCommGrid) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(grid.rank)
    x = torch.randn(case.tokens // case.ranks, HIDDEN, generator=generator)
    x[:, 0] = 1.0
    return x.to(torch.get_default_device(), torch.get_default_dtype())


def whole(case: Case, grid: commgrid.HyperCommGrid) -> dict[str, Build]:
    """The layer."""

    def build_ours() -> Callable[[], object]:
        layer = layers(case, grid)[0]
        return steps(layer, GradientReducer(layer).no_sync)

    def build_theirs() -> Callable[[], object]:
        parallel = megatron_moe.data_parallel(grid, layers(case, grid)[1])
        return steps(lambda x: parallel(x)[0], parallel.no_sync)

    def steps(layer: Callable[[Tensor], Tensor], accumulating: Any) -> Callable[[], object]:
        x = tokens(case, grid).unsqueeze(1).requires_grad_()
        upstream = torch.randn_like(x)

        def once() -> None:
            with accumulating():
                layer(x).backward(upstream)
            x.grad = None

        return once

    return {"ours": build_ours, PEER: build_theirs}


def way_and_back(case: Case, grid: commgrid.HyperCommGrid) -> dict[str, Build]:
    """Dispatch and combine, of one routing."""
    ours, theirs = layers(case, grid)
    x = tokens(case, grid)
    with torch.no_grad():
        routing = ours.router(x)
        weights, choices = theirs.router(x.unsqueeze(1))
    theirs = theirs.token_dispatcher

    def build_ours() -> Callable[[], object]:
        mine, upstream = x.clone().requires_grad_(), torch.randn_like(x)
        routed = routing_with(routing.weights.clone().requires_grad_())

        def once() -> None:
            sent = ours.dispatcher.dispatch(mine, routed)
            share = sent.weights.unsqueeze(1).to(sent.rows.dtype)
            ours.dispatcher.combine(sent.rows * share, sent).backward(upstream)
            mine.grad = routed.weights.grad = None

        return once

    def routing_with(weights: Tensor) -> Routing:
        return Routing(routing.experts, weights, None, case.experts, None, {}, routing.finite)

    def build_theirs() -> Callable[[], object]:
        mine, upstream = x.clone().requires_grad_(), torch.randn_like(x)
        probs = weights.clone().requires_grad_()

        def once() -> None:
            rows, share = theirs.dispatch_preprocess(mine, choices, probs)
            rows, share = theirs.token_dispatch(rows, share)
            rows, _, share = theirs.dispatch_postprocess(rows, share)
            rows = theirs.combine_preprocess(rows * share.unsqueeze(1).to(rows.dtype))
            theirs.combine_postprocess(theirs.token_combine(rows)).backward(upstream)
            mine.grad = probs.grad = None

        return once

    return {"ours": build_ours, PEER: build_theirs}


def on_a_rank(case: Case, repeats: int, device: str) -> dict[str, list[float]]:
    """Times of a case's contestants, or for no repeats their peaks."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if device == "cuda":
        torch.set_default_dtype(torch.bfloat16)
    grid = commgrid.initialize(ep=case.ranks, etp=1)
    megatron_moe.prepare(grid)
    with torch.device(device):
        contestants = (whole if case.whole else way_and_back)(case, grid)
    if repeats:
        return race(contestants, repeats, device)
    return weigh(contestants, device, megatron_layers.forget_buffers)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    for case in CASES:
        if args.only and args.only not in str(case):
            continue
        run = on_gpus if args.device == "cuda" else run_on_ranks
        for metric, unit, repeats in (("time", "ms", args.repeats), ("peak memory", "MiB", 0)):
            ranks = run(on_a_rank, case.ranks, case, repeats, args.device, timeout=600)
            mine, theirs = (
                [statistics.mean(found) for found in zip(*(r[n] for r in ranks), strict=True)]
                for n in ("ours", PEER)
            )
            yield compare(str(case), metric, unit, PEER, mine, theirs)


if __name__ == "__main__":
    main(
        __doc__, measure,
        ("--repeats", {"type": int, "default": 30, "help": "of each contestant (default 30)"}),
        ("--device", {"choices": ("cpu", "cuda"), "default": "cpu",
                      "help": "gloo and fp32, or NCCL and bf16 (default cpu)"}),
        ("--only", {"metavar": "TEXT", "help": "cases whose name has this in it"}),
    )  # fmt: skip
