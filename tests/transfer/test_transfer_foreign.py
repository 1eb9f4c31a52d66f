"""Megatron-core's layers and Transformers' tp_plan as sources and targets."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commgrid
from commgrid import CommGridError
from commgrid.audit.parameters import audited_parameters, names_of
from commgrid.testing import run_on_ranks
from commgrid.transfer import Transfer
from tests import megatron_layers

FULL = torch.arange(96, dtype=torch.float32)


def whole() -> nn.Module:
    """The full model, of numbers that are all different."""
    model = nn.Sequential()
    model.add_module("up", nn.Linear(4, 12))
    model.add_module("down", nn.Linear(12, 4))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(FULL[: parameter.numel()].view_as(parameter) + 1000 * number)
    return model


def strided(full: Tensor, dim: int, rank: int, ranks: int, stride: int) -> Tensor:
    """As megatron-core's `_initialize_affine_weight_cpu` takes its part of a master weight."""
    pieces = torch.split(full, full.shape[dim] // ranks // stride, dim=dim)
    return torch.cat(pieces[rank::ranks], dim=dim)


def megatrons(stride: int) -> dict[str, bool]:
    grid = commgrid.initialize(tp=2, dp=2)
    group = grid.get_group("tp")
    megatron_layers.prepare(group)
    model = nn.Module()
    model.up = megatron_layers.column((4, 12), group)
    model.down = megatron_layers.row((12, 4), group)
    model.up.weight.partition_stride = stride
    single = whole() if grid.rank == 3 else None
    pp = commgrid.initialize(dp=1, ranks=[3], name="one")
    there = Transfer(single, model, source_grid=pp, target_grid=grid, name="there")
    there.run()
    full = dict(whole().named_parameters())
    rank = grid.get_local_rank("tp")
    found = {
        "up": torch.equal(model.up.weight, strided(full["up.weight"], 0, rank, 2, stride)),
        "up.bias": torch.equal(model.up.bias, strided(full["up.bias"], 0, rank, 2, 1)),
        "down": torch.equal(model.down.weight, strided(full["down.weight"], 1, rank, 2, 1)),
        "down.bias": torch.equal(model.down.bias, full["down.bias"]),
    }
    if single is not None:
        with torch.no_grad():
            for parameter in single.parameters():
                parameter.zero_()
    back = Transfer(model, single, source_grid=grid, target_grid=pp, name="back")
    back.run()
    if single is not None:
        found["back"] = all(map(torch.equal, single.parameters(), full.values()))
    model.up.weight.allreduce = False
    with pytest.raises(CommGridError) as error:
        Transfer(model, single, source_grid=grid, target_grid=pp, name="back")
    found["experts are refused"] = "is an expert's of Megatron-core's" in str(error.value)
    commgrid.shutdown()
    return found


@pytest.mark.full("1")
@pytest.mark.parametrize("stride", [1, 2])
def test_megatrons_slices_go_there_and_back(stride: int) -> None:
    # The ranks set variables of the environment.
    for found in run_on_ranks(megatrons, 4, stride, backend=None, launcher="torchrun", check=False):
        assert len(found) >= 5
        assert all(found.values()), found


def slices(offset: tuple[int, ...], part: torch.Tensor) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))


def planned() -> dict[str, Any]:
    """Modules cut as Transformers 5 cuts them, and marked as it marks them."""
    grid = commgrid.initialize(tp=2)
    mesh, rank = grid.device_mesh("tp"), grid.get_local_rank("tp")
    full = whole()
    model = nn.Sequential()
    model.add_module("up", nn.Linear(4, 6))
    model.add_module("down", nn.Linear(6, 4))
    for module, plan in ((model.up, "colwise"), (model.down, "rowwise")):
        module._hf_tp_plan, module._hf_device_mesh = plan, mesh  # type: ignore[assignment]
    Transfer(full, model).run()
    found = {
        "up": torch.equal(model.up.weight, full.up.weight.chunk(2, 0)[rank]),
        "up.bias": torch.equal(model.up.bias, full.up.bias.chunk(2)[rank]),
        "down": torch.equal(model.down.weight, full.down.weight.chunk(2, 1)[rank]),
        "down.bias": torch.equal(model.down.bias, full.down.bias),
    }
    audited = list(audited_parameters(model, names_of(model, grid), grid, []))
    found["an audit finds them"] = len(audited) == 4 and all(
        torch.equal(data, full.get_parameter(each.name)[slices(offset, data)])
        for each in audited
        for offset, data in each.chunks(each.parameter)
    )
    layer, experts = nn.Sequential(), nn.Linear(2, 2)
    layer.add_module("mlp", nn.Sequential())
    layer.mlp.add_module("experts", experts)  # type: ignore[operator]
    experts._hf_tp_plan, experts._hf_device_mesh = "moe_tp_experts", mesh  # type: ignore[assignment]
    notes: list[str] = []
    nothing = not list(audited_parameters(layer, names_of(layer, grid), grid, notes))
    found["an audit does not take slices of experts for copies"] = nothing and len(notes) == 2
    model.up._hf_tp_plan = "packed_colwise"  # type: ignore[assignment]
    with pytest.raises(CommGridError) as error:
        Transfer(full, model)
    found["packed is refused"] = "has the tp_plan 'packed_colwise'" in str(error.value)
    optimizers = torch.optim.SGD(full.parameters()), torch.optim.SGD(model.parameters())
    model.up._hf_tp_plan = "colwise"  # type: ignore[assignment]
    with pytest.raises(CommGridError) as error:
        Transfer(full, model, optimizer=optimizers)
    found["optimizers are refused"] = "move the weights alone" in str(error.value)
    commgrid.shutdown()
    return found


def test_transformers_slices_are_where_their_plan_says() -> None:
    for found in run_on_ranks(planned, 2, backend=None, launcher="torchrun"):
        assert len(found) == 8
        assert all(found.values()), found


def replicas_that_differ(whose: str) -> str:
    """Slices of 2 x 2 ranks, of which one rank's copy has another number."""
    grid = commgrid.initialize(tp=2, dp=2)
    model = nn.Sequential()
    if whose == "Megatron-core":
        group = grid.get_group("tp")
        megatron_layers.prepare(group)
        model.add_module("up", megatron_layers.column((4, 12), group))
        model.add_module("down", megatron_layers.row((12, 4), group))
    else:
        mesh = grid.device_mesh("tp")
        model.add_module("up", nn.Linear(4, 6))
        model.add_module("down", nn.Linear(6, 4))
        for module, plan in ((model.up, "colwise"), (model.down, "rowwise")):
            module._hf_tp_plan, module._hf_device_mesh = plan, mesh  # type: ignore[assignment]
    Transfer(whole(), model).run()
    if grid.rank == 3:
        with torch.no_grad():
            model.down.weight[0, 0] += 1
    try:
        Transfer(model, whole(), name="back").run()
        told = "moved"
    except CommGridError as error:
        told = str(error)
    commgrid.shutdown()
    return told


@pytest.mark.parametrize("whose", ["Megatron-core", "Transformers"])
def test_copies_of_others_slices_are_compared(whose: str) -> None:
    for told in run_on_ranks(
        replicas_that_differ, 4, whose, backend=None, launcher="torchrun", check=False
    ):
        assert "down.weight, of which ranks 1, 3 hold" in told
        assert "differs between rank 1 and rank 3" in told
