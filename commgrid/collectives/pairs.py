"""Differentiable collectives along a named group, in pairs that are each other's backward:

| function | forward | backward |
|---|---|---|
| `copy_to_group` | identity | all-reduce |
| `reduce_from_group` | all-reduce | identity |
| `scatter_to_group` | own slice of a dim | all-gather |
| `gather_from_group` | all-gather along a dim | own slice |
| `reduce_scatter_to_group` | reduce-scatter along a dim | all-gather |
| `all_gather_from_group` | all-gather along a dim | reduce-scatter |

`copy_to` and `reduce_from` are the f and g of Megatron-LM (arXiv 1909.08053, section 3),
the last pair the ḡ and g of its sequence parallelism (arXiv 2205.05198, section 4.2.2).
The last four share a dim equally, or as `sizes` says, by rank of the group.
`gather_from` expects the same gradient on every rank, `all_gather_from` a part of it on
each. A group of one rank communicates nothing, and the pairs then return their input.

Every function takes `group`, a name or a `ProcessGroup` or a layer's `GroupRef`, and
`grid`, where to look the name up (None: the registry's default grid).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from commgrid.collectives.asynchronous import (
    as_output,
    shares,
    start_all_gather,
    start_reduce_scatter,
)
from commgrid.collectives.plain import Group, resolve
from commgrid.runtime.grid import HyperCommGrid


def copy_to_group(
    tensor: Tensor, group: Group = "tp", *, grid: HyperCommGrid | None = None
) -> Tensor:
    """The tensor itself; its gradients are summed over the group."""
    return _apply(tensor, _same, _sum, group, grid)


def reduce_from_group(
    tensor: Tensor, group: Group = "tp", *, grid: HyperCommGrid | None = None
) -> Tensor:
    """The sum over the group; the gradient passes through."""
    return _apply(tensor, _sum, _same, group, grid)


def scatter_to_group(
    tensor: Tensor,
    group: Group = "tp",
    *,
    dim: int = -1,
    sizes: Sequence[int] | None = None,
    grid: HyperCommGrid | None = None,
) -> Tensor:
    """This rank's slice along `dim`; the slices' gradients are gathered."""
    return _apply(tensor, _slice, _gather, group, grid, dim, sizes)


def gather_from_group(
    tensor: Tensor,
    group: Group = "tp",
    *,
    dim: int = -1,
    sizes: Sequence[int] | None = None,
    grid: HyperCommGrid | None = None,
) -> Tensor:
    """All slices joined along `dim`; this rank's slice of the gradient comes back."""
    return _apply(tensor, _gather, _slice, group, grid, dim, sizes)


def reduce_scatter_to_group(
    tensor: Tensor,
    group: Group = "tp",
    *,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    grid: HyperCommGrid | None = None,
) -> Tensor:
    """This rank's slice along `dim` of the sum; the slices' gradients are gathered."""
    return _apply(tensor, _reduce_scatter, _gather, group, grid, dim, sizes)


def all_gather_from_group(
    tensor: Tensor,
    group: Group = "tp",
    *,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    grid: HyperCommGrid | None = None,
) -> Tensor:
    """All slices joined along `dim`; the gradients are summed and this rank's slice comes back."""
    return _apply(tensor, _gather, _reduce_scatter, group, grid, dim, sizes)


Sizes = Sequence[int] | None
Step = Callable[[Tensor, ProcessGroup, int, Sizes], Tensor]


class _Pair(torch.autograd.Function):
    """One step forward, its partner backward."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        step: Step,
        partner: Step,
        group: ProcessGroup,
        dim: int,
        sizes: Sizes,
    ) -> Tensor:
        ctx.steps, ctx.given = (partner, step), (group, dim, sizes)
        return as_output(step(tensor, group, dim, sizes))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        partner, step = ctx.steps
        if torch.is_grad_enabled():  # create_graph=True: the backward of the partner is the step
            return _Pair.apply(gradient, partner, step, *ctx.given), *[None] * 5  # type: ignore[no-untyped-call]
        return partner(gradient, *ctx.given), *[None] * 5


def _apply(
    tensor: Tensor,
    step: Step,
    partner: Step,
    group: Group,
    grid: HyperCommGrid | None,
    dim: int = 0,
    sizes: Sizes = None,
) -> Tensor:
    members = resolve(group, grid)
    if members.size() == 1:
        return tensor
    made: Tensor = _Pair.apply(tensor, step, partner, members, dim, sizes)  # type: ignore[no-untyped-call]
    return made


def _same(tensor: Tensor, group: ProcessGroup, dim: int, sizes: Sizes = None) -> Tensor:
    return tensor.view_as(tensor)


def _sum(tensor: Tensor, group: ProcessGroup, dim: int, sizes: Sizes = None) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _slice(tensor: Tensor, group: ProcessGroup, dim: int, sizes: Sizes = None) -> Tensor:
    each, rank = shares(tensor, group, dim, sizes), group.rank()
    return tensor.narrow(dim, sum(each[:rank]), each[rank]).contiguous()


def _gather(tensor: Tensor, group: ProcessGroup, dim: int, sizes: Sizes = None) -> Tensor:
    return start_all_gather(tensor, group, dim, sizes).wait()


def _reduce_scatter(tensor: Tensor, group: ProcessGroup, dim: int, sizes: Sizes = None) -> Tensor:
    return start_reduce_scatter(tensor, group, dim, sizes).wait()
