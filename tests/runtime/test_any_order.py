"""Starts, look-ups, suspensions, rebuilds and ends in any order, against a model of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import commgrid
from commgrid import CommGridError, HyperCommGrid
from commgrid.testing import run_on_ranks
from tests.sizes import pick

Operation = tuple[Any, ...]

NAMES = ("default", "other")
GROUPS = ("tp", "dp", "pp", "dp_tp")
ASKED = (*GROUPS, "tp_dp", "no_such")
ERRORS = (
    "GridDestroyedError",
    "GridExistsError",
    "GridNotInitializedError",
    "GroupSuspendedError",
    "UnknownGroupError",
)
SIZES = {
    1: [{"tp": 1}],
    2: [{"tp": 2}, {"dp": 2}, {"pp": 2}],
    4: [{"tp": 2, "dp": 2}, {"tp": 2, "pp": 2}, {"dp": 2, "pp": 2}, {"dp": 4}],
}


@dataclass
class Grid:
    """A grid as the model knows it: sizes of tp, dp and pp, and the suspended communicators."""

    sizes: dict[str, int]
    suspended: set[str] = field(default_factory=set)
    destroyed: bool = False

    def ranks(self, group: str, rank: int) -> tuple[int, ...]:
        """Ranks whose coordinates differ from this one's along the group's axes only."""
        tp, dp, pp = (self.sizes.get(axis, 1) for axis in ("tp", "dp", "pp"))
        places = {
            i + tp * (j + dp * k): {"tp": i, "dp": j, "pp": k}
            for k, j, i in product(range(pp), range(dp), range(tp))
        }
        fixed = {"tp", "dp", "pp"} - set(group.split("_"))
        return tuple(r for r, at in places.items() if all(at[a] == places[rank][a] for a in fixed))

    def communicator(self, group: str, rank: int) -> str:
        """Groups of one rank share one."""
        axes = sorted(group.split("_"))
        return "_".join(axes) if len(self.ranks(group, rank)) > 1 else "alone"


class Raises(Exception):
    """The model expects an error of this type."""


@dataclass
class Model:
    """The expected state, in dicts of plain values."""

    rank: int
    world_size: int
    world_is_up: bool = False
    grids: dict[str, Grid] = field(default_factory=dict)
    made: dict[str, dict[str, int]] = field(default_factory=dict)  # since the world has been up
    kept: list[Grid] = field(default_factory=list)

    def step(self, operation: Operation) -> Any:
        """Return an operation's value, or the name of the error that it raises."""
        kind, *given = operation
        try:
            return getattr(self, kind)(*given)
        except Raises as expected:
            return f"{expected}"

    def find(self, name: str) -> Grid:
        if name not in self.grids:
            raise Raises("GridNotInitializedError")
        return self.grids[name]

    def initialize(self, name: str, sizes: dict[str, int]) -> tuple[int, ...]:
        if name in self.grids:
            raise Raises("GridExistsError")
        self.world_is_up = True
        return self._add(name, sizes)

    def _add(self, name: str, sizes: dict[str, int]) -> tuple[int, ...]:
        grid = self.grids[name] = Grid(sizes)
        self.made[name] = sizes
        self.kept.append(grid)
        return tuple(range(self.world_size))

    def _look(self, grid: Grid, group: str) -> tuple[int, ...]:
        if grid.destroyed:
            raise Raises("GridDestroyedError")
        if group == "no_such":
            raise Raises("UnknownGroupError")
        return grid.ranks(group, self.rank)

    def ranks(self, name: str, group: str) -> tuple[int, ...]:
        return self._look(self.find(name), group)

    def ranks_within(self, name: str, group: str) -> tuple[int, ...]:
        return self.ranks(name, group)

    def ranks_of_kept(self, index: int, group: str) -> tuple[int, ...] | None:
        return self._look(self.kept[index], group) if index < len(self.kept) else None

    def select(self, name: str, axis: str) -> tuple[int, ...]:
        grid = self.find(name)
        others = "_".join({"tp", "dp", "pp"} - {axis})
        return grid.ranks(others, 0)  # those at place 0 of the axis

    def add_up(self, name: str, group: str) -> float:
        grid = self.find(name)
        members = self._look(grid, group)
        if grid.communicator(group, self.rank) in grid.suspended:
            raise Raises("GroupSuspendedError")
        return float(sum(rank + 1 for rank in members))

    def _named(self, name: str, group: str | None) -> tuple[Grid, set[str]]:
        grid = self.find(name)
        if group is not None:
            self._look(grid, group)
        groups = GROUPS if group is None else (group,)
        return grid, {grid.communicator(each, self.rank) for each in groups}

    def suspend(self, name: str, group: str | None) -> None:
        grid, chosen = self._named(name, group)
        grid.suspended |= chosen

    def resume(self, name: str, group: str | None) -> None:
        grid, chosen = self._named(name, group)
        grid.suspended -= chosen

    def rebuild(self, name: str) -> tuple[int, ...] | None:
        if not self.world_is_up:
            raise Raises("GridNotInitializedError")
        if name not in self.made:  # a rank that never had the grid would wait for a place in it
            return None
        self.destroy(name)
        return self._add(name, self.made[name])

    def destroy(self, name: str | None) -> None:
        for each in list(self.grids) if name is None else [name]:
            if each in self.grids:
                self.grids.pop(each).destroyed = True

    def shutdown(self) -> None:
        self.destroy(None)
        self.made.clear()
        self.world_is_up = False


class Real:
    """The same operations of commgrid."""

    def __init__(self, model: Model) -> None:
        self.model = model  # before the operation; some would wait for ever
        self.kept: list[HyperCommGrid] = []

    def step(self, operation: Operation) -> Any:
        kind, *given = operation
        try:
            return getattr(self, kind)(*given)
        except CommGridError as error:
            return type(error).__name__

    def initialize(self, name: str, sizes: dict[str, int]) -> tuple[int, ...]:
        # Not connected at first use: who comes first there would wait for the others.
        grid = commgrid.initialize(name=name, create=list(GROUPS), connect="all", **sizes)
        self.kept.append(grid)
        return grid.get_ranks()

    def ranks(self, name: str, group: str) -> tuple[int, ...]:
        found = commgrid.get_ranks(group, grid=name)
        handle = commgrid.get_group(group, grid=name)
        assert dist.get_process_group_ranks(handle) == list(found)
        assert found[commgrid.get_local_rank(group, grid=name)] == self.model.rank
        assert commgrid.size(group, grid=name) == len(found)
        return found

    def ranks_within(self, name: str, group: str) -> tuple[int, ...]:
        with commgrid.use_grid(name) as grid:
            assert commgrid.get_grid() is grid
            return commgrid.get_ranks(group)

    def ranks_of_kept(self, index: int, group: str) -> tuple[int, ...] | None:
        return self.kept[index].get_ranks(group) if index < len(self.kept) else None

    def select(self, name: str, axis: str) -> tuple[int, ...]:
        return commgrid.get_grid(name).select(**{axis: 0}).ranks

    def add_up(self, name: str, group: str) -> float:
        tensor = torch.tensor([self.model.rank + 1.0])
        dist.all_reduce(tensor, group=commgrid.get_group(group, grid=name))
        return tensor.item()

    def suspend(self, name: str, group: str | None) -> None:
        commgrid.get_grid(name).suspend(group)

    def resume(self, name: str, group: str | None) -> None:
        commgrid.get_grid(name).resume(group)

    def rebuild(self, name: str) -> tuple[int, ...] | None:
        if self.model.world_is_up and name not in self.model.made:
            return None
        if self.model.world_is_up:
            dist.barrier()  # a rank that is still in a collective would take it for a failure
        grid = commgrid.rebuild(ranks=range(self.model.world_size), name=name)
        assert grid is not None
        self.kept.append(grid)
        return grid.get_ranks()

    def destroy(self, name: str | None) -> None:
        commgrid.destroy(name)

    def shutdown(self) -> None:
        if self.model.world_is_up:
            dist.barrier()
        commgrid.shutdown()


class Both:
    """A model and what it is a model of, for one rank."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.model = Model(rank, world_size)
        self.real = Real(self.model)

    def step(self, operation: Operation) -> Any:
        """Return the value, or the error's name, that both agree on."""
        found = self.real.step(operation)
        expected = self.model.step(operation)
        assert found == expected, f"{operation}: {found}, expected {expected}"
        return found

    def check(self) -> None:
        """Nothing else is alive, by any name or handle."""
        assert dist.is_initialized() == self.model.world_is_up
        for name in NAMES:
            assert commgrid.is_initialized(name) == (name in self.model.grids)
        for grid, kept in zip(self.model.kept, self.real.kept, strict=True):
            assert kept.is_alive == (not grid.destroyed)


def operations(world_size: int) -> dict[str, list[Operation]]:
    """Every operation there is on so many ranks, by kind."""
    given_up = (None, *GROUPS, "no_such")
    arguments: dict[str, Iterable[Operation]] = {
        "initialize": product(NAMES, SIZES[world_size]),
        "ranks": product(NAMES, ASKED),
        "ranks_within": product(NAMES, ASKED),
        "ranks_of_kept": product(range(6), ASKED),
        "select": product(NAMES, ("tp", "dp", "pp")),
        "add_up": product(NAMES, ASKED),
        "suspend": product(NAMES, given_up),
        "resume": product(NAMES, given_up),
        "rebuild": product(NAMES),
        "destroy": product((None, *NAMES)),
        "shutdown": [()],
    }
    return {kind: [(kind, *each) for each in found] for kind, found in arguments.items()}


def of_kind(kind: str) -> st.SearchStrategy[Operation]:
    return st.sampled_from(operations(1)[kind])


class AnyOrder(RuleBasedStateMachine):
    """One process, which is a world of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.both = Both(0, 1)

    def teardown(self) -> None:
        commgrid.shutdown()

    @invariant()
    def check(self) -> None:
        self.both.check()

    @rule(operation=st.sampled_from(list(operations(1))).flatmap(of_kind))
    def step(self, operation: Operation) -> None:
        self.both.step(operation)


AnyOrder.TestCase.settings = settings(max_examples=pick(10, 40), stateful_step_count=30)
TestOneProcess = AnyOrder.TestCase


def drawn(world_size: int, sequences: int, length: int) -> list[list[Operation]]:
    """Sequences that are the same in every run."""
    source, kinds = Random(world_size), operations(world_size)
    # Grids live long enough to be looked at.
    weights = [1 if kind in ("destroy", "shutdown") else 4 for kind in kinds]
    return [
        [source.choice(kinds[kind]) for kind in source.choices(list(kinds), weights, k=length)]
        for _ in range(sequences)
    ]


def perform(sequences: list[list[Operation]], world_size: int, rank: int) -> set[str]:
    """Each sequence from a fresh start; which operations gave a value, and which errors came."""
    seen = set()
    for sequence in sequences:
        both = Both(rank, world_size)
        for operation in sequence:
            found = both.step(operation)
            both.check()
            seen.add(found if isinstance(found, str) else operation[0])
        both.step(("shutdown",))
    return seen


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_on_ranks(world_size: int) -> None:
    found = run_on_ranks(
        perform, world_size, drawn(world_size, pick(3, 12), 40), world_size,
        per_rank=[(rank,) for rank in range(world_size)], backend=None, launcher="torchrun",
    )  # fmt: skip
    # The sequences reach all of it.
    assert found == [{*operations(world_size), *ERRORS}] * world_size
