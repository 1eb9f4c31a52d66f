"""Saves that lost something in silence: entries of a state_dict, whole models, names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commgrid
from commgrid import checkpoint
from commgrid.errors import CheckpointError, CommGridError
from commgrid.testing import run_on_ranks
from commgrid.transfer import Transfer


@pytest.fixture
def grid() -> Iterator[Any]:
    yield commgrid.initialize()
    commgrid.shutdown()


class Counting(nn.Linear):
    """A layer with extra state, which each name of a shared layer has."""

    count = 3

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state


def with_entry(name: str, value: Any) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_state_dict_post_hook(
        lambda module, state, prefix, _: state.__setitem__(prefix + name, value(module))
    )
    return model


@pytest.mark.parametrize("name", ["opt_extra_state", "_extra_state", "deep._extra_state"])
def test_an_entry_that_is_no_modules_extra_state_is_refused(
    name: str, grid: Any, tmp_path: Path
) -> None:
    """Any name that ended so passed for an extra state, and was not saved."""
    model = nn.Sequential(with_entry(name, lambda _: torch.ones(3)))
    sides = {"source_grid": grid, "target_grid": grid}
    for action in (
        lambda: checkpoint.save(tmp_path, 1, model, progress=False),
        lambda: Transfer(model, nn.Sequential(nn.Linear(2, 2)), **sides),
    ):
        with pytest.raises(CommGridError, match=rf"0\.{name} is in the state_dict of Linear"):
            action()
    assert checkpoint.steps(tmp_path) == []


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_extra_states_of_modules_are_saved(grid: Any, tmp_path: Path) -> None:
    shared, other = Counting(2, 2), Counting(2, 2)
    for number, wrapped in enumerate((other, torch.compile(other))):
        model = nn.ModuleDict({"a": shared, "b": shared, "opt_extra_state": wrapped})
        checkpoint.save(tmp_path, number, model, progress=False)
        shared.count = other.count = 0
        checkpoint.load(tmp_path, model, progress=False)
        assert (shared.count, other.count) == (3, 3)


def test_an_entry_of_another_dtype_in_the_same_memory_is_refused(grid: Any, tmp_path: Path) -> None:
    as_integers = with_entry("weight", lambda module: module.weight.detach().view(torch.int32))
    with pytest.raises(CommGridError, match="weight differs between state_dict"):
        checkpoint.save(tmp_path, 1, as_integers, progress=False)
    same = with_entry("weight", lambda module: module.weight.detach().view(2, 2))
    checkpoint.save(tmp_path, 1, same, progress=False)


def no_model(folder: str, on_all: bool, empty: Any) -> list[str]:
    grid = commgrid.initialize()
    mine: Any = empty if on_all or grid.rank == 1 else nn.Linear(2, 2)
    told = []
    for action in (
        lambda: checkpoint.save(folder, 1, mine, progress=False),
        lambda: checkpoint.load(folder, mine, progress=False),
    ):
        with pytest.raises(CommGridError) as raised:
            action()
        told.append(str(raised.value))
    commgrid.shutdown()
    assert not any(Path(folder).iterdir())
    return told


@pytest.mark.parametrize(("empty", "on_all"), [([], True), ("", True), ([], False)])
def test_an_empty_list_is_no_model(empty: Any, on_all: bool, tmp_path: Path) -> None:
    """It made a complete checkpoint without a model."""
    for told in run_on_ranks(no_model, 2, str(tmp_path), on_all, empty):
        assert all(f"model={empty!r}: expected a module, or a list" in each for each in told)


def test_a_stage_without_layers_is_a_model(grid: Any, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, [nn.Identity()], progress=False)
    checkpoint.load(tmp_path, [nn.Identity()], progress=False)


def wrapped(folder: str) -> None:
    commgrid.initialize()
    torch.manual_seed(0)
    plain = nn.Linear(2, 2)
    held = DistributedDataParallel(plain)
    formula = [tensor.clone() for tensor in plain.parameters()]
    forms: list[nn.Module] = [
        torch.compile(held), DistributedDataParallel(torch.compile(plain)), torch.compile(plain),
    ]  # fmt: skip
    for step, form in enumerate(forms):
        optimizer = torch.optim.AdamW(form.parameters())
        checkpoint.save(folder, step, form, optimizer, progress=False)
        target = nn.Linear(2, 2)
        checkpoint.load(folder, target, torch.optim.AdamW(target.parameters()), progress=False)
        assert all(map(torch.equal, target.parameters(), formula))
        with torch.no_grad():
            plain.weight.zero_()
        checkpoint.load(folder, form, optimizer, progress=False)
        assert torch.equal(plain.weight, formula[0])
    earlier = nn.ModuleDict({"module": plain})  # as such files were named
    checkpoint.save(folder, 8, earlier, torch.optim.AdamW(plain.parameters()), progress=False)
    target = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(target.parameters())
    checkpoint.load(
        folder, target, optimizer, rename=lambda name: name.removeprefix("module."), progress=False
    )
    assert torch.equal(target.weight, formula[0])
    inner = nn.ModuleDict({"inner": held})
    checkpoint.save(folder, 9, inner, progress=False)
    checkpoint.load(folder, inner, progress=False)
    with pytest.raises(CheckpointError, match=r"no model\.inner\.weight.*has model\.inner\.module"):
        checkpoint.load(folder, nn.ModuleDict({"inner": nn.Linear(2, 2)}), progress=False)
    commgrid.shutdown()


def test_a_compiled_model_in_ddp_has_the_names_of_the_plain_one(tmp_path: Path) -> None:
    run_on_ranks(wrapped, 2, str(tmp_path))
