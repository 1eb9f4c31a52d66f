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
from commgrid.testing import run_on_ranks
from commgrid.transfer import Transfer

WAYS = ("load", "recover", "transfer")
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


def bring(way: str, folder: str, source: Any, target: Any) -> None:
    """Give a model and its optimizers the state of others."""
    if way == "load":
        checkpoint.save(folder, 1, *source, progress=False)
        checkpoint.load(folder, *target, progress=False)
    elif way == "recover":
        checkpoint.keep(1, *source)
        commgrid.recover(None, *target)
    else:
        grid, (models, optimizers) = commgrid.get_grid(), zip(source, target, strict=True)
        sides = {"source_grid": grid, "target_grid": grid}
        Transfer(*models, **sides, optimizer=optimizers, timeout=30).run()


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
