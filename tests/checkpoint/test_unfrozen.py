"""Layers that are unfrozen later: those trained before continue, the others begin anew."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import commgrid
from commgrid import CheckpointError, checkpoint
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.tensor_parallel import ColumnParallelLinear, initialize_parameters
from commgrid.testing import run_on_ranks

Made = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Made] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1, initial_accumulator_value=0.5),
}


def network(kind: str) -> nn.Module:
    torch.manual_seed(0)
    body: nn.Module = nn.Linear(4, 4, dtype=torch.float64)
    if kind == "tp":
        body = ColumnParallelLinear(4, 4, gather_output=True, dtype=torch.float64)
        initialize_parameters(body, 1)
    head = nn.Linear(4, 2, dtype=torch.float64)
    return nn.Sequential(OrderedDict(body=body, head=head))


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4) * (step + 1)
        model(x).square().sum().backward()
        optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    found = (getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters())
    return [each.detach().clone() for each in found]


def unfrozen(folder: str, kind: str, name: str, together: bool) -> bool:
    """Whether training continues as in one process that gave the larger optimizer its state.

    Args:
        together: whether what is unfrozen is in the same group of options as the rest.
    """
    grid, make = commgrid.initialize(tp=2 if kind == "tp" else 1), OPTIMIZERS[name]
    model, right = network(kind), network(kind)
    right_before = make([{"params": list(right.head.parameters()), "weight_decay": 0.25}])
    if kind == "fsdp":
        fully_shard(model, mesh=grid.device_mesh("dp"))
    model.body.requires_grad_(False)
    before = make([{"params": list(model.head.parameters()), "weight_decay": 0.25}])
    train(model, before, 2), train(right, right_before, 2)
    right = copy.deepcopy(right)
    checkpoint.save(folder, 2, model, before, progress=False)

    def larger(of: Any) -> torch.optim.Optimizer:
        body, head = (list(part.parameters()) for part in of)
        if together:
            return make([{"params": [*body, *head], "weight_decay": 0.25}])
        return make([{"params": head, "weight_decay": 0.125}, {"params": body}])

    model.body.requires_grad_(True)
    after, right_after = larger(model), larger(right)
    with pytest.raises(CheckpointError, match=r"has nothing for body.weight.*strict=False of load"):
        checkpoint.load(folder, model, after, progress=False)
    restored = checkpoint.load(folder, model, after, strict=False, progress=False)
    head = list(right.head.parameters())
    for new, old in zip(head, right_before.param_groups[0]["params"], strict=True):
        right_after.state[new] = copy.deepcopy(right_before.state[old])
    if not together:
        right_after.param_groups[0]["weight_decay"] = 0.25
    train(model, after, 3), train(right, right_after, 3)
    same = all(
        torch.allclose(one, other, rtol=1e-12, atol=1e-12)
        for one, other in zip(weights(model), weights(right), strict=True)
    )
    commgrid.shutdown()
    names = [f"optimizer.param_groups.body.{each}" for each in ("weight", "bias")]
    return same and sorted(restored.missing) == sorted(names)


@pytest.mark.parametrize("together", [True, False], ids=["one group", "two groups"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_layers_that_are_unfrozen_begin_anew(name: str, together: bool, tmp_path: Path) -> None:
    assert run_on_ranks(unfrozen, 1, str(tmp_path), "plain", name, together) == [True]


@pytest.mark.parametrize("kind", ["tp", "fsdp"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.full("*-tp", "*-fsdp")
def test_layers_that_are_cut(name: str, kind: str, tmp_path: Path) -> None:
    assert run_on_ranks(unfrozen, 2, str(tmp_path), kind, name, True) == [True] * 2


def unfrozen_stage(folder: str) -> tuple[float, int]:
    """Of two stages the first was frozen, and had no optimizer."""
    grid = commgrid.initialize(pp=2)
    first = grid.get_local_rank("pp") == 0
    model = nn.ModuleDict({"body" if first else "head": nn.Linear(2, 2)}).requires_grad_(not first)
    before = None if first else torch.optim.AdamW(model.parameters(), lr=0.25)
    if before is not None:
        model["head"].weight.grad = torch.ones(2, 2)
        before.step()
    checkpoint.save(folder, 1, model, before, progress=False)
    model.requires_grad_(True)
    after = torch.optim.AdamW(model.parameters(), lr=0.5)
    restored = checkpoint.load(folder, model, after, strict=False, progress=False)
    assert sorted(restored.missing) == [
        "optimizer.param_groups.body.bias", "optimizer.param_groups.body.weight",
    ]  # fmt: skip
    commgrid.shutdown()
    return after.param_groups[0]["lr"], len(after.state)


def test_a_stage_that_was_frozen(tmp_path: Path) -> None:
    assert run_on_ranks(unfrozen_stage, 2, str(tmp_path)) == [(0.5, 0), (0.25, 1)]


def new_head(folder: str) -> bool:
    """A layer that the checkpoint has not, with a copy in fp32 of its weights."""
    commgrid.initialize()

    def made(*names: str) -> tuple[nn.ModuleDict, GradientReducer, ShardedOptimizer]:
        torch.manual_seed(len(names))
        model = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in names})
        model.to(torch.bfloat16)
        reducer = GradientReducer(model, shard=True)
        return model, reducer, ShardedOptimizer(reducer, torch.optim.AdamW, weight_decay=0.0)

    old, _, before = made("body")
    checkpoint.save(folder, 1, old, before, progress=False)
    model, reducer, after = made("body", "head")
    right = [old["body"].weight.detach().clone(), torch.full((8, 8), 2.0).bfloat16()]
    with torch.no_grad():
        model["head"].weight.fill_(2.0)
    restored = checkpoint.load(folder, model, after, strict=False, progress=False)
    assert restored.missing == ("head.weight", "optimizer.param_groups.head.weight")
    (0.0 * sum(p.float().sum() for p in model.parameters())).backward()  # type: ignore[union-attr]
    reducer.finish()
    after.step()  # writes the copies in fp32 to the weights
    after.wait()
    same = all(torch.equal(p, q) for p, q in zip(model.parameters(), right, strict=True))
    commgrid.shutdown()
    return same


def test_a_layer_that_the_checkpoint_has_not(tmp_path: Path) -> None:
    assert run_on_ranks(new_head, 2, str(tmp_path)) == [True] * 2


def test_an_optimizer_of_other_parameters_alone_is_another_one(tmp_path: Path) -> None:
    commgrid.initialize()
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    body, head = (torch.optim.AdamW(model[name].parameters()) for name in model)
    checkpoint.save(tmp_path, 1, model, body, progress=False)
    with pytest.raises(CheckpointError, match=r"another optimizer: it has none of .*head.weight"):
        checkpoint.load(tmp_path, model, head, strict=False, progress=False)
    commgrid.shutdown()
