"""Live grids over lists of ranks in any order, on a torch.distributed that was up before."""

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import commgrid
from commgrid import (
    CommGridError,
    HyperCommGrid,
    NotInGridError,
    NotInGroupError,
    SpecError,
    UnknownGroupError,
)
from commgrid.checkpoint import save
from commgrid.collectives import all_gather, broadcast
from commgrid.data_parallel import GradientReducer
from commgrid.pipeline import Pipeline
from commgrid.planning.group import GroupDef
from commgrid.sharding import ShardingSpec
from commgrid.tensor_parallel import ColumnParallelLinear
from commgrid.testing import run_on_ranks
from tests.enumeration import coordinates, groups_along
from tests.process_groups import group_count

SIX = (0, 1, 2, 4, 5, 7)
PERMUTED = (5, 2, 0, 7)


def check_groups(grid: HyperCommGrid, sizes: dict[str, int], ranks: tuple[int, ...]) -> None:
    """Names, places and neighbours against enumeration."""
    table = coordinates(sizes, ranks)
    assert grid.get_ranks() == ranks
    assert grid.get_local_rank() == ranks.index(grid.rank)
    assert table[grid.rank].items() <= grid.coordinate.items()
    for axis, size in sizes.items():
        index, groups = grid.get_local_rank(axis), groups_along(table, [axis])
        members = groups[grid.rank]
        assert (grid.size(axis), grid.get_ranks(axis)) == (size, members)
        assert index == table[grid.rank][axis]
        assert grid.next_rank(axis) == members[(index + 1) % size]
        assert grid.prev_rank(axis) == members[index - 1]
        assert (grid.is_first(axis), grid.is_last(axis)) == (index == 0, index == size - 1)
        assert set(grid.get_all_ranks(axis)) == set(groups.values())


def check_collectives(grid: HyperCommGrid) -> None:
    """Sums, order and source on every communicator, and messages around its ring."""
    for communicator in grid.communicators:
        group, ranks = communicator.group, communicator.ranks
        assert tuple(dist.get_process_group_ranks(group)) == ranks
        mine = torch.tensor([2.0**grid.rank], dtype=torch.float64)
        total = mine.clone()
        dist.all_reduce(total, group=group)
        assert total.item() == sum(2.0**rank for rank in ranks)
        assert all_gather(mine, group).tolist() == [2.0**rank for rank in ranks]
        assert broadcast(mine, group, source=len(ranks) - 1).item() == 2.0 ** ranks[-1]
        if len(ranks) > 1:
            at, heard = ranks.index(grid.rank), torch.zeros(1, dtype=torch.float64)
            work = dist.isend(mine, ranks[(at + 1) % len(ranks)], group=group)
            dist.recv(heard, ranks[at - 1], group=group)
            assert work is not None
            work.wait()
            assert heard.item() == 2.0 ** ranks[at - 1]
    assert len(grid.check().rows) == len(grid.communicators)


def spares() -> None:
    rank = dist.get_rank()
    if rank in SIX:
        grid = commgrid.initialize(tp=3, pp=2, ranks=SIX)
        check_groups(grid, {"tp": 3, "cp": 1, "dp": 1, "pp": 2}, SIX)
        assert grid.get_all_ranks("tp") == ((0, 1, 2), (4, 5, 7))
        assert grid.get_all_ranks("pp") == ((0, 4), (1, 5), (2, 7))
        assert grid.select(pp=1).ranks == (4, 5, 7)
    else:
        with pytest.raises(
            NotInGridError, match=r"rank . is not in this grid, .* ranks 0-2, 4-5, 7"
        ):
            commgrid.initialize(tp=3, pp=2, ranks=SIX)
        grid = commgrid.initialize(dp=2, ranks=(6, 3))
        check_groups(grid, {"dp": 2}, (6, 3))
    check_collectives(grid)


def test_a_grid_over_survivors_beside_one_over_the_others() -> None:
    run_on_ranks(spares, 8)


def stages(grid: HyperCommGrid) -> None:
    """A pipeline of two stages trains as the two layers do in one process."""
    torch.manual_seed(7)
    layers = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(2)]
    inputs, targets = torch.randn(2, 4, 3, 4, dtype=torch.float64)
    whole = nn.Sequential(*layers)
    losses = torch.stack(
        [nn.functional.mse_loss(whole(x), y) for x, y in zip(inputs, targets, strict=True)]
    )
    losses.sum().backward()
    mine = layers[grid.get_local_rank("pp")]
    expected = mine.weight.grad
    stage = nn.Linear(4, 4, dtype=torch.float64)
    stage.load_state_dict(mine.state_dict())
    pipeline = Pipeline(stage, "1f1b", num_microbatches=4, loss=nn.functional.mse_loss)
    found = pipeline.step(inputs, targets=targets)
    assert (found is not None) == grid.is_last("pp") == (grid.rank in (0, 7))
    if found is not None:
        torch.testing.assert_close(found, losses.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(stage.weight.grad, expected, rtol=1e-9, atol=1e-12)


def tensors(grid: HyperCommGrid) -> None:
    """DTensors on the grid's mesh lie and come back as its coordinates say, uneven ones too."""
    before = group_count()
    mesh = grid.device_mesh("pp", "tp")
    assert mesh.mesh.tolist() == [[5, 2], [0, 7]]
    assert mesh.get_coordinate() == (grid.get_local_rank("pp"), grid.get_local_rank("tp"))
    assert grid.device_mesh("pp_tp").mesh.tolist() == list(PERMUTED)
    full = torch.arange(30.0).view(5, 6)
    made = distribute_tensor(full, mesh, [Shard(0), Shard(1)])
    pp, tp = mesh.get_coordinate() or (0, 0)
    assert torch.equal(made.to_local(), full.chunk(2)[pp].chunk(2, 1)[tp])
    assert torch.equal(made.redistribute(placements=[Replicate(), Shard(0)]).full_tensor(), full)
    spec = ShardingSpec({"pp_tp": Shard(1)})
    starts = [spec.offset((3, 8), rank)[1] for rank in PERMUTED]
    assert starts == [0, 2, 4, 6]
    assert torch.equal(spec.distribute(full[:3]).full_tensor(), full[:3])
    adopted = HyperCommGrid.from_device_mesh(mesh)
    assert adopted.get_group("tp") is grid.get_group("tp")
    assert adopted.get_group("pp_tp") is grid.get_group("pp_tp")
    assert adopted.get_ranks("pp_tp") == PERMUTED
    check_groups(adopted, {"tp": 2, "pp": 2}, PERMUTED)
    adopted.check()
    assert group_count() == before


def permuted() -> None:
    if dist.get_rank() not in PERMUTED:
        return
    grid = commgrid.initialize(config={"axes": {"tp": 2, "pp": 2}, "ranks": list(PERMUTED)})
    check_groups(grid, {"tp": 2, "cp": 1, "dp": 1, "pp": 2}, PERMUTED)
    check_collectives(grid)
    stages(grid)
    tensors(grid)
    commgrid.destroy()
    with pytest.raises(commgrid.GridDestroyedError):
        grid.get_ranks("pp")


def test_a_grid_over_a_permuted_list() -> None:
    run_on_ranks(permuted, 8)


def test_ranks_that_list_them_in_another_order_are_told() -> None:
    def differing() -> None:
        ranks = (0, 1, 3, 2) if dist.get_rank() else (0, 3, 1, 2)
        with pytest.raises(commgrid.GridMismatchError, match="order is '0,3,1,2' on rank 0"):
            commgrid.initialize(ranks=ranks, startup_timeout=20)

    run_on_ranks(differing, 4)


def from_text() -> None:
    grid = commgrid.initialize(config={"axes": {"tp": 2, "dp": 2}, "ranks": "2,0-1,3"})
    assert grid.get_ranks("tp") in ((2, 0), (1, 3))
    check_collectives(grid)


def test_ranks_of_a_config_may_be_text() -> None:
    run_on_ranks(from_text, 4)


# -- rows of the groups table that list ranks -------------------------------------------

ROWS: dict[str, Any] = {
    "some": {"ranks": [[4, 2, 1, 0], [3, 5]]}, "alias": "some",
    "ends": {"of": "some", "pick": ["first", "last"]}, "slow": {"of": "some", "timeout": 7},
    "cross": {"ranks": [[0, 5], [2, 3]]},
}  # fmt: skip


def rows() -> None:
    grid = commgrid.initialize(tp=2, dp=4, groups=ROWS)
    rank = grid.rank
    assert {"some", "alias", "ends", "slow", "cross"} <= set(grid.group_names)
    assert grid.get_all_ranks("some") == ((3, 5), (4, 2, 1, 0))
    assert grid.get_all_ranks("ends") == ((3, 5), (4, 0))
    mine = (4, 2, 1, 0) if rank in (0, 1, 2, 4) else (3, 5)
    assert grid.is_member("some") is (rank not in (6, 7))
    assert grid.is_member("cross") is (rank in (0, 2, 3, 5))
    if grid.is_member("some"):
        assert grid.get_ranks("some") == grid.get_ranks("alias") == mine
        assert grid.get_local_rank("some") == mine.index(rank)
        assert grid.size("some") == len(mine)
        assert grid.next_rank("some") == mine[(mine.index(rank) + 1) % len(mine)]
        assert grid.get_group("some") is grid.get_group("alias") is not grid.get_group("slow")
    else:
        for call in (grid.get_group, grid.size, grid.get_ranks, grid.next_rank, grid.is_last):
            with pytest.raises(
                NotInGroupError, match=rf"rank {rank} is not in group 'some', none of"
            ):
                call("some")
    by_name = {name: c for c in grid.communicators for name in c.names}
    if "some" in by_name:
        assert by_name["some"].planned.connect  # as the table's rows do
        assert by_name["slow"].options.timeout == 7.0
    with pytest.raises(SpecError, match="group 'some' lists its ranks, and a mesh has all ranks"):
        grid.device_mesh("some")
    with pytest.raises(UnknownGroupError, match="group 'some' lists its ranks and runs along no"):
        grid.select(tp=0).get_group("some")
    check_collectives(grid)


def test_rows_that_list_ranks() -> None:
    run_on_ranks(rows, 8)


def rows_in_a_list() -> None:
    if dist.get_rank() in SIX:
        groups = {"some": {"ranks": [[7, 2], [0, 5, 1]]}}
        grid = commgrid.initialize(tp=3, pp=2, ranks=SIX, groups=groups)
        assert grid.is_member("some") is (grid.rank != 4)
        check_collectives(grid)


def test_rows_list_global_ranks_of_a_listed_grid() -> None:
    run_on_ranks(rows_in_a_list, 8)


def sliced() -> None:
    """By axes they would be copies of which one is saved, and copies that nobody compares."""
    grid = commgrid.initialize(tp=2, groups={"odd": {"ranks": [[0, 3], [2, 1]]}})
    layer = ColumnParallelLinear(4, 8, group="odd")
    told = "weight: sliced over 'odd', which lists its ranks or has some of those along its axes"
    with tempfile.TemporaryDirectory() as folder, pytest.raises(CommGridError, match=told):
        save(folder, 1, layer, copies="first")
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, 1.0 if grid.is_first("odd") else 2.0)
    nn.init.zeros_(model.bias)
    with pytest.raises(CommGridError, match=r"weight .* differs between"):
        GradientReducer(model, group="odd")
    reducer = GradientReducer(model, group="odd", broadcast=True)
    assert model.weight.min().item() == model.weight.max().item() == 1.0
    model(torch.full((1, 2), float(grid.rank))).sum().backward()
    reducer.finish()
    mean = sum(grid.get_ranks("odd")) / 2
    assert torch.equal(model.weight.grad, torch.full((2, 2), mean))


def test_slices_over_listed_ranks_are_not_taken_for_copies() -> None:
    run_on_ranks(sliced, 4)


# -- meshes of torch's ------------------------------------------------------------------


def meshes() -> None:
    """A mesh over any ranks is a grid, if its groups have them in its order."""
    rising = DeviceMesh("cpu", [[0, 3], [1, 4]], mesh_dim_names=("dp", "tp"))
    flat = rising._flatten("dp_tp")
    if dist.get_rank() != 2:
        grid = HyperCommGrid.from_device_mesh(rising)
        check_groups(grid, {"tp": 2, "dp": 2}, (0, 3, 1, 4))
        assert grid.get_group("tp") is rising.get_group("tp")
        # torch sorts a group's ranks, so that this one's are in another order than the mesh's
        assert dist.get_process_group_ranks(flat.get_group()) == [0, 1, 3, 4]
        with pytest.raises(UnknownGroupError, match="was not created"):
            grid.get_group("dp_tp")
        check_collectives(grid)
    falling = DeviceMesh("cpu", [4, 3, 0], mesh_dim_names=("dp",))
    if dist.get_rank() in (0, 3, 4):
        with pytest.raises(
            SpecError, match=r"has ranks \[4, 3, 0\], but its group has them as \[0,"
        ):
            HyperCommGrid.from_device_mesh(falling)
    else:
        with pytest.raises(NotInGridError):
            HyperCommGrid.from_device_mesh(falling)


def test_a_grid_adopts_a_mesh_over_any_ranks() -> None:
    run_on_ranks(meshes, 5)


# -- look-ups ---------------------------------------------------------------------------


def looked_up() -> None:
    """79 to 122 µs each, and pipelines ask at every microbatch: computed once, then looked up."""
    grid = commgrid.initialize(tp=2, pp=2, groups={"ends": {"of": "pp", "pick": ["first", "last"]}})
    names = [("tp",), ("pp",), ("tp", "pp"), ("ends",), ()]
    calls = (
        grid.size, grid.get_ranks, grid.get_local_rank, grid.is_first, grid.is_last,
        grid.next_rank, grid.prev_rank,
    )  # fmt: skip
    first = [call(*name) for call in calls for name in names]
    compute = GroupDef.ranks

    def computed(*_: object) -> None:
        raise AssertionError("computed again")

    GroupDef.ranks = computed  # type: ignore[method-assign,assignment]
    try:
        assert [call(*name) for call in calls for name in names] == first
    finally:
        GroupDef.ranks = compute  # type: ignore[method-assign]
    commgrid.destroy()
    for call in calls:
        for name in names:
            with pytest.raises(commgrid.GridDestroyedError):
                call(*name)


def test_a_look_up_is_computed_once_and_gone_with_the_grid() -> None:
    run_on_ranks(looked_up, 4)
