"""Stories of users: names, views and DTensors, several transfers, optimizers, changed models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import commgrid
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.tensor_parallel import ColumnParallelLinear, initialize_parameters
from commgrid.testing import run_on_ranks
from commgrid.transfer import Part, Transfer


def numbers(*shape: int, begin: int = 1) -> Tensor:
    """Other numbers than zero, each another one."""
    return torch.arange(begin, begin + torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def moved(source: Any, target: Any, **options: Any) -> Transfer:
    """A transfer on the default grid, after a run."""
    grid = commgrid.get_grid()
    sides = {"source_grid": grid, "target_grid": grid}
    transfer = Transfer(source, target, **sides, timeout=60, **options)
    transfer.run()
    return transfer


def by_name() -> None:
    """Names that change places, and a part of them."""
    source = {"a": numbers(2), "b": numbers(2, begin=9)}
    swap = {"a": "b", "b": "a"}
    target = {name: torch.zeros(2, dtype=torch.float64) for name in source}
    moved(source, target, rename=swap)
    assert torch.equal(target["a"], source["b"])
    assert torch.equal(target["b"], source["a"])
    target = {name: torch.zeros(2, dtype=torch.float64) for name in source}
    moved(source, target, rename=swap, only=["a"])
    assert torch.equal(target["a"], source["b"])
    assert not target["b"].any()


def adapters() -> None:
    """The low-rank adapters of a model cut over tp, to an engine that keeps its base weights."""
    grid = commgrid.initialize(name="cut", tp=2)
    with commgrid.use_grid(grid):
        trained = nn.ModuleDict({
            "base": ColumnParallelLinear(8, 16, bias=False),
            "lora_down": nn.Linear(8, 2, bias=False),
            "lora_up": ColumnParallelLinear(2, 16, bias=False),
        })  # fmt: skip
    initialize_parameters(trained, 1)
    engine = {
        "base.weight": torch.full((16, 8), 3.0), "lora_A.weight": torch.zeros(2, 8),
        "lora_B.weight": torch.zeros(16, 2),
    }  # fmt: skip
    transfer = Transfer(
        trained, engine, source_grid=grid, target_grid=grid, only=["lora_*"],
        rename=lambda name: name.replace("lora_down", "lora_A").replace("lora_up", "lora_B"),
    )  # fmt: skip
    transfer.run()
    assert torch.equal(engine["lora_B.weight"].chunk(2)[grid.rank], trained["lora_up"].weight)
    assert torch.equal(engine["lora_A.weight"], trained["lora_down"].weight)
    assert engine["base.weight"].eq(3).all()
    assert max(transfer.plan.received.values()) == 64  # the other half of one adapter


def into_views() -> None:
    """Parts of a target that are columns of one larger tensor, and its other columns."""
    pool = torch.zeros(4, 6, dtype=torch.float64)
    right = numbers(4, 4)
    parts = [Part(pool[:, 0:4:2], (4, 4), (0, 0)), Part(pool[:, 3:5], (4, 4), (0, 2))]
    moved({"w": right}, {"w": parts}, max_bytes=1)
    assert torch.equal(pool[:, [0, 2, 3, 4]], right)
    assert not pool[:, [1, 5]].any()


def dtensors() -> None:
    """Uneven columns to uneven rows."""
    mesh = commgrid.get_grid().device_mesh("dp")
    source = distribute_tensor(numbers(5, 7), mesh, [Shard(1)])
    target = distribute_tensor(torch.zeros(5, 7, dtype=torch.float64), mesh, [Shard(0)])
    moved({"w": source}, {"w": target})
    assert torch.equal(target.full_tensor(), numbers(5, 7))


def layers() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    return model.to(torch.float64)


def state_dicts() -> None:
    """FSDP2's state_dict into a plain model's."""
    model = layers()
    whole = copy.deepcopy(model)
    fully_shard(model, mesh=commgrid.get_grid().device_mesh("dp"))
    target = layers()
    for parameter in target.parameters():
        parameter.data.zero_()
    moved(model.state_dict(), target.state_dict())
    for one, other in zip(target.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, other)


def replaced() -> None:
    """A parameter is replaced by one of its form between two runs, which gets the numbers."""
    source, target = layers(), layers()
    transfer = moved(source, target)
    with torch.no_grad():
        next(source.parameters()).mul_(2)
    first: Any = target[0]  # type: ignore[index]
    first.weight = nn.Parameter(torch.zeros_like(first.weight))
    transfer.run()
    assert torch.equal(first.weight, next(source.parameters()))


def all_of(stories: tuple[Any, ...]) -> None:
    for story in stories:
        commgrid.initialize()
        story()
        commgrid.shutdown()


def test_names_and_views() -> None:
    run_on_ranks(all_of, 2, (by_name, adapters, into_views))


@pytest.mark.full
def test_dtensors_state_dicts_and_replaced_parameters() -> None:
    run_on_ranks(all_of, 2, (dtensors, state_dicts, replaced))


# -- several transfers ---------------------------------------------------------------------------


def interleaved() -> None:
    """From tp over ranks 3 and 1 to two targets on 2 and 0, in turn, and one after the other."""
    trains = dist.get_rank() in (1, 3)
    name = "source" if trains else "target"
    sizes = {"ranks": [3, 1], "tp": 2} if trains else {"ranks": [2, 0]}
    grid = commgrid.initialize(name=name, **sizes)
    with commgrid.use_grid(grid):
        own = [ColumnParallelLinear(4, 6, bias=False) for _ in range(1 if trains else 2)]
    sides: Any = {f"{name}_grid": grid, "timeout": 60}
    if trains:
        transfers = [Transfer(own[0], None, name=each, **sides) for each in "ab"]
    else:
        transfers = [
            Transfer(None, each, name=key, **sides) for key, each in zip("ab", own, strict=True)
        ]
    for run in range(3):
        full = numbers(6, 4, begin=run).float()
        if trains:
            own[0].weight.data.copy_(full.chunk(2)[grid.get_local_rank("tp")])
        for transfer in transfers if run % 2 else transfers[::-1]:
            transfer.run()
        if not trains:
            assert all(torch.equal(each.weight, full) for each in own)
    transfers[0].close()
    if trains:
        own[0].weight.data.zero_()
    transfers[1].run()
    if not trains:
        assert not own[1].weight.any()
        assert own[0].weight.any()
    commgrid.shutdown()


@pytest.mark.full
def test_transfers_between_the_same_grids_run_in_any_turn() -> None:
    run_on_ranks(interleaved, 4)


# -- optimizers ----------------------------------------------------------------------------------


def step(model: nn.Module, optimizer: Any, number: int, reducer: Any = None) -> float:
    """Train on a batch that all ranks have."""
    generator = torch.Generator().manual_seed(number)
    loss = model(torch.randn(2, 64, generator=generator, dtype=torch.float64)).square().sum()
    optimizer.zero_grad()
    loss.backward()
    if reducer is not None:
        reducer.finish()
    optimizer.step()
    return float(loss.detach())


def there_and_back() -> list[tuple[float, float]]:
    """AdamW of FSDP2 to a sharded optimizer, and from that to FSDP2; each continues the curve."""
    grid = commgrid.initialize()
    mesh = grid.device_mesh("dp")
    model, other, last = layers(), layers(), layers()
    fully_shard(model, mesh=mesh)
    fully_shard(last, mesh=mesh)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(3):
        step(model, adamw, number)
    reducer = GradientReducer(other, shard=True)
    sharded = ShardedOptimizer(reducer, torch.optim.AdamW, lr=0.5)
    moved(model, other, optimizer=(adamw, sharded))
    losses = [
        (step(other, sharded, number, reducer), step(model, adamw, number))
        for number in range(3, 6)
    ]
    again = torch.optim.AdamW(last.parameters(), lr=0.7)
    moved(other, last, optimizer=(sharded, again))
    losses += [(step(last, again, number), step(model, adamw, number)) for number in range(6, 9)]
    commgrid.shutdown()
    return losses


@pytest.mark.full
def test_optimizer_state_there_and_back_continues_the_curve() -> None:
    for losses in run_on_ranks(there_and_back, 2):
        for loss, expected in losses:
            assert loss == pytest.approx(expected, rel=1e-9)
