"""Gradients of gradients through the differentiable collectives, next to one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import commgrid
from commgrid import CommGridError
from commgrid.collectives import (
    all_gather_from_group,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    reduce_scatter_to_group,
    scatter_to_group,
)
from commgrid.context_parallel import SequenceSharding, attention
from commgrid.runtime.grid import HyperCommGrid
from commgrid.tensor_parallel import ColumnParallelLinear, RowParallelLinear

Forward = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""This rank's loss from x, the two whole weights and the rank; equal on all ranks."""


def through_sums(x: Tensor, up: Tensor, down: Tensor, rank: int) -> Tensor:
    inner = F.linear(copy_to_group(x), up.chunk(2)[rank]).tanh()
    return reduce_from_group(F.linear(inner, down.chunk(2, dim=1)[rank])).square().sum()


def through_sequences(x: Tensor, up: Tensor, down: Tensor, rank: int) -> Tensor:
    own = scatter_to_group(x, dim=0)
    inner = F.linear(all_gather_from_group(own, dim=0), up.chunk(2)[rank]).tanh()
    y = reduce_scatter_to_group(F.linear(inner, down.chunk(2, dim=1)[rank]), dim=0)
    return gather_from_group(y, dim=0).square().sum()


def alone(x: Tensor, up: Tensor, down: Tensor, rank: int) -> Tensor:
    return F.linear(F.linear(x, up).tanh(), down).square().sum()


def penalty(forward: Forward, rank: int) -> list[Tensor]:
    """Of the loss's gradient by x, the gradients by x and the weights."""
    generator = torch.Generator().manual_seed(0)
    x, up, down = (
        torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)
        for shape in ((4, 3), (6, 3), (3, 6))
    )
    (gradient,) = torch.autograd.grad(forward(x, up, down, rank), x, create_graph=True)
    return list(torch.autograd.grad(gradient.square().sum(), [x, up, down]))


@pytest.mark.ranks(2, tp=2)
@pytest.mark.parametrize("forward", [through_sums, through_sequences])
def test_a_gradient_penalty_is_that_of_one_process(grid: HyperCommGrid, forward: Forward) -> None:
    """fp64, 1e-10: sums of some tens of products in another order."""
    dx, dup, ddown = penalty(forward, grid.rank)
    wanted = penalty(alone, 0)
    for weight in (dup, ddown):  # each rank has its slice's, and zeros elsewhere
        torch.distributed.all_reduce(weight)
    for found, expected in zip((dx, dup, ddown), wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.ranks(2, tp=2)
@pytest.mark.parametrize("layer_class", [ColumnParallelLinear, RowParallelLinear])
def test_a_gradient_penalty_through_a_layer_is_refused(layer_class: type[nn.Module]) -> None:
    """Also where the layer is last, so that only its weight depends on the gradient's graph."""
    layer = layer_class(4, 4).double()
    x = torch.ones(2, 4 if layer_class is ColumnParallelLinear else 2, dtype=torch.float64)
    x.requires_grad_()
    (first,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    (plain,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(first, plain)  # one derivative alone is right
    (gradient,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(CommGridError, match=r"parallel layer was differentiated again .create_gr"):
        gradient.square().sum().backward()


def test_a_gradient_penalty_through_attention_is_refused() -> None:
    q = torch.ones(1, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    commgrid.initialize()
    y = attention(q, q, q, sharding=SequenceSharding.contiguous(4, 1))
    (gradient,) = torch.autograd.grad(y.square().sum(), q, create_graph=True)
    with pytest.raises(CommGridError, match="context-parallel attention was differentiated again"):
        gradient.square().sum().backward()
    commgrid.shutdown()
