"""Edits of gradients after finish: equal factors and other edits are right, unequal ones refused.

Cases are models without any copy along tp, wide ones whose slices have almost equal norms, and
clipping that first bites in a later step.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from commgrid import GridMismatchError
from commgrid.data_parallel import GradientReducer, GradScaler
from commgrid.expert import MoELayer
from commgrid.runtime.grid import HyperCommGrid
from commgrid.tensor_parallel import ColumnParallelLinear, RowParallelLinear, initialize_parameters

TOLD = r"rank \d has scaled its gradients by .* after finish\(\), and rank \d by .*clip_grad_norm_"


def mlp(width: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    layers = [
        ColumnParallelLinear(width, width, bias=False, dtype=dtype),
        RowParallelLinear(width, width, bias=False, dtype=dtype),
    ]
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1])
    initialize_parameters(model, seed=0)
    return model


def train(model: nn.Module, edit: Callable[[int], None], steps: int, width: int) -> None:
    reducer = GradientReducer(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        x = torch.randn(3, width, generator=generator).to(dtype)
        model(x).square().sum().backward()
        reducer.finish()
        edit(step)
        optimizer.step()
        optimizer.zero_grad()
    reducer.close()


@pytest.mark.ranks(2, tp=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "bites"), [(4, 0), (256, 0), (4, 23)])
def test_torchs_clipping_over_slices_is_refused(width: int, bites: int, dtype: torch.dtype) -> None:
    model = mlp(width, dtype)
    most = [1e-3 if step >= bites else 1e9 for step in range(bites + 2)]
    train(model, lambda step: None, 2, width)
    if width == 256 and dtype == torch.bfloat16:
        return  # slices' norms differ by less than the rounding of bf16
    with pytest.raises(GridMismatchError, match=TOLD):
        train(model, lambda step: _clip(model, most[step]), bites + 2, width)


def _clip(model: nn.Module, most: float) -> None:
    clip_grad_norm_(model.parameters(), most)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.ranks(2, tp=2)
def test_edits_that_are_equal_or_element_by_element_are_right() -> None:
    model = mlp(4)

    def edit(step: int) -> None:
        for index, gradient in enumerate(gradients(model)):
            gradient.mul_(0.5 + index)
            gradient.clamp_(-0.01, 0.01)

    train(model, edit, 3, 4)
    train(model, lambda step: [g.mul_(0.5) for g in gradients(model)] and None, 3, 4)


@pytest.mark.ranks(2, tp=2)
def test_commgrids_clipping_and_scaler_are_right() -> None:
    model = mlp(4)
    reducer = GradientReducer(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=4.0)
    for _ in range(3):
        scaler.scale(model(torch.ones(3, 4)).square().sum()).backward()
        reducer.finish()
        scaler.unscale_(optimizer)
        reducer.clip_gradients(1e-3)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@pytest.mark.ranks(2, ep=2)
def test_torchs_clipping_over_experts_is_refused(grid: HyperCommGrid) -> None:
    """Dense weights are copies along dp, which a clip by each rank's experts drives apart."""
    model = nn.Sequential(nn.Linear(4, 4), MoELayer(4, 8, 4, 2))
    initialize_parameters(model, seed=0)
    with pytest.raises(GridMismatchError, match=TOLD):
        train(model, lambda step: _clip(model, 1e-3), 3, 4)
