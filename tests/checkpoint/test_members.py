"""An ensemble along an axis of the user's own: no member gets another's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import commgrid
from commgrid import checkpoint
from commgrid.data_parallel import GradientReducer
from commgrid.tensor_parallel import ColumnParallelLinear
from commgrid.testing import run_on_ranks
from commgrid.transfer import Transfer

ORDER = "tp-cp-ep-dp-pp-member"


def brought(folder: str, way: str, differ: str, copies: str = "") -> str:
    """The error of bringing an ensemble's weights somewhere; "": none, and all is there."""
    grid = commgrid.initialize(dp=1, order=ORDER, member=2)
    torch.manual_seed(grid.rank if differ == "weights" else 0)
    if differ == "sliced":  # along the axis, so that ranks have one model
        torch.manual_seed(0)
        model: nn.Module = ColumnParallelLinear(4, 4, group="member")
    else:
        model = nn.Linear(4, 4)
        model.register_buffer("seen", torch.tensor(grid.rank * (differ == "buffers")))
    if differ == "summed":  # by a reducer that names the axis
        reducer = GradientReducer(model, group="dp_member")
        model.seen.fill_(grid.rank)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.5)
    if differ == "moments":
        model(torch.full((1, 4), 1.0 + grid.rank)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model.weight.zero_()
            model.bias.zero_()
    told = ""
    try:
        if way == "save":
            copies = copies or "first"
            checkpoint.save(folder, 1, model, optimizer, copies=copies, progress=False)
        elif way == "keep":
            checkpoint.keep(1, model, optimizer)
        else:
            sides = {"source_grid": grid, "target_grid": grid}
            other = nn.Linear(4, 4)
            if differ == "sliced":
                other = ColumnParallelLinear(4, 4, group="member")
            else:
                other.register_buffer("seen", torch.tensor(0))
            Transfer(model, other, **sides, copies=copies or "any", timeout=30).run()
            assert all(map(torch.equal, model.parameters(), other.parameters()))
    except commgrid.CommGridError as error:
        told = str(error)
    if differ == "summed":
        reducer.close()
    commgrid.shutdown()
    return told


@pytest.mark.parametrize(
    ("way", "differ"),
    [(way, differ) for way in ("save", "keep", "transfer") for differ in ("weights", "buffers")]
    + [("save", "moments"), ("keep", "moments")],
)
def test_members_of_an_ensemble_are_not_taken_for_copies(
    way: str, differ: str, tmp_path: Path
) -> None:
    for told in run_on_ranks(brought, 2, str(tmp_path), way, differ, check=False):
        assert "differs between rank 0 and rank 1" in told, told
        assert "along an axis of your own, member" in told
    assert checkpoint.steps(tmp_path) == []


@pytest.mark.parametrize("way", ["save", "keep", "transfer"])
@pytest.mark.parametrize("differ", ["nothing", "sliced", "summed"])
def test_equal_members_and_one_model_along_the_axis_pass(
    differ: str, way: str, tmp_path: Path
) -> None:
    assert run_on_ranks(brought, 2, str(tmp_path), way, differ) == ["", ""]


@pytest.mark.parametrize("way", ["save", pytest.param("transfer", marks=pytest.mark.full)])
@pytest.mark.parametrize("differ", ["weights", pytest.param("nothing", marks=pytest.mark.full)])
def test_comparing_copies_says_what_an_ensemble_needs(
    differ: str, way: str, tmp_path: Path
) -> None:
    for told in run_on_ranks(brought, 2, str(tmp_path), way, differ, "compare", check=False):
        if differ == "nothing":
            assert told == ""
            continue
        assert "members of an ensemble along member need a grid each, or modules with" in told
        assert "copies=" not in told


def loaded(folder: str, members: int, saves: bool) -> bool:
    """Equal members from one grid to another; all get the same."""
    commgrid.initialize(dp=1, order=ORDER, member=members)
    model = nn.Linear(4, 4)
    right = torch.arange(16.0).view(4, 4)
    with torch.no_grad():
        model.weight.copy_(right if saves else right * 0)
        model.bias.zero_()
    if saves:
        checkpoint.save(folder, 1, model, progress=False)
    else:
        checkpoint.load(folder, model, progress=False)
    commgrid.shutdown()
    return torch.equal(model.weight, right)


@pytest.mark.full
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_equal_members_load_on_any_number(before: int, after: int, tmp_path: Path) -> None:
    assert run_on_ranks(loaded, before, str(tmp_path), before, True) == [True] * before
    assert run_on_ranks(loaded, after, str(tmp_path), after, False) == [True] * after


def apart(folder: str, way: str, dp: int) -> bool:
    """Members whose modules have names of their own."""
    grid = commgrid.initialize(dp=dp, order=ORDER, member=2)
    member = grid.get_local_rank("member")
    torch.manual_seed(member)
    model = nn.ModuleDict({f"member{member}": nn.Linear(4, 4)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + member)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) * (1 + member)
    optimizer.step()
    fresh = nn.ModuleDict({key: nn.Linear(4, 4) for key in model})
    other = torch.optim.AdamW(fresh.parameters())
    if way == "keep":
        checkpoint.keep(1, model, optimizer)
        commgrid.recover(None, fresh, other)
    elif way in ("any", "compare"):
        Transfer(model, fresh, copies=way).run()
    else:
        options: Any = {"background": way == "background"} if way != "first" else {"copies": way}
        checkpoint.save(folder, 1, model, optimizer, progress=False, **options)
        checkpoint.wait()
        checkpoint.load(folder, fresh, other, progress=False)
    found = all(map(torch.equal, model.parameters(), fresh.parameters()))
    if way not in ("any", "compare"):
        found = found and other.param_groups[0]["lr"] == 0.1 + member
        for one, mine in zip(fresh.parameters(), model.parameters(), strict=True):
            found = found and torch.equal(
                other.state[one]["exp_avg"], optimizer.state[mine]["exp_avg"]
            )
    commgrid.shutdown()
    return found


@pytest.mark.parametrize(
    ("way", "dp"),
    [("save", 1)]
    + [
        pytest.param(way, dp, marks=pytest.mark.full)
        for way in ("save", "first", "background", "keep", "any", "compare")
        for dp in (1, 2)
        if (way, dp) != ("save", 1)
    ],
)
def test_members_with_names_of_their_own_are_saved(way: str, dp: int, tmp_path: Path) -> None:
    assert run_on_ranks(apart, 2 * dp, str(tmp_path), way, dp) == [True] * 2 * dp


def with_base(folder: str, equal: bool) -> str:
    """A base under one name in both members, which they hold alike or not."""
    grid = commgrid.initialize(dp=1, order=ORDER, member=2)
    member = grid.get_local_rank("member")
    model = nn.ModuleDict({"base": nn.Linear(4, 4), f"member{member}": nn.Linear(4, 4)})
    with torch.no_grad():
        model["base"].weight.fill_(1.0 + (0 if equal else member))
        model["base"].bias.zero_()
    right = [p.detach().clone() for p in model.parameters()]
    told = ""
    try:
        checkpoint.save(folder, 1, model, progress=False)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        checkpoint.load(folder, model, progress=False)
        assert all(map(torch.equal, model.parameters(), right))
    except commgrid.CommGridError as error:
        told = str(error)
    commgrid.shutdown()
    return told


@pytest.mark.full
@pytest.mark.parametrize("equal", [True, False])
def test_members_share_what_is_equal(equal: bool, tmp_path: Path) -> None:
    for told in run_on_ranks(with_base, 2, str(tmp_path), equal, check=False):
        assert ("model.base.weight differs between ranks 0 and 1" in told) != equal, told
        assert bool(told) != equal
