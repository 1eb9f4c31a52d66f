"""The grid's communicators as torch's DeviceMesh, against meshes that torch makes itself."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import commgrid
from commgrid import SpecError, UnknownGroupError
from commgrid.runtime.grid import HyperCommGrid
from commgrid.tensor_parallel import ColumnParallelLinear
from commgrid.testing import run_on_ranks
from tests.process_groups import group_count
from tests.sizes import some

GRIDS: dict[int, list[dict[str, Any]]] = {
    1: [{}, {"ep": 1, "etp": 1}],
    2: [{"tp": 2}, {"pp": 2}, {"dp": 2}, {"cp": 2}, {"ep": 2}],
    4: [
        {"tp": 2}, {"tp": 4}, {"pp": 2}, {"cp": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2},
        {"ep": 2}, {"ep": 4, "etp": 1, "tp": 2}, {"tp": 2, "pp": 2}, {"order": "pp-dp-tp", "tp": 2},
        {"share": "all", "tp": 2}, {"share": "region", "tp": 2, "ep": 2, "etp": 1},
    ],
    8: [
        {"tp": 2, "pp": 2}, {"tp": 2, "cp": 2}, {"tp": 2, "cp": 2, "pp": 2}, {"ep": 4},
        {"ep": 8, "tp": 2, "etp": 1}, {"tp": 4, "ep": 2, "etp": 2}, {"pp": 4, "ep": 2},
        {"dp_replicate": 2, "dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2, "cp": 2},
        {"tp": 2, "order": "dp-tp"}, {"tp": 8}, {"pp": 2, "ep": 2, "etp": 2}, {"share": "region"},
        {"dp_shard": 4, "tp": 2, "groups": {"fsdp": "dp_shard_cp"}},
    ],
}  # fmt: skip


def same(ours: DeviceMesh, theirs: DeviceMesh) -> None:
    assert ours.mesh_dim_names == theirs.mesh_dim_names
    assert ours.shape == theirs.shape
    assert ours.get_coordinate() == theirs.get_coordinate()
    assert torch.equal(ours.mesh, theirs.mesh)
    for name in theirs.mesh_dim_names or ():
        mine, others = ours.get_group(name), theirs.get_group(name)
        assert dist.get_process_group_ranks(mine) == dist.get_process_group_ranks(others)
        assert ours.get_local_rank(name) == theirs.get_local_rank(name)


def compare(given: dict[str, Any]) -> int:
    """How many meshes were compared."""
    grid = commgrid.initialize(**given)
    compared = 0
    for region in grid.spec.regions:
        axes = tuple(reversed(region.axes))
        ranks = torch.tensor(grid.spec.layout(region.name).ranks[:])
        theirs = init_device_mesh("cpu", tuple(dict(region.numbers)[a] for a in axes),
                                  mesh_dim_names=axes)  # fmt: skip
        assert torch.equal(theirs.mesh.flatten(), ranks.int())
        before = group_count()
        ours = grid.device_mesh(*axes)
        same(ours, theirs)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for name in grid.group_names:
                definition = grid.spec.definitions[name]
                own = definition.axes
                if not set(own) <= set(axes) or definition.pick is not None:
                    continue
                if name == own[0]:
                    mesh = grid.device_mesh(name)
                elif definition.region == region.name:
                    mesh = grid.device_mesh(*own)
                    assert mesh.mesh_dim_names == own
                    flat = mesh._flatten(name)
                    assert flat.get_group() is grid.get_group(name)
                    assert torch.equal(flat.mesh, mesh.mesh.flatten())
                    assert grid.device_mesh(name) == flat
                    rest = [a for a in axes if a not in own and axes.index(a) > axes.index(own[0])]
                    if rest:
                        mesh = grid.device_mesh(name, rest[-1])
                        assert mesh.mesh_dim_names == (name, rest[-1])
                        assert mesh[rest[-1]].get_group() is grid.get_group(rest[-1])
                else:
                    continue
                for dim in mesh.mesh_dim_names or ():
                    assert mesh.get_group(dim) is grid.get_group(dim)
                    assert mesh.get_local_rank(dim) == grid.get_local_rank(dim)
                compared += 1
        assert group_count() == before
    commgrid.destroy()
    return compared


def every(grids: list[dict[str, Any]]) -> int:
    return sum(compare(given) for given in grids)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_meshes_are_those_torch_makes_and_make_no_groups(world: int) -> None:
    grids = some(GRIDS[world], 4)
    found = run_on_ranks(every, world, grids)
    assert min(found) >= 10 * len(grids)


def as_each_rank(grids: list[dict[str, Any]], world: int) -> int:
    """One process as every rank in turn, whose groups do not communicate; gloo's take a minute."""
    compared = 0
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        compared += every(grids)
        commgrid.shutdown()
        dist.destroy_process_group()
    return compared


@pytest.mark.full
def test_meshes_of_eight_ranks() -> None:
    grids = some(GRIDS[8], 4)
    (found,) = run_on_ranks(as_each_rank, 1, grids, 8, backend=None)
    assert found >= 8 * 10 * len(grids)


def test_there_are_enough_grids() -> None:
    assert sum(map(len, GRIDS.values())) >= 30


def together() -> None:
    """tp and dp meshes taken apart make one DTensor."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    grid = commgrid.initialize(tp=2, groups={"fsdp": "dp_cp"})
    before = group_count()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    full = model[0].weight.detach().clone()
    parallelize_module(model, grid.device_mesh("tp"), {"0": ColwiseParallel()})
    fully_shard(model, mesh=grid.device_mesh("fsdp"))
    weight: Any = model[0].weight
    assert weight.device_mesh.mesh_dim_names == ("fsdp", "tp")
    assert torch.equal(weight.full_tensor(), full)
    x = torch.randn(4, 8)
    model(x).sum().backward()
    alone = torch.nn.functional.linear(x, full.requires_grad_(), model[0].bias.full_tensor())
    alone.relu().sum().backward()
    torch.testing.assert_close(weight.grad.full_tensor(), full.grad)
    assert group_count() == before


def test_tensor_parallel_and_fsdp_meshes_taken_apart_combine() -> None:
    run_on_ranks(together, 4)


def refused() -> None:
    commgrid.initialize(
        tp=2, ep=2, etp=1, pp=2,
        groups={"embedding": {"of": "pp", "pick": ["first", "last"]},
                "tp_halves": {"of": "tp", "split": {"a": 1, "b": 2}}},
    )  # fmt: skip
    grid = commgrid.get_grid()
    for names, error, said in (
        (("dp", "ep"), SpecError, "axes of two regions are not one mesh"),
        (("dp_tp", "tp"), SpecError, "axis 'tp' is in it twice"),
        (("tp", "tp"), SpecError, "device_mesh('tp', 'tp'): axis 'tp' is in it twice"),
        (("embedding",), SpecError, "'embedding' picks some members"),
        (("b",), SpecError, "'b' is a part of a split"),
        (("tpp",), UnknownGroupError, "no group is named 'tpp'"),
    ):
        with pytest.raises(error) as caught:
            grid.device_mesh(*names)
        assert said in str(caught.value)
    assert grid.device_mesh(drop_size_1=True).mesh_dim_names == ("pp", "tp")
    assert grid.device_mesh("cp", drop_size_1=True).mesh_dim_names == ("cp",)
    assert grid.device_mesh("pp", "edp", "ep", drop_size_1=True).mesh_dim_names == ("pp", "ep")
    commgrid.destroy()
    commgrid.initialize(tp=2, create=["tp"])
    with pytest.raises(UnknownGroupError, match="'dp' of region 'dense' was not created"):
        commgrid.get_grid().device_mesh("tp")
    commgrid.destroy()
    grid = commgrid.initialize(tp=2, create=["tp", "dp"])  # cp and pp have one rank
    assert grid.device_mesh("dp", "tp").mesh_dim_names == ("dp", "tp")


def test_what_is_no_mesh_is_named() -> None:
    run_on_ranks(refused, 4)


def tensors() -> None:
    grid = commgrid.initialize(tp=2)
    full = torch.arange(24.0).view(4, 6)
    made = distribute_tensor(full, grid.device_mesh("dp", "tp"), [Shard(0), Shard(1)])
    dp, tp = grid.get_local_rank("dp"), grid.get_local_rank("tp")
    assert torch.equal(made.to_local(), full.chunk(2)[dp].chunk(2, 1)[tp])
    assert torch.equal(made.redistribute(placements=[Replicate(), Shard(0)]).full_tensor(), full)


def test_dtensors_live_on_them() -> None:
    run_on_ranks(tensors, 4)


def adopted() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    flat, alias = mesh._flatten("dp_tp"), mesh._flatten("everyone")
    before = group_count()
    grid = commgrid.HyperCommGrid.from_device_mesh(mesh, name="adopted")
    assert grid.shape == {"tp": 2, "dp": 2}
    for name in ("dp", "tp"):
        assert grid.get_group(name) is mesh.get_group(name)
        assert grid.get_local_rank(name) == mesh.get_local_rank(name)
    assert grid.get_group("tp", "dp") is flat.get_group()
    assert grid.get_group("everyone") is alias.get_group()
    assert grid.get_ranks("everyone") == (0, 1, 2, 3)
    grid.check()
    layer = ColumnParallelLinear(4, 8, grid=grid)
    assert layer(torch.ones(2, 4)).shape == (2, 4)
    assert grid.device_mesh("dp", "tp").get_group("tp") is mesh.get_group("tp")
    assert group_count() == before
    grid.destroy()
    assert group_count() == before
    assert dist.get_world_size(mesh.get_group("tp")) == 2
    with pytest.raises(SpecError, match="its dims have no names"):
        commgrid.HyperCommGrid.from_device_mesh(init_device_mesh("cpu", (4,)))
    reverse = DeviceMesh("cpu", [3, 2, 1, 0], mesh_dim_names=("dp",))
    with pytest.raises(
        SpecError, match=r"ranks \[3, 2, 1, 0\], but its group has them as \[0, 1, 2"
    ):
        commgrid.HyperCommGrid.from_device_mesh(reverse)


def test_a_grid_adopts_a_mesh() -> None:
    # The ranks set variables of the environment.
    run_on_ranks(adopted, 4, check=False)


def adopted_as_it_is() -> None:
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    mesh = init_device_mesh("cpu", (1, 2, 1, 1, 2), mesh_dim_names=names)
    flat = {
        "dp_cp": mesh["dp_replicate", "dp_shard", "cp"]._flatten("dp_cp_flat"),
        "cp_tp": mesh["cp", "tp"]._flatten("cp_tp"),
        "whole": mesh._flatten("whole"),
        "every": mesh["dp_replicate", "dp_shard", "cp", "tp"]._flatten("every"),
    }
    grid = commgrid.HyperCommGrid.from_device_mesh(mesh)
    for name in names:
        assert grid.get_group(name) is mesh.get_group(name)
        assert grid.get_ranks(name) == tuple(dist.get_process_group_ranks(mesh.get_group(name)))
    for name in ("cp_tp", "whole", "every"):
        assert grid.get_group(name) is flat[name].get_group()
    held = [communicator.group for communicator in grid.communicators]
    assert len(set(held)) == len(held)
    assert set(held) == {m.get_group() for m in flat.values()} | set(mesh.get_all_groups())
    grid.check()
    grid.destroy()


def test_a_grid_adopts_each_group_of_a_mesh_also_of_one_rank() -> None:
    run_on_ranks(adopted_as_it_is, 4)


def adopted_hsdp() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    flat = mesh._flatten("dp_replicate_dp_shard")
    grid = commgrid.HyperCommGrid.from_device_mesh(mesh)
    assert grid.get_group("dp") is grid.get_group("dp_shard", "dp_replicate") is flat.get_group()


def test_an_adopted_mesh_of_hsdp_has_dp_too() -> None:
    run_on_ranks(adopted_hsdp, 4)


def flattened_and_sliced() -> None:
    """Was a KeyError: the mesh was a slice of a root with pp and cp, which nobody had named."""
    grid = commgrid.initialize(tp=2)
    mesh = grid.device_mesh("dp", "tp")
    assert mesh._get_root_mesh() is mesh is grid.device_mesh("dp", "tp")
    assert grid.device_mesh("tp")._get_root_mesh() is mesh
    before = group_count()
    flat = mesh._flatten()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        sliced = mesh["dp_tp"]  # to torch 2.12 no such slice equals what was flattened
    assert sliced.get_group() is flat.get_group() is grid.get_group("dp_tp")
    assert sliced.mesh.tolist() == flat.mesh.tolist() == [0, 1, 2, 3]
    assert group_count() == before
    mesh._flatten("whole")  # which the grid does not have
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert mesh["whole"].mesh.tolist() == [0, 1, 2, 3]
    commgrid.destroy()
    grid = commgrid.initialize(tp=2, pp=2)
    mesh = grid.device_mesh("dp", "tp")  # beside an axis that it does not have
    mesh._flatten("stage")
    assert mesh._get_root_mesh() is mesh
    assert mesh.get_group("stage").size() == 2
    assert mesh["tp"]._get_root_mesh() is mesh
    assert grid.device_mesh("tp")._get_root_mesh().mesh_dim_names == ("pp", "tp")


def test_flattened_names_are_sliced_from_the_mesh_they_were_made_of() -> None:
    run_on_ranks(flattened_and_sliced, 4)


def names_of_hidden_axes() -> None:
    """Was a ValueError: dp is an axis of every grid, here of size 1 and in no mesh."""
    grid = commgrid.initialize(dp=1, rows=2, columns=2, order="columns-rows-dp")
    mesh = grid.device_mesh("rows", "columns")
    flat = mesh._flatten("dp")
    assert flat.mesh.tolist() == [0, 1, 2, 3]
    assert mesh.get_group("dp") is flat.get_group()
    assert grid.size("dp") == 1
    with pytest.raises(ValueError, match="has been created before"):
        mesh["rows"]._flatten("dp")


def test_a_name_of_axes_that_are_not_in_the_mesh_is_free() -> None:
    run_on_ranks(names_of_hidden_axes, 4)


def joint_names() -> None:
    """The names that Accelerate flattens dp_shard to where cp and dp_replicate have size 1."""
    grid = commgrid.initialize(dp_shard=2, tp=2)
    before = group_count()
    mesh = grid.device_mesh("dp_shard", "tp")
    for name in ("dp", "dp_shard_cp", "dp_cp"):
        flat = mesh[("dp_shard",)]._flatten(name)
        assert flat.get_group() is mesh.get_group(name) is grid.get_group(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            assert mesh[name].size() == 2
    assert group_count() == before


def test_joint_names_with_axes_of_size_1_have_the_grids_groups() -> None:
    run_on_ranks(joint_names, 4)


def names_taken() -> None:
    """Only who flattens says what a name is: the grid's dp_tp is all four, the user's one dim."""
    grid = commgrid.initialize(tp=2)
    mesh = grid.device_mesh("dp", "tp")
    assert mesh.get_group("dp_tp") is grid.get_group("dp_tp")  # offered
    mine = mesh["tp"]._flatten("dp_tp")
    assert mesh.get_group("dp_tp") is mine.get_group()
    assert mine.mesh.tolist() == mesh["tp"].mesh.tolist()
    with pytest.raises(ValueError, match="has been created before"):
        mesh._flatten("dp_tp")
    assert grid.device_mesh("dp_tp").get_group() is grid.get_group("dp_tp")
    commgrid.destroy()
    grid = commgrid.initialize(tp=2)
    own = grid.device_mesh("dp", "tp")._flatten("dp_tp", backend_override="gloo")
    assert own.get_group() is not grid.get_group("dp_tp")


def test_a_name_that_was_only_offered_can_be_taken() -> None:
    run_on_ranks(names_taken, 4)


def other_order() -> None:
    """Was a SpecError; torch's own mesh lists its dims in any order."""
    grid = commgrid.initialize(tp=2)
    mesh = grid.device_mesh("tp", "dp")
    ranks = torch.arange(8).view(4, 2).t()
    same(mesh, DeviceMesh("cpu", ranks, mesh_dim_names=("tp", "dp")))
    assert mesh.get_group("dp") is grid.get_group("dp")
    whole = grid.device_mesh("tp", "dp_cp")
    assert torch.equal(whole.mesh, ranks.int())
    assert whole.get_group("dp_cp") is grid.get_group("dp_cp")
    full = torch.arange(24.0).view(8, 3)
    made = distribute_tensor(full, mesh, [Shard(0), Shard(0)])
    assert torch.equal(made.full_tensor(), full)
    assert torch.equal(made.to_local(), full[[mesh.mesh.flatten().tolist().index(grid.rank)]])


@pytest.mark.full
def test_axes_in_any_order() -> None:
    run_on_ranks(other_order, 8)


def parts_meet() -> None:
    """Meshes that are roots apart, and slices of others, make one DTensor."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    grid = commgrid.initialize(tp=2, dp_replicate=2, dp_shard=-1)
    data = grid.device_mesh("dp_replicate", "dp_shard")
    assert data._get_root_mesh() is data
    for tp in (grid.device_mesh("tp"), grid.device_mesh("dp_shard", "tp")["tp"]):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        full = model.weight.detach().clone()
        parallelize_module(model, tp, ColwiseParallel())
        fully_shard(model, mesh=data)
        weight: Any = model.weight
        assert weight.device_mesh.mesh_dim_names == ("dp_replicate", "dp_shard", "tp")
        assert torch.equal(weight.full_tensor(), full)
        x = torch.randn(4, 8)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
            model(x).sum().backward()
        torch.testing.assert_close(weight.grad.full_tensor(), x.sum(0).expand(8, 8))


def test_roots_of_one_region_meet() -> None:
    run_on_ranks(parts_meet, 8)


def data_parallel() -> None:
    """DDP asks its mesh for its parent, to find out that there is tensor parallelism."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    from torch.nn.parallel import DistributedDataParallel

    grid = commgrid.initialize(tp=2)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    parallelize_module(model, grid.device_mesh("tp"), ColwiseParallel())
    wrapped = DistributedDataParallel(model, device_mesh=grid.device_mesh("dp"))
    weight, _ = wrapped.parameters()
    assert weight.shape == (4, 8)  # tp's slices, which DDP takes for parameters like any other
    torch.manual_seed(grid.get_local_rank("dp"))
    x = torch.randn(4, 8)
    wrapped(x).sum().backward()
    expected = torch.stack(grid_gather(x.sum(0), grid.get_group("dp"))).mean(0).expand(4, 8)
    torch.testing.assert_close(weight.grad, expected)


def grid_gather(mine: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    found = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(found, mine, group=group)
    return found


@pytest.mark.full
def test_ddp_beside_tensor_parallel_layers() -> None:
    run_on_ranks(data_parallel, 4)


def adopted_spellings() -> None:
    """A flattened name that spells a combination was refused, as a row that shadows it."""
    names = ("dp", "cp", "tp")
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
    flat = mesh["dp", "cp"]._flatten("cp_dp")
    other = mesh["cp", "tp"]._flatten("dp_tp")  # spells what it is not
    grid = commgrid.HyperCommGrid.from_device_mesh(mesh)
    assert grid.get_group("cp_dp") is grid.get_group("dp_cp") is flat.get_group()
    assert grid.get_ranks("dp", "cp") == tuple(dist.get_process_group_ranks(flat.get_group()))
    held = {communicator.group for communicator in grid.communicators}
    assert held == {flat.get_group(), *mesh.get_all_groups()}
    assert other.get_group() not in held
    with pytest.raises(UnknownGroupError):
        grid.get_group("dp_tp")


def test_a_mesh_whose_flattened_names_spell_axes_is_adopted() -> None:
    run_on_ranks(adopted_spellings, 8)


def unflattened() -> None:
    """torchtitan's way: a dim is cut in two, over new groups of torch's, which outlive the grid."""
    dist.barrier()
    before = group_count()
    grid = commgrid.initialize(tp=2)
    mesh, theirs = (
        grid.device_mesh("dp", "tp"),
        init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp")),
    )
    made = group_count()
    cut, expected = (one._unflatten("dp", (2, 2), ("outer", "inner")) for one in (mesh, theirs))
    same(cut, expected)
    assert group_count() == made + 4  # two of each
    assert cut.get_group("tp") is grid.get_group("tp")
    full = torch.arange(40.0).view(8, 5)
    placements = [Shard(0), Shard(1), Shard(0)]
    mine = distribute_tensor(full, cut, placements)
    assert torch.equal(mine.to_local(), distribute_tensor(full, expected, placements).to_local())
    moved = mine.redistribute(placements=[Replicate(), Shard(0), Shard(1)])
    assert torch.equal(moved.full_tensor(), full)
    assert torch.equal((mine @ mine.t()).full_tensor(), full @ full.t())
    kept = mesh._flatten("everybody")  # all of WORLD: torch takes WORLD for it
    mesh["tp"]._flatten("own", backend_override="gloo")
    assert kept.get_group() is dist.group.WORLD
    others = set(theirs.get_all_groups()) | set(expected.get_all_groups())
    commgrid.destroy()
    # Two of the dim's parts and `own`: destroyed, their names would be given to the next groups.
    assert group_count() == before + len(others) + 3
    assert all(dist.get_world_size(group) > 1 for group in others)
    dist.barrier()  # WORLD's is still there


@pytest.mark.full
def test_a_grids_mesh_is_unflattened_as_torchs() -> None:
    run_on_ranks(unflattened, 8)


class Perceptron(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(torch.relu(self.up(x)))
        return found


def trained(model: torch.nn.Module, places: list[int]) -> list[list[float]]:
    """Losses of three steps, of each of these quarters of the batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        quarters = torch.randn(8, 8, generator=torch.Generator().manual_seed(step)).chunk(4)
        each = [(model(quarters[i]) - quarters[i].flip(1)).square().mean() for i in places]
        torch.stack(each).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in each])
    return losses


def first_fsdp(data: DeviceMesh, tp: DeviceMesh) -> tuple[list[float], dict[str, torch.Tensor]]:
    """torch's first FSDP, over copies of shards, of a model that is cut over tp."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    model = Perceptron()
    parallelize_module(model, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    wrapped = FullyShardedDataParallel(
        model, device_mesh=data, sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        use_orig_params=True, device_id=torch.device("cpu"),
    )  # fmt: skip
    losses = [one for (one,) in trained(wrapped, [dist.get_rank() // 2])]
    return losses, {name: value.full_tensor() for name, value in wrapped.state_dict().items()}


def hybrid_beside_tp() -> None:
    names = ("dp_replicate", "dp_shard", "tp")
    theirs = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
    grid = commgrid.initialize(tp=2, dp_replicate=2, dp_shard=2)
    before = group_count()
    mesh = grid.device_mesh(*names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is to go, which it says often
        (mine, state), (expected, other) = (
            first_fsdp(one["dp_replicate", "dp_shard"], one["tp"]) for one in (mesh, theirs)
        )
    assert group_count() == before
    assert mine == expected
    torch.manual_seed(0)
    alone = Perceptron()
    whole = trained(alone, [0, 1, 2, 3])
    # fp32, summed in another order: by tp's halves, and as averages of averages.
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(mine, [each[grid.rank // 2] for each in whole], **close)
    for name, value in alone.state_dict().items():
        assert torch.equal(state[name], other[name])
        torch.testing.assert_close(state[name], value, **close)


@pytest.mark.full
def test_fsdp1_over_copies_of_shards_beside_tp() -> None:
    run_on_ranks(hybrid_beside_tp, 8)


@pytest.mark.ranks(2, tp=2)
def test_dtensor_works_on_a_later_grid_of_the_same_shape(grid: HyperCommGrid) -> None:
    """torch caches plans by a mesh's ranks and names, and in them the names of its groups."""
    for name in ("first", "second", "third"):
        later = commgrid.initialize(tp=2, name=name)
        mesh = later.device_mesh("tp")
        x = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
        assert (x + 1).full_tensor().sum().item() == 36
        assert x.sum().full_tensor().item() == 28
        if name != "second":  # which lives on beside the third
            commgrid.destroy(name)
    mesh = commgrid.get_grid("second").device_mesh("tp")
    x = distribute_tensor(torch.arange(8.0).view(4, 2), mesh)
    assert x.redistribute(placements=[Shard(0)]).full_tensor().sum().item() == 28
    commgrid.destroy("second")
