"""All-gather attention: each rank gets the keys and values that its queries attend, then computes.

One exchange before, one after the backward, where a ring has one a step; in return a rank holds
the keys of all that it attends at once. Where every rank attends everything, which is full
attention over one document, the exchange is an all-gather and backward a reduce-scatter; else an
all-to-all in which each gets what it attends and no more, and backward gives it back.

Under full attention a rank of n that holds s positions gives, forward, (n - 1) · s keys and as
many values; backward as many gradients of each as it was given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from commgrid.collectives.asynchronous import (
    start_all_gather,
    start_all_to_all,
    start_reduce_scatter,
)
from commgrid.context_parallel.agreement import names_peers
from commgrid.context_parallel.kernels import wide
from commgrid.context_parallel.merge import Backward, Partial
from commgrid.context_parallel.plans import Gathering
from commgrid.context_parallel.ranges import count, inverse
from commgrid.context_parallel.ring import pack, unpack
from commgrid.context_parallel.sharding import add_runs, take_runs


def gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, *, plan: Gathering, group: ProcessGroup, scale: float
) -> Tensor:
    """Attention of this rank's queries over the sequence.

    Args:
        q: (batch, heads, positions, head_size).
        k, v: (batch, kv_heads, positions, head_size).
        plan: of `gathering`.
        group: whose ranks hold the sequence.
        scale: of the products of queries and keys.
    """
    made: Tensor = _Gathered.apply(q, k, v, plan, group, scale)  # type: ignore[no-untyped-call]
    return made


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Gathering, group: ProcessGroup,
        scale: float,
    ) -> Tensor:  # fmt: skip
        ctx.plan, ctx.group, ctx.scale = plan, group, scale
        found = Partial(q, scale)
        keys, values = _gather(pack(k, v), plan, group).unbind()
        found.add(keys, values, plan.tiles)
        out, lse = found.result()
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    @names_peers
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        both = _gather(pack(k, v), ctx.plan, ctx.group)  # keeping them would cost their memory
        found = Backward(gradient, q, out, lse, ctx.scale)
        gradients = torch.zeros_like(both, dtype=wide(k.dtype))
        keys, values = both.unbind()
        found.add(keys, values, ctx.plan.tiles, gradients[0], gradients[1])
        dk, dv = unpack(_give_back(gradients.to(k.dtype), k.shape[2], ctx.plan, ctx.group))
        return found.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _gather(rows: Tensor, plan: Gathering, group: ProcessGroup) -> Tensor:
    """Keys and values of all that this rank attends, by position: (2, batch, kv_heads, …).

    A head's positions lie one after the other, which a kernel on the CPU takes up to a tenth less
    time for than for rows of all heads.
    """
    if plan.everything:
        pending = start_all_gather(rows, group, sizes=plan.receive)
    else:
        sent = take_runs(rows, tuple(run for runs in plan.send for run in runs))
        pending = start_all_to_all(sent, group, [count(runs) for runs in plan.send], plan.receive)
    return take_runs(pending.wait().permute(1, 2, 3, 0, 4), plan.order, 3).contiguous()


def _give_back(gradients: Tensor, length: int, plan: Gathering, group: ProcessGroup) -> Tensor:
    """The gradients of this rank's rows, as `pack` makes them, from all that had them."""
    rows = gradients.permute(3, 0, 1, 2, 4)
    gradients = take_runs(rows, inverse(plan.order)).contiguous()
    if plan.everything:
        return start_reduce_scatter(gradients, group, sizes=plan.receive).wait()
    returned = [count(runs) for runs in plan.send]
    arrived = start_all_to_all(gradients, group, plan.receive, returned).wait()
    total = gradients.new_zeros(length, *gradients.shape[1:], dtype=wide(gradients.dtype))
    for runs, part in zip(plan.send, torch.split(arrived, returned), strict=True):
        add_runs(total, runs, part)
    return total
