"""Tied weights with a name on each of two stages, or two in one process, moved as `load` does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commgrid
from commgrid.parameters import mark_parameters
from commgrid.testing import run_on_ranks
from commgrid.transfer import Transfer

ENDS = {"ends": {"of": "pp", "pick": ["first", "last"]}}
SIZES = {"tokens": 4, "layer0": 2, "layer1": 2, "head": 4}
STAGES = ("tokens", "layer0"), ("layer1", "head")


def built(grid: Any, value: float, tied: bool = True) -> nn.Module:
    """A stage, or all in one process: ends of one value, layers of another."""
    names = STAGES[grid.get_local_rank("pp")] if grid.size("pp") > 1 else SIZES
    model = nn.ModuleDict({name: nn.Linear(SIZES[name], SIZES[name], bias=False) for name in names})
    if tied and grid.size("pp") > 1:
        for name in {"tokens", "head"} & {*names}:
            mark_parameters(model[name], shared="ends", grid=grid)
    elif tied:
        model["head"].weight = model["tokens"].weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(value + ("layer" in name))
    return model


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.25 + parameter.shape[0])
    optimizer.step()
    return optimizer


def both_grids(before: int, after: int) -> tuple[Any, Any]:
    return tuple(
        commgrid.initialize(pp=stages, name=f"grid {n}", groups=ENDS if stages > 1 else None)
        for n, stages in enumerate((before, after))
    )  # type: ignore[return-value]


def moved(before: int, after: int, copies: str) -> bool:
    one, other = both_grids(before, after)
    with commgrid.use_grid(one):
        source = built(one, 2.0)
        optimizer = trained(source)
    with commgrid.use_grid(other):
        target = built(other, 0.0)
        fresh = torch.optim.AdamW(target.parameters(), lr=0.5)
    grids: Any = {"source_grid": one, "target_grid": other, "copies": copies}
    found = []
    weights, state = (
        Transfer(source, target, **grids),
        Transfer(source, target, optimizer=(optimizer, fresh), name="state", **grids),
    )
    for value in (3.0, 5.0):
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.fill_(value + (parameter.shape[0] == 2))
        weights.run(verify=True)
        found += [p.unique().tolist() == [value + (p.shape[0] == 2)] for p in target.parameters()]
    state.run()
    for parameter in target.parameters():
        right = torch.full_like(parameter, 0.1 * (0.25 + parameter.shape[0]))
        found.append(torch.allclose(fresh.state[parameter]["exp_avg"], right))
    found.append(fresh.param_groups[0]["lr"] == 0.0)
    commgrid.shutdown()
    return all(found)


@pytest.mark.parametrize(
    ("before", "after", "copies"),
    [
        (2, 1, "compare"),
        (1, 2, "compare"),
        pytest.param(2, 2, "compare", marks=pytest.mark.full),
        pytest.param(2, 1, "any", marks=pytest.mark.full),
    ],
)
def test_two_names_of_a_weight_are_moved(before: int, after: int, copies: str) -> None:
    assert all(run_on_ranks(moved, 2, before, after, copies))


def tied_and_not(before: int, after: int, tied: tuple[bool, bool], differ: bool) -> Any:
    """The error, and both ends' numbers on this rank."""
    one, other = both_grids(before, after)
    source, target = built(one, 2.0, tied[0]), built(other, 0.0, tied[1])
    if differ and "head" in source:
        with torch.no_grad():
            source["head"].weight.fill_(9.0)
    told = ""
    try:
        Transfer(source, target, source_grid=one, target_grid=other).run()
    except commgrid.CommGridError as error:
        told = str(error)
    ends = {name: target[name].weight.unique().tolist() for name in target if "layer" not in name}
    commgrid.shutdown()
    return told, ends


@pytest.mark.parametrize(
    ("before", "after", "tied"),
    [
        (2, 2, (True, False)),
        (1, 2, (False, True)),
        pytest.param(2, 1, (False, True), marks=pytest.mark.full),
        pytest.param(1, 1, (False, True), marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("differ", [True, False])
def test_copies_that_differ_do_not_become_one_weight(
    before: int, after: int, tied: tuple[bool, bool], differ: bool
) -> None:
    for told, ends in run_on_ranks(tied_and_not, 2, before, after, tied, differ, check=not differ):
        assert bool(told) == differ, told
        if differ:
            assert "head.weight" in told
            assert "differ" in told
        assert all(each == ([0.0] if differ else [2.0]) for each in ends.values()), ends


@pytest.mark.parametrize(("before", "after"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.full)])
def test_weights_that_no_side_has_tied_keep_numbers_of_their_own(before: int, after: int) -> None:
    for told, ends in run_on_ranks(tied_and_not, 2, before, after, (False, False), True):
        assert not told
        assert all(each == [9.0 if name == "head" else 2.0] for name, each in ends.items()), ends


def from_one_name(name: str) -> list[Any]:
    one, other = both_grids(1, 2)
    names = {name, "layer0.weight", "layer1.weight"}
    given: dict[str, Tensor] = {n: torch.ones([SIZES[n.split(".")[0]]] * 2) for n in names}
    target = built(other, 0.0)
    Transfer(given, target, source_grid=one, target_grid=other).run()
    found = [parameter.unique().tolist() for parameter in target.parameters()]
    commgrid.shutdown()
    return found


@pytest.mark.parametrize("name", ["tokens.weight", "head.weight"])
def test_one_name_fills_both_stages(name: str) -> None:
    assert run_on_ranks(from_one_name, 2, name) == [[[1.0], [1.0]]] * 2
