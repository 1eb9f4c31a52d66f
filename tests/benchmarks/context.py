"""Attention over a sequence on 4 ranks, each way beside torch's context parallel and one rank.

    python tests/benchmarks/context.py --json
    python tests/benchmarks/context.py --tokens 32768 --repeats 3

One forward and backward of attention alone, timed from barrier to barrier, the contestants in turn:
gloo, fp32, 8 heads of 32, as many heads of keys, which torch's ring needs. `causal` is one document
in a zig-zag, `packed` has documents of long-tailed lengths in balanced shares.

Peers that do the same work, the same tokens and mask on as many ranks:

- torch's experimental context parallel, ring and all-gather, on the grid's own group: the functions
  that its `context_parallel` calls, with the CPU's kernel, which the call itself refuses. It knows
  no documents.

A peer that does less, whose rows say so in their case, and have no limit:

- attention on one device: one rank computes everything, with a thread for each core, while the
  others wait; of packed documents it computes one after the other. It sends and joins nothing, and
  the kernel sees whole documents.

`auto` runs the way that it takes, so its times and that way's are one row's, compared with the
fastest of our ways: 1.00 is the best that it can be.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import commgrid
from commgrid.context_parallel import (
    WAYS,
    SequenceSharding,
    attention,
    choose,
)
from tests.benchmarks.race import Build, race
from tests.benchmarks.report import Row, compare, main, run_on_ranks

RANKS, HEADS, SIZE = 4, 8, 32
TORCHS = {"ring": "alltoall", "allgather": "allgather"}
ONE_DEVICE = "attention on one device"
LEVELS = {"cp_levels": {"of": "cp", "split": {"cp_ring": 2, "cp_a2a": 2}}}


def documents(tokens: int) -> list[int]:
    """Long-tailed lengths that fill the sequence."""
    draw, lengths = random.Random(0), []
    while sum(lengths) < tokens:
        lengths.append(min(int(draw.lognormvariate(6.5, 1.2)) + 1, tokens - sum(lengths)))
    return lengths


def shard_of(case: str, tokens: int) -> SequenceSharding:
    if case == "packed":
        return SequenceSharding.packed(documents(tokens), RANKS)
    return SequenceSharding.zigzag(tokens, RANKS)


# -- the contestants ----------------------------------------------------------------------


def inputs(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, upstream = torch.randn(4, 1, HEADS, rows, SIZE).unbind()
    return q, k, v, upstream


def of_ours(way: str, sharding: SequenceSharding) -> Callable[[], object]:
    own = sharding.local_lengths[commgrid.get_local_rank("cp")]
    q, k, v, upstream = inputs(own)

    def once() -> None:
        taken = [x.detach().requires_grad_() for x in (q, k, v)]
        y = attention(*taken, sharding=sharding, way=way)
        y.backward(upstream)

    return once


def of_torch(method: str, sharding: SequenceSharding) -> Callable[[], object]:
    from torch.distributed.tensor.experimental import _attention as experimental
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    group = commgrid.get_grid().device_mesh("cp").get_group()
    q, k, v, upstream = inputs(sharding.length // RANKS)
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def once() -> None:
        experimental.set_rotate_method(method)
        y, lse, *_ = theirs._templated_ring_attention(group, 2, forward, q, k, v, is_causal=True)
        theirs._templated_ring_attention_backward(
            group, 2, backward, upstream, "grad_out", q, k, v, y, lse, is_causal=True,
            dropout_p=0.0,
        )  # fmt: skip

    return once


def of_one_rank(sharding: SequenceSharding) -> Callable[[], object]:
    if dist.get_rank() > 0:
        return lambda: None
    q, k, v, upstream = inputs(sharding.length)
    cuts = sharding.documents

    def once() -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        for start, stop in pairwise(cuts):
            rows = [x[:, :, start:stop].detach().requires_grad_() for x in (q, k, v)]
            y = F.scaled_dot_product_attention(*rows, is_causal=True)
            y.backward(upstream[:, :, start:stop])
        torch.set_num_threads(1)

    return once


def contest(case: str, tokens: int, repeats: int) -> tuple[dict[str, list[float]], str]:
    """Milliseconds of each contestant, and what `auto` takes."""
    torch.set_num_threads(1)
    commgrid.initialize(cp=RANKS, groups=LEVELS)
    sharding = shard_of(case, tokens)
    who: dict[str, Build] = {way: partial(of_ours, way, sharding) for way in (*WAYS, "auto")}
    if case == "causal":
        for name, method in TORCHS.items():
            who[f"torch, {name}"] = partial(of_torch, method, sharding)
    who[ONE_DEVICE] = partial(of_one_rank, sharding)
    spent = race(who, repeats, "cpu")
    taken = choose(sharding, heads=HEADS, inner=2, device="cpu").way
    commgrid.shutdown()
    return spent, taken


def measure(args: argparse.Namespace) -> Iterator[Row]:
    for case in args.cases:
        for tokens in args.tokens:
            found: Any = run_on_ranks(
                contest, RANKS, case, tokens, args.repeats, backend=None, launcher="torchrun",
                timeout=1800,
            )  # fmt: skip
            spent, taken = found[0]
            name = f"{case}, {tokens:,} tokens"
            for way in WAYS:
                for peer in (f"torch, {name}" for name in TORCHS):
                    if peer in spent:
                        yield compare(name, way, "ms", peer, spent[way], spent[peer])
                less = f"{name} ÷ {ONE_DEVICE}, less work"
                yield compare(less, way, "ms", ONE_DEVICE, spent[way], spent[ONE_DEVICE])
            both = zip(spent["auto"], spent[taken], strict=True)
            spent[taken] = [statistics.mean(pair) for pair in both]
            best = min(WAYS, key=lambda way: statistics.median(spent[way]))
            yield compare(
                name, f"auto ({taken})", "ms", f"the fastest, {best}", spent[taken], spent[best]
            )


if __name__ == "__main__":
    main(
        __doc__, measure,
        ("--tokens", {"type": int, "nargs": "+", "default": [4096, 8192, 16_384, 32_768],
                      "help": "lengths of the sequence"}),
        ("--cases", {"nargs": "+", "choices": ("causal", "packed"),
                     "default": ["causal", "packed"]}),
        ("--repeats", {"type": int, "default": 5, "help": "of each contestant (default 5)"}),
    )  # fmt: skip
