"""Values of a rank's own come back to it; values that all should have are compared."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import commgrid
from commgrid import checkpoint
from commgrid.equality.values import number_of
from commgrid.errors import CheckpointError
from commgrid.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from commgrid.testing import run_on_ranks

Sizes = dict[str, int]


def saved_by(folder: str, sizes: Sizes) -> None:
    grid = commgrid.initialize(**sizes)
    own = {"place": dict(grid.coordinate), "rank": grid.rank}
    checkpoint.save(folder, 1, nn.Linear(2, 2, bias=False), extra_per_rank=own,
                    copies="first", progress=False)  # fmt: skip
    commgrid.shutdown()


def loaded_by(folder: str, sizes: Sizes) -> list[int]:
    commgrid.initialize(**sizes)
    found = checkpoint.load(folder, nn.Linear(2, 2, bias=False), progress=False)
    commgrid.shutdown()
    return [each["rank"] for each in found.extra_per_rank]


@pytest.mark.parametrize(
    ("before", "after", "offered"),
    [
        ({"dp": 4}, {"dp": 4}, [[0], [1], [2], [3]]),
        ({"dp": 4}, {"dp": 2}, [[0, 2], [1, 3]]),
        ({"dp": 2}, {"dp": 4}, [[0], [1], [], []]),
        ({"dp": 2, "tp": 2}, {"dp": 2}, [[0, 1], [2, 3]]),
        ({"dp": 2, "tp": 2}, {"tp": 2}, [[0, 2], [1, 3]]),
        ({"dp": 2}, {"tp": 2, "dp": 2}, [[0], [], [1], []]),
    ],
    ids=["same", "fewer", "more", "without tp", "without dp", "with tp"],
)
def test_each_old_ranks_values_are_offered_to_one_new_rank(
    before: Sizes, after: Sizes, offered: list[list[int]], tmp_path: Path
) -> None:
    for sizes, call in ((before, saved_by), (after, loaded_by)):
        ranks = 1
        for size in sizes.values():
            ranks *= size
        told = run_on_ranks(call, ranks, str(tmp_path), sizes)
    assert told == offered


def draws(folder: str, sizes: Sizes, fsdp: bool, way: str) -> tuple[bool, float]:
    """Whether the layout is the same, and what dropout would draw, by the page's recipe."""
    grid = commgrid.initialize(**sizes)
    layer: Any = nn.Linear(4, 4)
    if fsdp and "dp" in sizes:
        fully_shard(layer, mesh=grid.device_mesh("dp"))
    torch.manual_seed(100 + grid.rank)
    if way == "save":
        states = {"random": checkpoint.random_states()}
        checkpoint.save(folder, 1, layer, extra_per_rank=states, copies="first", progress=False)
        same = True
    else:
        restored = checkpoint.load(folder, layer, progress=False)
        same = restored.same_layout
        if restored.same_layout:
            (own,) = restored.extra_per_rank
            checkpoint.set_random_states(own["random"])
        else:
            torch.manual_seed(1234 + (restored.step or 0))
    drawn = torch.rand(()).item()
    commgrid.shutdown()
    return same, drawn


@pytest.mark.parametrize("fsdp", [False, True], ids=["plain", "fsdp"])
@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ({"dp": 2}, {"dp": 2}, True),
        ({"dp": 2}, {"dp": 2, "tp": 1}, True),
        ({"dp": 2}, {"tp": 2}, False),
        ({"tp": 2}, {"dp": 2}, False),
        ({"dp": 2}, {"dp": 1}, False),
        ({"dp": 2}, {"dp": 4}, False),
        ({"dp": 2, "tp": 2}, {"dp": 4}, False),
    ],
    ids=str,
)
def test_random_states_are_set_where_each_rank_gets_its_own(
    before: Sizes, after: Sizes, same: bool, fsdp: bool, tmp_path: Path
) -> None:
    num_before, num_after = (math.prod(sizes.values()) for sizes in (before, after))
    had = run_on_ranks(draws, num_before, str(tmp_path), before, fsdp, "save")
    found = run_on_ranks(draws, num_after, str(tmp_path), after, fsdp, "load")
    assert {one for one, _ in found} == {same}
    if same:
        assert found == had
    else:
        assert len({drawn for _, drawn in found}) == 1


def kept_and_recovered() -> list[int]:
    grid = commgrid.initialize()
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    checkpoint.keep(3, model, extra_per_rank={"rank": grid.rank})
    found = commgrid.recover(None, model)
    commgrid.shutdown()
    return [each["rank"] for each in found.extra_per_rank]


def test_values_kept_in_memory_come_back_too() -> None:
    assert run_on_ranks(kept_and_recovered, 2) == [[0], [1]]


class Dropped(nn.Module):
    """Dropout between layers whose ranks drop other elements."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = ColumnParallelLinear(8, 16), RowParallelLinear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.dropout(self.up(x), 0.5))


def losses_with_a_stop(folder: str) -> tuple[list[float], list[float]]:
    """The last two of four steps of a run that goes through, and of one that was stopped."""
    grid = commgrid.initialize(tp=2)
    loader = torch.Generator().manual_seed(7)

    def run(model: Any, optimizer: Any) -> float:
        optimizer.zero_grad()
        loss = model(torch.rand(4, 8, generator=loader)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def made() -> tuple[Any, Any]:
        model = Dropped()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    torch.manual_seed(0)
    model, optimizer = made()
    torch.manual_seed(grid.rank)
    curve = [run(model, optimizer) for _ in range(2)]
    states = checkpoint.random_states({"loader": loader})
    checkpoint.save(folder, 2, model, optimizer, extra_per_rank={"random": states}, progress=False)
    through = [run(model, optimizer) for _ in range(2)]
    assert len({*curve, *through}) == 4
    torch.manual_seed(100)
    loader.manual_seed(8)
    model, optimizer = made()
    (own,) = checkpoint.load(folder, model, optimizer, progress=False).extra_per_rank
    checkpoint.set_random_states(own["random"], {"loader": loader})
    resumed = [run(model, optimizer) for _ in range(2)]
    commgrid.shutdown()
    return through, resumed


def test_a_run_with_dropout_continues_its_curve(tmp_path: Path) -> None:
    for through, resumed in run_on_ranks(losses_with_a_stop, 2, str(tmp_path)):
        assert through == resumed  # to the last bit: the same numbers are computed


def test_states_of_other_generators_are_refused() -> None:
    states = checkpoint.random_states({"loader": torch.Generator()})
    before = torch.get_rng_state()
    torch.rand(1)
    with pytest.raises(CheckpointError, match=r"generators \['loader'\], and here are \[\]"):
        checkpoint.set_random_states(states)
    assert not torch.equal(torch.get_rng_state(), before)


def test_numpys_generators_are_among_them() -> None:
    numpy = pytest.importorskip("numpy")
    before = numpy.random.get_bit_generator()
    try:
        for generator in (numpy.random.MT19937(3), numpy.random.PCG64(3)):
            numpy.random.set_bit_generator(generator)
            states = checkpoint.random_states()
            drawn = numpy.random.rand(4).tolist()
            checkpoint.set_random_states(states)
            assert numpy.random.rand(4).tolist() == drawn
        assert number_of(numpy.longdouble(1)) != number_of(numpy.longdouble(2))
    finally:
        numpy.random.set_bit_generator(before)
    with pytest.raises(CheckpointError, match="expected what random_states returned"):
        checkpoint.set_random_states({})


# -- values that all should have alike ----------------------------------------------------


class Counting(nn.Linear):
    """A module with an extra state."""

    seen = 0

    def get_extra_state(self) -> Any:
        return {"seen": self.seen, "scales": torch.ones(2) * self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def saves_what_differs(folder: str, in_background: bool) -> dict[str, str]:
    grid = commgrid.initialize(tp=2)
    told = {}
    for what in ("nothing", "lr", "step", "extra state", "extra", "group"):
        torch.manual_seed(0)
        model = nn.Sequential(Counting(4, 4), ColumnParallelLinear(4, 4))
        groups = [list(part.parameters()) for part in model]
        if what == "group" and grid.rank == 1:
            groups = [groups[0] + groups[1][:1], groups[1][1:]]
        rates = [0.1, 0.2]
        optimizer = torch.optim.AdamW(
            [{"params": each, "lr": lr} for each, lr in zip(groups, rates, strict=True)]
        )
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        differs = grid.rank == 1
        if what == "lr" and differs:
            optimizer.param_groups[1]["lr"] = 0.3
        if what == "step" and differs:
            for state in optimizer.state.values():
                state["step"] += 1
        model[0].seen = 4 if what == "extra state" and differs else 3
        extra = {"tokens": 5 + (what == "extra" and differs), "names": {"b": 1, "a": 2}}
        if differs:
            extra["names"] = {"a": 2.0, "b": 1}
        try:
            checkpoint.save(f"{folder}/{what}", 1, model, optimizer, extra=extra,
                            background=in_background, progress=False)  # fmt: skip
            checkpoint.wait()
            told[what] = "saved"
        except CheckpointError as error:
            told[what] = str(error)
            assert checkpoint.steps(f"{folder}/{what}") == []
        if what == "step" and differs:  # one number for all slices of a parameter
            for parameter in model[1].parameters():
                optimizer.state[parameter]["step"] -= 1
        checkpoint.save(f"{folder}/first {what}", 1, model, optimizer, extra=extra,
                        copies="first", progress=False)  # fmt: skip
        if what != "group":  # whose groups load refuses on rank 1 alone
            checkpoint.load(f"{folder}/first {what}", model, optimizer, progress=False)
    commgrid.shutdown()
    return told


@pytest.mark.parametrize("in_background", [False, True], ids=["at once", "in background"])
def test_values_that_differ_between_ranks_are_not_saved(
    in_background: bool, tmp_path: Path
) -> None:
    for told in run_on_ranks(saves_what_differs, 2, str(tmp_path), in_background):
        assert told["nothing"] == "saved"
        who = "differs between rank 0 and rank 1 of group 'tp'"
        assert f"optimizer.param_groups.1.weight.lr {who}" in told["lr"]
        assert f"optimizer.state.0.weight.step {who}" in told["step"]
        assert f"model.0._extra_state {who}" in told["extra state"]
        assert "extra['tokens'] differs between the grid's ranks 0 and 1" in told["extra"]
        assert "extra_per_rank=" in told["extra"]
        assert "are not the same ones" in told["group"]


def gives_extra_on(folder: str, ranks: list[int]) -> str:
    grid = commgrid.initialize()
    extra = {"tokens": 5} if grid.rank in ranks else None
    try:
        checkpoint.save(folder, 1, nn.Identity(), extra=extra, progress=False)
        told = "saved"
    except CheckpointError as error:
        told = str(error)
    commgrid.shutdown()
    return told


def test_extra_may_be_given_on_the_first_rank_alone(tmp_path: Path) -> None:
    assert run_on_ranks(gives_extra_on, 2, str(tmp_path / "first"), [0]) == ["saved"] * 2
    for told in run_on_ranks(gives_extra_on, 2, str(tmp_path / "second"), [1]):
        assert "extra['tokens'] differs between the grid's ranks 0 and 1" in told


EQUAL = [(1, 1.0), ([1, 2], (1, 2)), ({"a": 1, "b": 2}, {"b": 2, "a": 1}), (0.0, -0.0),
         ({3, 1, 2}, {2, 3, 1}), (float("nan"), float("nan")), (object(), object()),
         (torch.ones(2, 2).t(), torch.ones(2, 2))]  # fmt: skip
OTHER = [(1, 2), ([1, 2], [2, 1]), ({"a": 1}, {"a": 2}), ("1", 1), (b"a", "a"), (None, 0),
         (torch.ones(2), torch.ones(2).double()), ([[1], 2], [1, [2]]),
         (2**60, 2**60 + 1)]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), EQUAL, ids=range(len(EQUAL)))
def test_equal_values_have_one_number(one: Any, other: Any) -> None:
    assert number_of(one) == number_of(other)


@pytest.mark.parametrize(("one", "other"), OTHER, ids=range(len(OTHER)))
def test_other_values_have_other_numbers(one: Any, other: Any) -> None:
    assert number_of(one) != number_of(other)
