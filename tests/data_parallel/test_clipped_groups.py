"""Clipping of groups by the norm of the whole model's, and running statistics, over a grid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from commgrid import SpecError
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.runtime.grid import HyperCommGrid
from commgrid.tensor_parallel import ColumnParallelLinear, RowParallelLinear, initialize_parameters

CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-12}  # fp64, other orders of sums


def whole_of(grid: HyperCommGrid, slices: list[Tensor]) -> list[Tensor]:
    """Full weights of a column and a row layer from each rank's."""
    parts = [torch.empty(2, *part.shape, dtype=torch.float64).unbind() for part in slices]
    found = []
    for dim, (part, own) in enumerate(zip(parts, slices, strict=True)):
        torch.distributed.all_gather(list(part), own.detach().contiguous(), grid.get_group("tp"))
        found.append(torch.cat(list(part), dim))
    return found


@pytest.mark.ranks(4, tp=2)
@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("norms", [(1e-3, 1e-2), (1e-3, 1e9)])
def test_groups_are_clipped_as_those_of_the_unsharded_model(
    grid: HyperCommGrid, shard: bool, norms: tuple[float, float]
) -> None:
    layers = [
        ColumnParallelLinear(4, 6, bias=False, dtype=torch.float64),
        RowParallelLinear(6, 4, bias=False, dtype=torch.float64),
    ]
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1])
    initialize_parameters(model, seed=0)
    full = whole_of(grid, [layer.weight for layer in layers])
    oracle = [nn.Parameter(weight) for weight in full]
    reference = torch.optim.AdamW([{"params": [p]} for p in oracle], lr=0.01)
    reducer = GradientReducer(model, shard=shard)
    groups = [{"params": [layer.weight]} for layer in layers]
    optimizer = ShardedOptimizer(reducer, torch.optim.AdamW, groups=groups, lr=0.01)
    for step in range(3):
        xs = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(step)).double()
        model(xs[grid.get_local_rank("dp")]).square().sum().backward()
        reducer.finish()
        loss = sum((torch.tanh(x @ oracle[0].T) @ oracle[1].T).square().sum() for x in xs) / 2
        loss.backward()  # type: ignore[union-attr]
        given: list[Any] = [optimizer.param_groups[0], list(layers[1].parameters())]
        for group, theirs, most in zip(given, oracle, norms, strict=True):
            found = reducer.clip_gradients(most, group)
            torch.testing.assert_close(found, clip_grad_norm_([theirs], most), **CLOSE)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    after = whole_of(grid, [layer.weight for layer in layers])
    torch.testing.assert_close(after, [each.detach() for each in oracle], **CLOSE)


@pytest.mark.ranks(2, pp=2)
def test_a_group_that_one_stage_has(grid: HyperCommGrid) -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    reducer = GradientReducer(model)
    model(torch.tensor([[3.0, 4.0]])).sum().backward()
    reducer.finish()
    own = list(model.parameters()) if grid.get_local_rank("pp") else []
    assert reducer.clip_gradients(1.0, group=own).item() == pytest.approx(5.0)
    expected = [0.6, 0.8] if own else [3.0, 4.0]
    assert model.weight.grad is not None
    torch.testing.assert_close(model.weight.grad, torch.tensor([expected]), rtol=1e-5, atol=0)
    with pytest.raises(SpecError, match=r"of shape \(3,\) is not among those that this"):
        reducer.gradient_norm([nn.Parameter(torch.ones(3))])


@pytest.mark.ranks(2)
def test_running_statistics_are_equal_after_finish(grid: HyperCommGrid) -> None:
    """So that evaluations are, as under DDP."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1), nn.BatchNorm1d(1, affine=False))
    initialize_parameters(model, seed=0)
    reducer = GradientReducer(model)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(grid.rank))
    model(x).sum().backward()
    first = model[0].running_mean
    assert isinstance(first, Tensor)
    own = first.clone()
    reducer.finish()
    if grid.rank == 0:
        assert torch.equal(first, own)
    y = model.eval()(torch.ones(2, 3)).detach()
    both = [torch.empty_like(y) for _ in range(2)]
    torch.distributed.all_gather(both, y, grid.get_group("dp"))
    assert torch.equal(*both)
