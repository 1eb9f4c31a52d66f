"""Assertions about training functions: equal on grids, and whether all ranks finish."""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commgrid
from commgrid import CommGridError, SpecError
from commgrid.collectives import all_reduce, copy_to_group
from commgrid.data_parallel import GradientReducer
from commgrid.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from commgrid.testing import GridsDiffer, RanksFailed, RanksWait, finishes, grids, same_on_grids

STEPS = 3


class Model(nn.Module):
    def __init__(self, copies: str | None = None) -> None:
        super().__init__()
        kind = {"dtype": torch.float64}
        self.copies = copies
        self.up = ColumnParallelLinear(4, 8, **kind)
        self.down = RowParallelLinear(8, 4, **kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        if self.copies is not None:
            hidden = copy_to_group(hidden, self.copies)
        out: torch.Tensor = self.down(torch.tanh(hidden))
        return out


def train(copies: str | None = None, reduces: bool = True) -> None:
    grid = commgrid.initialize(tp=2)
    model = Model(copies)
    reducer = GradientReducer(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        batch = torch.randn(64, 4, generator=draw, dtype=torch.float64)
        mine = batch.chunk(grid.size("dp"))[grid.get_local_rank("dp")]
        model(mine).square().mean().backward()
        if reduces:
            reducer.finish()
        optimizer.step()
        optimizer.zero_grad()
    commgrid.shutdown()


def without_reduction() -> None:
    grid = commgrid.initialize(tp=2)
    torch.manual_seed(0)
    model = nn.Linear(4, 4).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        batch = torch.arange(32.0).view(8, 4).double()
        mine = batch.chunk(grid.size("dp"))[grid.get_local_rank("dp")]
        model(mine).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_correct_program_is_the_same() -> None:
    same_on_grids(train, ["dp=1", "tp=2", "dp=2", "dp=2 tp=2"], steps=2)


def test_a_gradient_that_is_not_reduced_is_named() -> None:
    with pytest.raises(GridsDiffer) as raised:
        same_on_grids(without_reduction, ["dp=1", "dp=2"], steps=2)
    said = str(raised.value)
    assert "dp=2 differs from dp=1 at step 1" in said
    assert "gradient weight along dp: " in said or "gradient bias along dp: " in said, said


def test_a_program_that_fails_shows_its_traceback() -> None:
    def fails() -> None:
        commgrid.initialize()
        raise ValueError("the data are not there")

    with pytest.raises(RanksFailed, match="the data are not there"):
        same_on_grids(fails, ["dp=1", "dp=2"])


def test_wrong_arguments() -> None:
    with pytest.raises(SpecError, match=r"grids=\['dp=1'\]: expected two or more"):
        same_on_grids(train, ["dp=1"])
    with pytest.raises(SpecError, match="steps=0: expected 1 or more"):
        same_on_grids(train, ["dp=1", "tp=2"], steps=0)
    with pytest.raises(SpecError, match="grid 'tp=2 --flag': a function has no flags"):
        same_on_grids(train, ["dp=1", "tp=2 --flag"])
    with pytest.raises(SpecError, match="backend='mpi': expected one of nccl, gloo, strict"):
        finishes(train, "tp=2", backend="mpi")
    with pytest.raises(SpecError, match="its sizes make 6 ranks, not 8"):
        finishes(train, "tp=3", world_size=8)
    with pytest.raises(SpecError, match="expected numbers of 1 or more, and an axis"):
        grids(0)
    with pytest.raises(SpecError, match=r"'tp' is given twice; expected each axis once"):
        grids(4, axes=("tp", "dp", "tp"))


def test_every_grid() -> None:
    found = grids(8)
    assert found[0] == "dp=1"
    assert len(found) == len(set(found)) == 20  # exponents of 2 that add up to 3 at most
    assert "dp=2 tp=2 pp=2" in found
    assert grids(4, axes=("dp", "tp"), sizes=(3,)) == ["dp=1", "tp=3", "dp=3"]  # 1 besides
    assert grids(4, axes=("dp", "tp"), sizes=(1, 3)) == ["dp=1", "tp=3", "dp=3"]


def test_every_rank_finishes() -> None:
    finishes(train, "tp=2", world_size=8)
    finishes(train, "tp=2", world_size=64, ranks=[0, 63])


def collects() -> None:
    commgrid.initialize(tp=2)
    gc.collect()
    all_reduce(torch.ones(2), "tp")


def test_garbage_of_this_process_is_not_collected_in_the_ranks() -> None:
    """A store that was dropped here would wait there for its thread, which fork does not copy."""
    gc.disable()
    try:
        store = dist.TCPStore("localhost", 0, 1, is_master=True)
        cycle: list[object] = [store]
        cycle.append(cycle)
        del store, cycle
        finishes(collects, "tp=2", timeout=60)
    finally:
        gc.enable()


def waits_for_ever() -> None:
    commgrid.initialize(tp=2)
    threading.Event().wait()


def test_where_a_rank_that_takes_too_long_is() -> None:
    with pytest.raises(CommGridError, match="has not done a step in 4 s, and was killed") as raised:
        finishes(waits_for_ever, "tp=2", timeout=4)
    assert "in waits_for_ever" in str(raised.value)


def crossed() -> None:
    """Two groups in opposite order on ranks of odd and even number."""
    grid = commgrid.initialize(tp=2)
    names = ["tp", "dp"] if grid.rank in (0, 3) else ["dp", "tp"]
    for name in names:
        all_reduce(torch.ones(2), name)  # here


def test_ranks_that_would_wait_for_each_other_are_named() -> None:
    with pytest.raises(RanksWait) as raised:
        finishes(crossed, "tp=2 dp=2")
    said = str(raised.value)
    assert said.startswith("'tp=2 dp=2' of 4 ranks: cannot finish under nccl's rules: 4 calls wait")
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if "# here" in text)
    assert len(re.findall(rf"test_assertions\.py:{line} crossed", said)) >= 4


@pytest.mark.ranks(1)
def test_it_is_for_processes_without_a_grid() -> None:
    assert dist.is_initialized()
    with pytest.raises(CommGridError, match="call it before initialize, or after shutdown"):
        finishes(crossed, "tp=2 dp=2")


@pytest.mark.parametrize("other", ["dp=2", "dp=2 tp=2"])
def test_a_collective_of_backward_is_named_with_its_module(other: str) -> None:
    """A layer sums a gradient over dp, where nothing is to be summed; dp's own sum is right."""
    with pytest.raises(GridsDiffer) as raised:
        same_on_grids(train, ["dp=1", other], args=("dp",), steps=1)
    said = str(raised.value)
    assert f"{other} differs from dp=1 at step 1\n  gradient up.bias along dp: 2 times" in said
    assert "all_reduce over dp at test_assertions.py" in said
    assert "in the backward of the model" in said
    assert "dp_cp" not in said


ENDS = {"sys.exit()": None, "sys.exit(0)": 0, "sys.exit(False)": False}


def exits(code: object, steps: bool) -> None:
    if steps:
        train()
    else:
        grid = commgrid.initialize(tp=2)
        all_reduce(torch.ones(4), grid.get_group("tp"))
        commgrid.shutdown()
    if code == "os._exit":
        os._exit(0)
    sys.exit(code)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_a_program_may_end_by_sys_exit(end: str, steps: bool) -> None:
    finishes(exits, "tp=2", args=(ENDS[end], steps), timeout=100)
    if steps:
        same_on_grids(exits, ["tp=1", "tp=2"], args=(ENDS[end], steps))


@pytest.mark.parametrize("code", [3, "no data", "os._exit"])
def test_a_program_that_ends_with_another_code_fails(code: object) -> None:
    with pytest.raises(CommGridError, match=r"rank [01] .*before its first step was over"):
        finishes(exits, "tp=2", args=(code, False), timeout=100)
    if code != "os._exit":  # then the records of its steps are written already
        with pytest.raises(RanksFailed, match=r"rank 0 \(exit code [13]\)"):
            same_on_grids(exits, ["tp=1", "tp=2"], args=(code, True))
