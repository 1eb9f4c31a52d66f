"""Buffers with a declared layout: slices, and one per rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import commgrid
from commgrid import checkpoint
from commgrid.collectives.group_ref import GroupRef
from commgrid.data_parallel import GradientReducer
from commgrid.parameters import ShardedModule, mark_buffers, mark_parameters
from commgrid.testing import run_on_ranks
from commgrid.transfer import Transfer

TABLE = torch.arange(24.0, dtype=torch.float64).view(8, 3)
Axes = dict[str, Any]


class Table(ShardedModule):
    """A ShardedModule whose only slice is a buffer."""

    shard_dims = {"table": 0}  # noqa: RUF012

    def __init__(self, grid: Any) -> None:
        super().__init__()
        self.group = GroupRef("tp", grid)
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("table", torch.zeros(8 // self.group.size, 3, dtype=torch.float64))


def made(grid: Any, merge: bool = True) -> nn.ModuleDict:
    """A table over tp twice, statistics of each dp rank, and an amax of each tp rank."""
    plain = nn.Linear(2, 2)
    plain.register_buffer("table", torch.zeros(3, 8 // grid.size("tp"), dtype=torch.float64))
    plain.register_buffer("amax", torch.zeros(()))
    mark_buffers(plain, "table", cut={"tp": 1}, grid=grid)
    mark_buffers(plain, "amax", own="tp", merge="max" if merge else None, grid=grid)
    norm = nn.BatchNorm1d(2).double()
    mark_buffers(norm, "running_*", own="dp", merge="mean" if merge else None, grid=grid)
    return nn.ModuleDict({"sharded": Table(grid), "plain": plain, "norm": norm})


def filled(model: Any, grid: Any) -> Any:
    dp, tp, slices = grid.get_local_rank("dp"), grid.get_local_rank("tp"), grid.size("tp")
    model["sharded"].table.copy_(TABLE.chunk(slices)[tp])
    model["plain"].table.copy_(TABLE.t().chunk(slices, 1)[tp])
    model["plain"].amax.fill_(10.0 + tp)
    model["norm"].running_mean.fill_(1.0 + dp)
    model["norm"].running_var.fill_(5.0 - dp)
    return model


def wrong(model: Any, grid: Any, saved: Axes) -> list[str]:
    """The buffers that are not as they were where there were `saved` ranks."""
    dp, tp, slices = grid.get_local_rank("dp"), grid.get_local_rank("tp"), grid.size("tp")
    same = {axis: size == grid.size(axis) for axis, size in saved.items()}
    right: dict[str, Any] = {
        "sharded.table": TABLE.chunk(slices)[tp],
        "plain.table": TABLE.t().chunk(slices, 1)[tp],
        "plain.amax": 10.0 + (tp if same["tp"] else saved["tp"] - 1),
        "norm.running_mean": 1.0 + (dp if same["dp"] else (saved["dp"] - 1) / 2),
        "norm.running_var": 5.0 - (dp if same["dp"] else (saved["dp"] - 1) / 2),
    }
    return [
        name for name, value in right.items()
        if not torch.equal(model.get_buffer(name), torch.zeros_like(model.get_buffer(name)) + value)
    ]  # fmt: skip


def saves(folder: str, axes: Axes, way: str) -> list[str]:
    grid = commgrid.initialize(**axes)
    model = filled(made(grid), grid)
    if way == "keep":
        checkpoint.keep(1, model)
        other = made(grid)
        commgrid.recover(None, other)
        found = wrong(other, grid, axes)
    else:
        options: Any = {"first": {"copies": "first"}, "background": {"background": True}}
        checkpoint.save(folder, 1, model, progress=False, **options.get(way, {}))
        checkpoint.wait()
        other = made(grid)
        checkpoint.load(folder, other, progress=False)
        found = wrong(other, grid, axes)
    commgrid.shutdown()
    return found


def loads(folder: str, axes: Axes, saved: Axes) -> list[str]:
    grid = commgrid.initialize(**axes)
    model = made(grid)
    checkpoint.load(folder, model, progress=False)
    found = wrong(model, grid, saved)
    commgrid.shutdown()
    return found


def test_each_rank_gets_its_own_buffers_and_slices_back(tmp_path: Path) -> None:
    assert run_on_ranks(saves, 4, str(tmp_path), {"dp": 2, "tp": 2}, "save") == [[]] * 4


@pytest.mark.full
@pytest.mark.parametrize("way", ["first", "background", "keep"])
@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"dp": 4, "tp": 1}, {"dp": 1, "tp": 4}])
def test_every_way_of_saving_has_them(way: str, axes: Axes, tmp_path: Path) -> None:
    assert run_on_ranks(saves, 4, str(tmp_path), axes, way) == [[]] * 4


@pytest.mark.full
@pytest.mark.parametrize("before", [{"dp": 2, "tp": 2}, {"dp": 1, "tp": 1}, {"dp": 1, "tp": 4}])
@pytest.mark.parametrize("after", [{"dp": 4, "tp": 1}, {"dp": 1, "tp": 2}, {"dp": 1, "tp": 1}])
def test_on_another_grid_they_are_cut_anew_and_merged(
    before: Axes, after: Axes, tmp_path: Path
) -> None:
    for axes, action in ((before, saves), (after, loads)):
        more = ("save",) if action is saves else (before,)
        ranks = axes["dp"] * axes["tp"]
        assert run_on_ranks(action, ranks, str(tmp_path), axes, *more) == [[]] * ranks


def moves(merge: bool, copies: str) -> Any:
    """From dp 2 · tp 2 to tp 2, with a loop of two runs."""
    axes = {"dp": 2, "tp": 2}
    source_grid = commgrid.initialize(name="source", **axes)
    target_grid = commgrid.initialize(name="target", ranks=[2, 3], dp=1, tp=2)
    model = filled(made(source_grid), source_grid)
    served = made(target_grid, merge) if target_grid else None
    told: Any = []
    try:
        transfer = Transfer(
            model, served, source_grid=source_grid, target_grid=target_grid, copies=copies,
            timeout=30,
        )  # fmt: skip
        for _ in range(2):
            if served is not None:
                for buffer in served.buffers():
                    buffer.zero_()
            transfer.run()
            told += wrong(served, target_grid, axes) if served is not None else []
    except commgrid.CommGridError as error:
        told = str(error)
    commgrid.shutdown()
    return told


@pytest.mark.parametrize("copies", [pytest.param("any", marks=pytest.mark.full), "compare"])
def test_a_transfer_merges_them(copies: str) -> None:
    assert run_on_ranks(moves, 4, True, copies, backend=None, launcher="torchrun") == [[]] * 4


@pytest.mark.full
def test_a_transfer_of_what_nothing_merges_is_refused() -> None:
    for told in run_on_ranks(moves, 4, False, "compare", backend=None, launcher="torchrun"):
        assert "model.norm.running_mean is of 2 ranks, each of which had its own" in told
        assert "here of 1; say with mark_buffers(…, merge=)" in told


def without_merge(folder: str) -> Any:
    grid = commgrid.initialize(dp=1, tp=2)
    model = made(grid, merge=False)
    model["norm"].running_mean.fill_(7.0)
    try:
        checkpoint.load(folder, model, progress=False)
        told: Any = wrong(model, grid, {"dp": 1, "tp": 2})
    except commgrid.CommGridError as error:
        told = str(error)
        assert model["norm"].running_mean.eq(7.0).all()
    commgrid.shutdown()
    return told


@pytest.mark.parametrize("dp", [1, pytest.param(2, marks=pytest.mark.full)])
def test_ranks_own_buffers_of_another_number_need_a_way_to_merge(dp: int, tmp_path: Path) -> None:
    axes = {"dp": dp, "tp": 2}
    assert run_on_ranks(saves, 2 * dp, str(tmp_path), axes, "save") == [[]] * 2 * dp
    for told in run_on_ranks(without_merge, 2, str(tmp_path)):
        assert told == [] if dp == 1 else "is of 2 ranks, each of which had its own" in told


def trains() -> list[float]:
    """A reducer leaves statistics that ranks each have of their own alone."""
    grid = commgrid.initialize(dp=2)
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    mark_buffers(model, "0.running_*", own="dp")
    reducer = GradientReducer(model, broadcast=True)
    model(torch.tensor([[1.0, 2.0], [3.0, 6.0]]) + 10 * grid.rank).sum().backward()
    reducer.finish()
    found = [float(model[i].running_mean[0]) for i in range(2)]
    reducer.close()
    commgrid.shutdown()
    return found


def test_a_reducer_leaves_statistics_of_a_ranks_own_alone() -> None:
    (first, second), (other, same) = run_on_ranks(trains, 2)
    assert first == pytest.approx(0.2)
    assert other == pytest.approx(1.2)
    assert second == same


def on_stages(folder: str) -> bool:
    """One table, cut over tp, under one name on both stages."""
    grid = commgrid.initialize(tp=2, pp=2)
    model = nn.ModuleDict({"rotary": Table(grid), f"layer{grid.rank // 2}": nn.Linear(2, 2)})
    model["rotary"].table.copy_(TABLE.chunk(2)[grid.get_local_rank("tp")])
    mark_parameters(model["rotary"], shared="pp")
    checkpoint.save(folder, 1, model, progress=False)
    model["rotary"].table.zero_()
    checkpoint.load(folder, model, progress=False)
    found = torch.equal(model["rotary"].table, TABLE.chunk(2)[grid.get_local_rank("tp")])
    commgrid.shutdown()
    return found


@pytest.mark.full
def test_stages_may_have_the_same_slices(tmp_path: Path) -> None:
    assert run_on_ranks(on_stages, 4, str(tmp_path)) == [True] * 4


def dtensors(folder: str) -> tuple[bool, str]:
    grid = commgrid.initialize(dp=2)
    mesh, model = grid.device_mesh("dp"), nn.Linear(2, 2)
    model.register_buffer("cut", distribute_tensor(TABLE, mesh, [Shard(0)]))
    model.register_buffer("whole", distribute_tensor(TABLE, mesh, [Replicate()]))
    checkpoint.save(folder, 1, model, progress=False)
    with torch.no_grad():
        model.cut.zero_()
    checkpoint.load(folder, model, progress=False)
    right = torch.equal(model.cut.full_tensor(), TABLE)
    model.cut.to_local().add_(grid.rank)
    told = ""
    model.whole.to_local().add_(grid.rank)
    try:
        checkpoint.save(folder, 2, model, progress=False)
    except commgrid.CommGridError as error:
        told = str(error)
    commgrid.shutdown()
    return right, told


@pytest.mark.full
def test_a_buffer_that_is_a_dtensor_is_cut_as_it_says(tmp_path: Path) -> None:
    for right, told in run_on_ranks(dtensors, 2, str(tmp_path)):
        assert right
        assert "model.whole differs between rank 0 and rank 1" in told


def test_what_means_nothing_is_refused() -> None:
    commgrid.initialize()
    norm = nn.BatchNorm1d(2)
    for given, told in (
        ({}, r"cut=None, own=None, merge=None\): expected cut="),
        ({"cut": {"dp": 0}, "merge": "mean"}, r"expected cut="),
        ({"own": "dp", "merge": "sum"}, "merge= one of mean, max, min or None"),
        (
            {"own": "dp", "names": "runing_*"},
            r"'runing_\*' is the name of no buffer; it has",
        ),
        ({"cut": {"dp": 1}}, r"cut along dim 1 over 'dp' \(1 ranks\), and has shape"),
    ):
        with pytest.raises(commgrid.SpecError, match=told):
            mark_buffers(norm, **given)  # type: ignore[arg-type]
    commgrid.shutdown()
