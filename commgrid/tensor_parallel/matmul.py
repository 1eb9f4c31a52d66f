"""Matmuls of tensor-parallel layers, overlapped with their collectives.

With n ranks, t tokens in all, weight (o, i) per rank, and `seq` for sequence parallelism:

| | forward | backward |
|---|---|---|
| `column_matmul` | all-gather x (t/n → t) if seq; y = x Wᵀ + b | ∂x = ∂y W, then reduced while ∂W = ∂yᵀ x is computed: all-reduce, or if seq reduce-scatter; if seq, x is gathered again while ∂x is computed |
| `row_matmul` | y = x Wᵀ, then all-reduce, or if seq reduce-scatter; + b | all-gather ∂y if seq; ∂x = ∂y W, ∂W = ∂yᵀ x |

Gathering x again instead of keeping it is Megatron's sequence parallelism (arXiv 2205.05198,
section 4.2.2). Several weights of one input share its collectives.

On CUDA, a collective that overlaps with a matmul must be issued and start before it:
CUDA_DEVICE_MAX_CONNECTIONS=1 makes the device take kernels in the order of their issue, as Megatron
requires before Blackwell; without it the matmul may take all multiprocessors first.
"""  # noqa: E501

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from commgrid.collectives.asynchronous import (
    as_output,
    start_all_gather,
    start_all_reduce_,
    start_reduce_scatter,
)
from commgrid.collectives.first_order import first_order
from commgrid.torch_compat.autograd_nodes import will_run

Layer = tuple[Tensor, Tensor | None]
"""A weight and its bias."""


def column_matmul(
    x: Tensor, layers: list[Layer], group: ProcessGroup, sequence_dim: int | None = None
) -> tuple[Tensor, ...]:
    """x Wᵀ + b for each layer; ∂x is summed over the group.

    Args:
        x: (*, i), equal on all ranks, or with `sequence_dim` this rank's slice along it.
        layers: weights (o, i) and biases (o,) or None, of which this rank has its part.
        group: who shares the weights.
        sequence_dim: along which x is sharded; None: not at all.
    """
    if group.size() == 1:
        return tuple(as_own(F.linear(x, weight, bias)) for weight, bias in layers)
    flat = [tensor for layer in layers for tensor in layer]
    made: tuple[Tensor, ...] = _ColumnMatmul.apply(x, group, sequence_dim, *flat)  # type: ignore[no-untyped-call]
    return made


def row_matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: ProcessGroup,
    sequence_dim: int | None = None,
) -> Tensor:
    """The sum over the group of x Wᵀ, and b added once.

    Args:
        x: (*, i), this rank's features.
        weight: (o, i), this rank's columns.
        bias: (o,), equal on all ranks, or None.
        group: who shares the weight.
        sequence_dim: along which the result is sharded; None: not at all.
    """
    if group.size() == 1:
        return as_own(F.linear(x, weight, bias))
    made: Tensor = _RowMatmul.apply(x, weight, bias, group, sequence_dim)  # type: ignore[no-untyped-call]
    return made


def as_own(y: Tensor, *shape: int) -> Tensor:
    """The tensor in this shape, or its own, without a copy and as no view of another.

    FSDP2 warns of a module that returns a view. Only for a `y` that is not used otherwise.
    """
    made: Tensor = torch.ops.aten._unsafe_view(y, shape or y.shape)
    return made


class _ColumnMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        # Parameters are unnamed because torch.compile, without gradients, calls a forward without
        # ctx if it is given as many arguments as it names parameters (ctx included).
        x, group, sequence_dim, *flat = given
        ctx.group, ctx.sequence_dim = group, sequence_dim
        weights, biases = flat[::2], flat[1::2]
        ctx.save_for_backward(x, *weights)
        whole = x if sequence_dim is None else start_all_gather(x, group, sequence_dim).wait()
        return tuple(as_own(F.linear(whole, w, b)) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    @first_order("a column-parallel layer")
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_x, _, _, *needs = wanted(ctx)
        sequence_dim, group = ctx.sequence_dim, ctx.group
        gathering = None
        if sequence_dim is not None and any(needs[::2]):
            gathering = start_all_gather(x, group, sequence_dim)
        flat = [_rows(dy) for dy in dys]
        reducing = None
        if needs_x:
            dx = flat[0] @ weights[0].to(flat[0].dtype)
            for dy, weight in zip(flat[1:], weights[1:], strict=True):
                dx.addmm_(dy, weight.to(dy.dtype))
            dx = dx.view(*dys[0].shape[:-1], x.shape[-1])
            if sequence_dim is None:
                reducing = start_all_reduce_(dx, group)
            else:
                reducing = start_reduce_scatter(dx, group, sequence_dim)
        rows = _rows(x if gathering is None else gathering.wait())
        gradients: list[Tensor | None] = []
        for i, (dy, weight) in enumerate(zip(flat, weights, strict=True)):
            gradients.append(weight_gradient(ctx, weight, dy, rows) if needs[2 * i] else None)
            gradients.append(dy.sum(0) if needs[2 * i + 1] else None)
        return (reducing.wait() if reducing is not None else None, None, None, *gradients)


class _RowMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: ProcessGroup,
        sequence_dim: int | None,
    ) -> Tensor:
        ctx.group, ctx.sequence_dim = group, sequence_dim
        ctx.save_for_backward(x, weight)
        y = F.linear(x, weight)
        if sequence_dim is None:
            y = start_all_reduce_(y, group).wait()
        else:
            y = start_reduce_scatter(y, group, sequence_dim).wait()
        return as_output(y if bias is None else y.add_(bias))

    @staticmethod
    @first_order("a row-parallel layer")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = wanted(ctx)[:3]
        db = _rows(dy).sum(0) if needs_bias else None
        if ctx.sequence_dim is not None:
            dy = start_all_gather(dy, ctx.group, ctx.sequence_dim).wait()
        rows = _rows(dy)
        dx = (rows @ weight.to(rows.dtype)).view(x.shape) if needs_x else None
        dw = weight_gradient(ctx, weight, rows, _rows(x)) if needs_weight else None
        return dx, dw, db, None, None


def wanted(ctx: Any) -> tuple[bool, ...]:
    """Which input gradients this backward needs, in the backward of any autograd.Function.

    Differs from `needs_input_grad`, which covers every backward, if a pipeline computes the inputs'
    and the weights' gradients in two passes.

    Args:
        ctx: of the running backward.

    Returns:
        For each of forward's arguments, whether its gradient is to be computed.
    """
    if torch.compiler.is_compiling():
        return tuple(ctx.needs_input_grad)
    # One entry for each tensor among the inputs, None if it needs no gradient.
    nodes = (node for node, _ in ctx.next_functions if node is not None)
    found = [needed and will_run(next(nodes)) is not False for needed in ctx.needs_input_grad]
    return tuple(found)


def weight_gradient(ctx: Any, weight: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
    """∂W = ∂yᵀ x, (o, i), from rows of tokens ∂y (t, o) and x (t, i); None: it was added."""
    x = x.to(dy.dtype)  # under autocast y and ∂y have another dtype than x and W
    into = buffer_of(ctx, weight)
    if into is None:
        return dy.t() @ x
    add_product(into, dy, x)
    return None


def buffer_of(ctx: Any, weight: Tensor) -> Tensor | None:
    """The buffer to which a backward may add a weight's gradient, and then return None for it.

    A parameter's GradientReducer has one, unless hooks are to see the gradient, or a graph of it is
    asked for; None: autograd is given the gradient.

    Args:
        ctx: of the running backward, which is `first_order`.
        weight: as it was saved.
    """
    if torch.compiler.is_compiling() or getattr(ctx, "makes_graph", False):
        return None
    owner: Any = getattr(weight, "grad_owner", None)
    into: Tensor | None = owner.open() if owner is not None else None
    return into


def add_product(into: Tensor, dy: Tensor, x: Tensor) -> None:
    """Add ∂yᵀ x, computed in the dtype of ∂y and x, to a buffer (o, i)."""
    if into.dtype == dy.dtype:
        into.addmm_(dy.t(), x)
    else:
        into.add_(dy.t() @ x)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
