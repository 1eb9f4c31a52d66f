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
from commgrid.runtime.torch_groups import group_count
from commgrid.tensor_parallel import ColumnParallelLinear
from tests.full import some
from tests.ranks import run_on_ranks

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


def test_meshes_of_eight_ranks() -> None:
    grids = some(GRIDS[8], 4)
    (found,) = run_on_ranks(as_each_rank, 1, grids, 8, init=None)
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
        (("tp", "dp"), SpecError, "expected device_mesh('dp', 'tp')"),
        (("dp", "ep"), SpecError, "axes of two regions are not one mesh"),
        (("dp_tp", "tp"), SpecError, "axis 'tp' is in it twice"),
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
    commgrid.initialize(tp=2, create=["tp", "dp"])
    with pytest.raises(UnknownGroupError, match="'pp' of region 'dense' was not created"):
        commgrid.get_grid().device_mesh("tp")


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
    run_on_ranks(adopted, 4)


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
