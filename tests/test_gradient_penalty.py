"""Gradients of gradients through the differentiable collectives, next to one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from commgrid.collectives import (
    all_gather_from_group,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    reduce_scatter_to_group,
    scatter_to_group,
)
from commgrid.runtime.grid import HyperCommGrid

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
