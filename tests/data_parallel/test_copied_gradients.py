"""Replicas along tp with unsummed gradients: equal, or an error that names the parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from commgrid import CommGridError, GridMismatchError
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.data_parallel import step_comparison as module
from commgrid.parameters import mark_parameters
from commgrid.runtime.grid import HyperCommGrid
from commgrid.tensor_parallel import ColumnParallelLinear, RowParallelLinear, initialize_parameters


class Block(nn.Module):
    """A norm that sees a slice of the sequence, and a zero-initialised scale behind the layers."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        options: dict[str, Any] = {"sequence_parallel": True, "dtype": dtype}
        self.norm = nn.LayerNorm(4, dtype=dtype)
        self.up = ColumnParallelLinear(4, 8, **options)
        self.down = RowParallelLinear(8, 4, **options)
        initialize_parameters(self, seed=0)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)))


def x_of(grid: HyperCommGrid, dtype: torch.dtype = torch.float64) -> Tensor:
    """This rank's slice of a sequence of 4."""
    x = torch.randn(4, 2, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    return x.chunk(2)[grid.get_local_rank("tp")]


@pytest.mark.ranks(4, tp=2)
@pytest.mark.parametrize("shard", [False, True])
def test_a_forgotten_mark_is_named(grid: HyperCommGrid, shard: bool) -> None:
    model = Block()
    reducer = GradientReducer(model, shard=shard)
    optimizer = ShardedOptimizer(reducer, torch.optim.SGD, lr=0.1)
    model(x_of(grid)).square().sum().backward()
    with pytest.raises(
        GridMismatchError,
        match=r"norm\.\w+ of shape \(4,\) has different gradients on the ranks of group 'tp' "
        r"\(ranks .* mark_parameters\(module, partial='tp'\)|^other ranks have copies",
    ):
        reducer.finish()
    optimizer.zero_grad()


@pytest.mark.ranks(4, tp=2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_is_right_is_not_accused_and_costs_little_later(
    grid: HyperCommGrid, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Block(dtype)
    mark_parameters(model.norm, partial="tp")
    scale = nn.Parameter(torch.zeros(4, dtype=dtype))  # the layers have no gradient at first
    model.register_parameter("scale", scale)
    reducer = GradientReducer(model)
    optimizer = ShardedOptimizer(reducer, torch.optim.SGD, lr=0.1)
    compared: list[tuple[int, int]] = []
    step = 0
    fingerprints = module._fingerprints

    def counted(pending: Any) -> Tensor:
        compared.append((step, len(pending)))
        return fingerprints(pending)

    monkeypatch.setattr(module, "_fingerprints", counted)
    for step in range(27):  # noqa: B007
        y = model(x_of(grid, dtype))
        whole = torch.cat([torch.zeros_like(y), y] if grid.get_local_rank("tp") else [y])
        (whole[-2:] * scale.detach()).sum().backward()
        scale.grad = torch.ones_like(scale, dtype=scale.grad_dtype)
        reducer.finish()
        reducer.clip_gradients(1.0)
        optimizer.step()
        optimizer.zero_grad()
    # Compared is the scale; the row layer's bias is partial here and so is not.
    assert {count for _, count in compared} == {1}
    assert [step for step, _ in compared[:4]] == [0, 0, 1, 1]  # after finish, and before the step
    assert [step for step, _ in compared[40:]] == [20, 24, 25]


@pytest.mark.ranks(2, tp=2)
def test_torchs_clipping_over_slices_is_named_in_the_next_step(grid: HyperCommGrid) -> None:
    model = nn.Sequential(ColumnParallelLinear(4, 8), RowParallelLinear(8, 4))
    initialize_parameters(model, seed=0)
    reducer = GradientReducer(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    for step in range(2):
        model(x).square().sum().backward()
        if step:
            with pytest.raises(
                CommGridError,
                match=r"rank [01] has scaled its gradients by 0\.01\d+ after finish\(\), and rank "
                r"[01] by 0\.01\d+; torch's clip_grad_norm_ takes",
            ):
                reducer.finish()
        else:
            reducer.finish()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.ranks(4, tp=2)
def test_a_mark_does_not_reach_into_layers_that_know_better(grid: HyperCommGrid) -> None:
    """The whole block is marked; the row layer's bias is a copy, whose gradient is whole."""
    layers = [ColumnParallelLinear(4, 8, dtype=torch.float64) for _ in range(1)]
    block = nn.Sequential(*layers, RowParallelLinear(8, 4, dtype=torch.float64))
    model = mark_parameters(block, partial="tp")
    initialize_parameters(model, seed=0)
    reducer = GradientReducer(model)
    model(torch.ones(5, 4, dtype=torch.float64)).sum().backward()
    reducer.finish()
    bias = model[1].bias.grad
    assert isinstance(bias, Tensor)
    assert bias.tolist() == [5.0] * 4


@pytest.mark.ranks(2, tp=2)
def test_a_gradient_that_is_not_finite_is_compared_in_a_later_step(grid: HyperCommGrid) -> None:
    """As in fp16's first step, whose loss scale is too large."""
    model = nn.ModuleDict({"one": nn.Linear(2, 1), "two": nn.Linear(2, 1)})
    initialize_parameters(model, seed=0)
    reducer = GradientReducer(model)
    rank = grid.get_local_rank("tp")
    for step in range(2):
        model["one"](torch.ones(1, 2)).sum().backward()
        scale = 1.0 + rank if step else float("inf")
        (scale * model["two"](torch.ones(1, 2))).sum().backward()
        if step:
            with pytest.raises(
                GridMismatchError, match=r"two\.\w+ .* has different gradients on the"
            ):
                reducer.finish()
        else:
            reducer.finish()
        model.zero_grad()


@pytest.mark.ranks(2, tp=2)
def test_a_step_on_some_ranks_only_is_named_by_the_next_finish(grid: HyperCommGrid) -> None:
    """As where torch's GradScaler finds an overflow in the slices of one rank."""
    model = nn.Linear(2, 1)
    initialize_parameters(model, seed=0)
    reducer = GradientReducer(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(torch.ones(1, 2)).sum().backward()
        if step:
            with pytest.raises(GridMismatchError, match=r"stepped on some ranks of group 'tp'"):
                reducer.finish()
        else:
            reducer.finish()
            if grid.get_local_rank("tp"):
                optimizer.step()
            optimizer.zero_grad()


@pytest.mark.ranks(2, tp=2)
@pytest.mark.parametrize("grows", [False, True])
def test_a_negligible_gradient_is_compared_once_it_has_grown(
    grid: HyperCommGrid, grows: bool
) -> None:
    """Rounding leaves a different rest of a zero gradient on each rank; here 1e-9 of the largest.

    Once every other gradient has been compared, it is still negligible beside them.
    """
    model = nn.ModuleDict({"one": nn.Linear(2, 1), "two": nn.Linear(2, 1)})
    initialize_parameters(model, seed=0)
    reducer = GradientReducer(model)
    for step in range(4):
        model["one"](torch.ones(1, 2)).sum().backward()
        scale = 1.0 if grows and step == 3 else 1e-9
        (
            (1.0 + grid.get_local_rank("tp")) * scale * model["two"](torch.ones(1, 2))
        ).sum().backward()
        if grows and step == 3:
            with pytest.raises(GridMismatchError, match=r"two\.\w+ .* has different gradients"):
                reducer.finish()
        else:
            reducer.finish()
        model.zero_grad()
