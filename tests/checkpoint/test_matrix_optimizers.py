"""Optimizers of whole matrices, over parameters that every rank has whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import commgrid
from commgrid import CommGridError, checkpoint
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    initialize_parameters,
)
from commgrid.testing import run_on_ranks
from tests.ways import WAYS, bring

Brings = Callable[[Any, Any, Any, Any], None]


class Preconditioned(torch.optim.Optimizer):
    """Keeps what is of neither the parameter's shape nor made of its rows and columns."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state, rows = self.state[p], p.grad.reshape(p.shape[0], -1)
                state.setdefault("left", torch.eye(p.shape[0], dtype=p.dtype)).addmm_(rows, rows.T)
                p -= group["lr"] * (state["left"].inverse() @ rows).view_as(p)


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.1),
    "preconditioned": lambda model: Preconditioned(model.parameters()),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def train(model: nn.Module, optimizers: Any, steps: int) -> None:
    several = optimizers if isinstance(optimizers, list) else [optimizers]
    for step in range(steps):
        model.zero_grad()
        x = torch.linspace(-1, 1, 18, dtype=torch.float64).view(3, 6) * (step + 1)
        model(x).square().sum().backward()
        for each in several:
            each.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [each.detach().clone() for each in model.parameters()]


def continues(folder: str, way: str, name: str) -> bool:
    """Whether training continues as one that never stopped."""
    commgrid.initialize()
    model, other = network(), network()
    optimizer, fresh = OPTIMIZERS[name](model), OPTIMIZERS[name](other)
    train(model, optimizer, 3)
    bring(way, folder, (model, optimizer), (other, fresh))
    train(model, optimizer, 2), train(other, fresh, 2)
    commgrid.shutdown()
    return all(map(torch.equal, weights(model), weights(other)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.full("preconditioned-*")
def test_copies_of_a_model_continue(name: str, way: str, tmp_path: Path) -> None:
    assert run_on_ranks(continues, 2, str(tmp_path), way, name) == [True] * 2


# -- several optimizers --------------------------------------------------------------------


def several(model: nn.Module, order: int = 1, second: Any = torch.optim.AdamW) -> list[Any]:
    """Muon for matrices, and another one for the rest."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.05), second(rest, lr=0.1)][::order]


def several_continue(folder: str, way: str) -> bool:
    """Whether training continues as one that never stopped, also in another order of the list."""
    commgrid.initialize()
    model, other = network(), network()
    optimizers, fresh = several(model), several(other, order=-1)
    train(model, optimizers, 3)
    bring(way, folder, (model, optimizers), (other, fresh))
    train(model, optimizers, 2), train(other, fresh, 2)
    commgrid.shutdown()
    return all(map(torch.equal, weights(model), weights(other)))


@pytest.mark.parametrize("way", WAYS)
def test_several_optimizers_continue(way: str, tmp_path: Path) -> None:
    assert run_on_ranks(several_continue, 2, str(tmp_path), way) == [True] * 2


def sharded_beside(folder: str, tp: int) -> list[float]:
    """Losses of tp slices whose norm has an optimizer sharded over dp; of both parts of a run."""
    commgrid.initialize(tp=tp)
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(3, 8)

    def made() -> tuple[nn.Module, Any, list[Any]]:
        model = nn.Sequential(
            ColumnParallelLinear(8, 16), nn.LayerNorm(8), RowParallelLinear(16, 8)
        ).double()
        model = nn.Sequential(model[0], model[2], model[1])
        initialize_parameters(model, 1)
        reducer = GradientReducer(model[:2], shard=True)
        norm = torch.optim.Adam(model[2].parameters(), lr=0.1)
        return model, reducer, [ShardedOptimizer(reducer, torch.optim.AdamW, lr=0.1), norm]

    def steps(count: int, model: nn.Module, reducer: Any, optimizers: list[Any]) -> list[float]:
        found = []
        for _ in range(count):
            optimizers[1].zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            reducer.finish()
            for each in optimizers:
                each.step()
            optimizers[0].wait()
            found.append(loss.item())
        return found

    if not checkpoint.steps(folder):
        one = made()
        losses = steps(2, *one)
        checkpoint.save(folder, 2, one[0], one[2], progress=False)
        losses += steps(2, *one)
    else:
        one = made()
        checkpoint.load(folder, one[0], one[2], progress=False)
        losses = steps(2, *one)
    commgrid.shutdown()
    return losses


def test_one_of_several_is_sharded(tmp_path: Path) -> None:
    """Saved on tp 2 by dp 2, continued on dp 2 and in one process."""
    before = run_on_ranks(sharded_beside, 4, str(tmp_path), 2)[0]
    for ranks in (2, 1):
        after = run_on_ranks(sharded_beside, ranks, str(tmp_path), 1)[0]
        assert after == pytest.approx(before[2:], rel=1e-9)


def stages(folder: str) -> bool:
    """Whether stages may have other ones of the optimizers."""
    grid = commgrid.initialize(pp=2)
    torch.manual_seed(grid.rank)
    first = grid.get_local_rank("pp") == 0
    model = nn.ModuleDict({f"layer{grid.rank}": nn.Linear(4, 4, bias=first)})
    optimizers = several(model) if first else [torch.optim.Muon(model.parameters(), lr=0.05)]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for each in optimizers:
        each.step()
    checkpoint.save(folder, 1, model, optimizers, progress=False)
    fresh = several(model) if first else [torch.optim.Muon(model.parameters())]
    checkpoint.load(folder, model, fresh, progress=False)
    commgrid.shutdown()
    right = [
        torch.equal(mine.state[p]["momentum_buffer"], theirs.state[p]["momentum_buffer"])
        for mine, theirs in zip(fresh[:1], optimizers[:1], strict=True) for p in mine.state
    ]  # fmt: skip
    return all(right) and fresh[0].param_groups[0]["lr"] == 0.05


def test_a_stage_may_have_one_of_several(tmp_path: Path) -> None:
    assert run_on_ranks(stages, 2, str(tmp_path)) == [True] * 2


def test_several_that_are_others_or_overlap_are_refused(tmp_path: Path) -> None:
    commgrid.initialize()
    model = network()
    checkpoint.save(tmp_path, 1, model, several(model), progress=False)
    with pytest.raises(
        CommGridError, match=r"its optimizer is AdamW, and here is Adam, which updates 0.bias"
    ):
        checkpoint.load(tmp_path, model, several(model, 1, torch.optim.Adam), progress=False)
    both = [torch.optim.AdamW(model.parameters()) for _ in range(2)]
    with pytest.raises(CommGridError, match=r"two update 0\.weight; expected one of torch\.optim"):
        checkpoint.save(tmp_path, 2, model, both, progress=False)
    with pytest.raises(CommGridError, match=r"optimizer=\[\]: there is none in it"):
        checkpoint.save(tmp_path, 2, model, [], progress=False)
    # One for all takes the state of several of its class.
    halves = [torch.optim.AdamW(model[place].parameters(), lr=0.25) for place in (0, 2)]
    checkpoint.save(tmp_path, 2, model, halves, progress=False)
    whole = torch.optim.AdamW(model.parameters())
    checkpoint.load(tmp_path, model, whole, progress=False)
    assert whole.param_groups[0]["lr"] == 0.25
    checkpoint.save(tmp_path, 3, model, whole, progress=False)
    checkpoint.load(tmp_path, model, halves, progress=False)
    commgrid.shutdown()


# -- refused -------------------------------------------------------------------------------


def refused(folder: str) -> dict[str, str]:
    """Parameters that FSDP2 cuts, and an optimizer with state of all parameters in one."""
    grid, found = commgrid.initialize(), {}

    def told(call: Any, *given: Any) -> str:
        with pytest.raises(CommGridError) as error:
            call(*given, progress=False)
        return str(error.value)

    model = network()
    optimizer = torch.optim.Adafactor(model.parameters())
    train(model, optimizer, 1)
    checkpoint.save(folder, 1, model, optimizer, progress=False)
    cut = network()
    fully_shard(cut, mesh=grid.device_mesh("dp"))
    apart = torch.optim.Adafactor(cut.parameters())
    found["load"] = told(checkpoint.load, folder, cut, apart)
    states = copy.deepcopy(optimizer).state.values()
    apart.state.update(zip(cut.parameters(), states, strict=True))
    found["save"] = told(checkpoint.save, folder, 2, cut, apart)
    lbfgs = torch.optim.LBFGS(model.parameters())
    lbfgs.step(lambda: model(torch.ones(1, 6, dtype=torch.float64)).sum() * 0.0)
    lbfgs.state[next(model.parameters())]["d"] = torch.zeros(38)
    found["lbfgs"] = told(checkpoint.save, folder, 2, model, lbfgs)
    commgrid.shutdown()
    return found


def test_what_is_not_of_one_whole_parameter_is_refused(tmp_path: Path) -> None:
    for told in run_on_ranks(refused, 2, str(tmp_path)):
        assert "has shape (1, 6), but the parameter has (4, 6), and ranks have sl" in told["load"]
        assert "'row_var' of shape (4, 1) belongs to a part of shape (4, 6)" in told["save"]
        assert "'d' of shape (38,)" in told["lbfgs"]
