"""Attention over a pack of documents on one rank, beside what torch has for it.

    python tests/benchmarks/packed.py --json

One forward and backward, the contestants in turn: on a GPU 32,768 tokens in bf16, 16 heads of 128
on 4 of keys; else 4,096 in fp32, 8 heads of 32. Peers:

- `sdpa`: `scaled_dot_product_attention`, document by document; in a window it would need a mask.
- `varlen`: `torch.nn.attention.varlen`, on a GPU; its keys are repeated for each query head where
  torch's does not take fewer.
- `flex`: FlexAttention with a block mask, compiled, on a GPU; the mask is made beforehand.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor

import commgrid
from commgrid.context_parallel import SequenceSharding, attention
from tests.benchmarks.context import documents
from tests.benchmarks.race import Build, race
from tests.benchmarks.report import Row, compare, main

Once = Callable[[], object]


def packs(tokens: int) -> dict[str, tuple[list[int], int | None]]:
    """Lengths and a window, by case."""
    return {
        "one document": ([tokens], None),
        "one, window of an eighth": ([tokens], tokens // 8),
        "64 equal ones": ([tokens // 64] * 64, None),
        "long-tailed ones": (documents(tokens), None),
        "512 equal ones": ([tokens // 512] * 512, None),
    }


def inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the output's gradient, on the device that torch makes tensors on."""
    gpu = torch.cuda.is_available()
    heads, kv_heads, size = (16, 4, 128) if gpu else (8, 8, 32)
    torch.manual_seed(0)
    q, upstream = torch.randn(
        2, 1, heads, tokens, size, dtype=torch.bfloat16 if gpu else None
    ).unbind()
    k, v = torch.randn(2, 1, kv_heads, tokens, size, dtype=q.dtype).unbind()
    for x in (q, k, v):
        x.requires_grad_()
    return q, k, v, upstream


def of_ours(lengths: list[int], window: int | None) -> Once:
    sharding = SequenceSharding.packed(lengths, 1)
    q, k, v, upstream = inputs(sum(lengths))

    def once() -> None:
        attention(q, k, v, sharding=sharding, window=window).backward(upstream)

    return once


def of_sdpa(lengths: list[int]) -> Once:
    q, k, v, upstream = inputs(sum(lengths))
    cuts = list(pairwise([0, *accumulate(lengths)]))

    def once() -> None:
        parts = []
        for start, stop in cuts:
            rows = (x[:, :, start:stop] for x in (q, k, v))
            parts.append(F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True))
        torch.cat(parts, 2).backward(upstream)

    return once


def of_varlen(lengths: list[int], window: int | None) -> Once:
    from torch.nn.attention.varlen import varlen_attn

    q, k, v, upstream = inputs(sum(lengths))
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {}
    if "window_size" in known:
        options["window_size"] = (-1 if window is None else window - 1, 0)
    else:
        options["is_causal"] = True
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    times = 1 if "enable_gqa" in known else q.shape[1] // k.shape[1]

    def once() -> None:
        rows = (
            x.repeat_interleave(many, 1)[0].transpose(0, 1)
            for x, many in ((q, 1), (k, times), (v, times))
        )
        y = varlen_attn(*rows, ends, ends, max(lengths), max(lengths), **options)
        y.backward(upstream[0].transpose(0, 1))

    return once


def of_flex(lengths: list[int], window: int | None) -> Once:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v, upstream = inputs(sum(lengths))
    of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def allowed(_: Tensor, __: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen: Tensor = (of[i] == of[j]) & (i >= j)
        return seen if window is None else seen & (i - j < window)

    tokens = len(of)
    mask = create_block_mask(allowed, None, None, tokens, tokens, device=str(q.device))
    compiled: Any = torch.compile(flex_attention)

    def once() -> None:
        compiled(q, k, v, block_mask=mask, enable_gqa=True).backward(upstream)

    return once


def measure(args: argparse.Namespace) -> Iterator[Row]:
    gpu = torch.cuda.is_available()
    commgrid.initialize()
    for case, (lengths, window) in packs(args.tokens or (32_768 if gpu else 4096)).items():
        who: dict[str, Build] = {"ours": partial(of_ours, lengths, window)}
        if window is None:
            who["sdpa"] = partial(of_sdpa, lengths)
        if gpu:
            who["varlen"] = partial(of_varlen, lengths, window)
            who["flex"] = partial(of_flex, lengths, window)
        spent = race(who, args.repeats, "cuda" if gpu else "cpu")
        for peer in who:
            if peer != "ours":
                yield compare(case, "forward and backward", "ms", peer, spent["ours"], spent[peer])
    commgrid.shutdown()


if __name__ == "__main__":
    main(
        __doc__, measure,
        ("--tokens", {"type": int, "help": "in a pack (default 32,768 on a GPU, else 4,096)"}),
        ("--repeats", {"type": int, "default": 7, "help": "of each contestant (default 7)"}),
    )  # fmt: skip
