"""Plain attention over a whole sequence, whose mask is made pair by pair: what all is held to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from commgrid.context_parallel import SequenceSharding


class Case(NamedTuple):
    """A sequence to attend over.

    Args:
        sharding: who holds what.
        heads, kv_heads: of queries and of keys.
        causal, window: the mask.
        batch, size: rows, and numbers of a head.
    """

    sharding: SequenceSharding
    heads: int = 4
    kv_heads: int = 2
    causal: bool = True
    window: int | None = None
    batch: int = 2
    size: int = 8


@cache
def allowed(case: Case) -> Tensor:
    """Which keys each position attends, from the definition and nothing else."""
    bounds = case.sharding.documents
    document = [sum(position >= bound for bound in bounds[1:]) for position in range(bounds[-1])]
    rows = []
    for q in range(bounds[-1]):
        row = []
        for k in range(bounds[-1]):
            same = document[q] == document[k]
            before = not case.causal or k <= q
            near = case.window is None or q - k < case.window
            row.append(same and before and near)
        rows.append(row)
    return torch.tensor(rows)


def inputs(case: Case, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """q, k, v and the output's gradient of the whole sequence, equal on all ranks."""
    made = torch.Generator().manual_seed(seed)
    length = case.sharding.length
    shapes = [(case.batch, n, length, case.size) for n in (case.heads, case.kv_heads)]
    return [
        torch.randn(shape, generator=made, dtype=torch.float64).to(dtype)
        for shape in (shapes[0], shapes[1], shapes[1], shapes[0])
    ]


def plain(case: Case, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Output and gradients of q, k, v in fp64, over the whole sequence, by softmax."""
    q, k, v = (x.to(torch.float64, copy=True).requires_grad_() for x in tensors[:3])
    group = case.heads // case.kv_heads
    keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = (q @ keys.mT / case.size**0.5).masked_fill(~allowed(case), -torch.inf)
    out = scores.softmax(-1) @ values
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3].double())]
