"""ShardingSpec against DTensor: what lies where, and that redistribution keeps the tensor."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import commgrid
from commgrid import ShapeError, SpecError, UnknownGroupError
from commgrid.sharding import ShardingSpec
from commgrid.testing import run_on_ranks

AXES = ("pp", "dp", "cp", "tp")


def arithmetic() -> int:
    """Random shapes, axes and placements, as every rank, against torch's own arithmetic."""
    dist.init_process_group("fake", rank=0, world_size=24, store=FakeStore())
    grid = commgrid.initialize(tp=2, cp=3, pp=2)
    compared = 0

    @settings(max_examples=150, deadline=None, database=None)
    @given(
        st.lists(st.integers(0, 9), min_size=1, max_size=3),
        st.dictionaries(st.sampled_from(AXES), st.integers(-2, 2), min_size=1),
    )
    def check(shape: list[int], chosen: dict[str, int]) -> None:
        nonlocal compared
        placements: dict[str, Placement] = {
            axis: Shard(dim) if 0 <= dim < len(shape) else Replicate()
            for axis, dim in chosen.items()
        }
        spec = ShardingSpec(placements, grid)
        assert spec.axes == tuple(axis for axis in AXES if axis in placements)
        for rank in range(24):
            where = [grid.spec.layout("dense").coordinate(rank)[axis] for axis in spec.axes]
            wanted = _compute_local_shape_and_global_offset(
                torch.Size(shape), spec.sizes, where, spec.placements
            )
            assert (spec.local_shape(shape, rank), spec.offset(shape, rank)) == wanted
            compared += 1

    check()
    return compared


def test_shapes_and_offsets_of_any_rank() -> None:
    assert run_on_ranks(arithmetic, 1, backend=None)[0] >= 24 * 100


def distributed() -> None:
    grid = commgrid.initialize(tp=2, cp=2)
    draw = random.Random(0)
    for _ in range(60):
        shape = [draw.randrange(1, 8) for _ in range(draw.randrange(1, 4))]
        names = draw.sample(["dp_cp", "tp"] if draw.random() < 0.3 else ["dp", "cp", "tp"], 2)
        options = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
        spec = ShardingSpec({name: draw.choice(options) for name in names})
        full = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        theirs = distribute_tensor(full, spec.mesh, spec.placements)
        ours = spec.distribute(full)
        assert torch.equal(ours.to_local(), theirs.to_local())
        assert torch.equal(ours.to_local(), spec.local_shard(full))
        assert ours.placements == theirs.placements
        assert torch.equal(ours.full_tensor(), full)
    assert grid.rank == dist.get_rank()


def test_as_distribute_tensor() -> None:
    run_on_ranks(distributed, 8)


def every_pair(
    sizes: dict[str, int], axes: tuple[str, ...], shape: list[int], every: int = 1
) -> int:
    """Each source with every n-th target, another one for each; how many pairs."""
    grid = commgrid.initialize(**sizes)
    before = len(dist.distributed_c10d._world.pg_map)
    full = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    options: list[Placement] = [Replicate(), Shard(0), Shard(1)]
    compared = 0
    for index, source in enumerate(product([*options, Partial()], repeat=len(axes))):
        start = ShardingSpec(dict(zip(axes, source, strict=True)))
        tensor = start.distribute(full)
        for target in list(product(options, repeat=len(axes)))[index % every :: every]:
            spec = ShardingSpec(dict(zip(axes, target, strict=True)))
            found = spec.redistribute(tensor)
            assert found.placements == target
            assert torch.equal(found.to_local(), spec.local_shard(full)), (start, spec)
            compared += 1
    assert len(dist.distributed_c10d._world.pg_map) == before
    commgrid.destroy()
    assert grid.is_destroyed
    return compared


def pairs(cases: list[Any]) -> list[int]:
    return [every_pair(*case) for case in cases]


def test_redistribute_between_all_pairs_in_two_dims() -> None:
    cases = [({"tp": 2}, ("dp", "tp"), shape) for shape in ([4, 8], [5, 3])]
    assert run_on_ranks(pairs, 4, cases)[0] == [144, 144]


@pytest.mark.full
def test_redistribute_between_all_pairs_in_three_dims() -> None:
    """A ninth of the 1,728 pairs; all of them take a minute."""
    cases = [({"tp": 2, "cp": 2}, ("dp", "cp", "tp"), [8, 8], 9)]
    assert run_on_ranks(pairs, 8, cases)[0] == [192]


def uneven() -> None:
    """A dim that two axes shard unevenly, gathered where torch knows the two as one axis."""
    grid = commgrid.initialize(tp=2)
    full = torch.arange(15.0).view(5, 3)
    made = distribute_tensor(full, grid.device_mesh("dp", "tp"), [Shard(0), Shard(0)])
    assert len(made.to_local()) == (2, 1, 1, 1)[grid.rank]
    assert torch.equal(made.full_tensor(), full)
    even = distribute_tensor(full[:4], grid.device_mesh("dp", "tp"), [Shard(0), Shard(0)])
    with CommDebugMode() as counted:
        assert torch.equal(even.full_tensor(), full[:4])
    assert counted.get_total_counts() == 1  # over dp_tp at once


def test_uneven_pieces_of_two_axes() -> None:
    run_on_ranks(uneven, 4)


def other_axes() -> None:
    commgrid.initialize(tp=2)
    full = torch.arange(24.0).view(4, 6)
    by_tp, by_dp = ShardingSpec({"tp": Shard(1)}), ShardingSpec({"dp": Shard(0)})
    tensor = by_tp.distribute(full)
    found = by_dp.redistribute(tensor)
    assert isinstance(found, DTensor)
    assert found.device_mesh.mesh_dim_names == ("dp",)
    assert torch.equal(found.to_local(), by_dp.local_shard(full))


def test_redistribute_to_other_axes() -> None:
    run_on_ranks(other_axes, 4)


def test_a_torch_with_another_planner_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    commgrid.initialize()
    spec = ShardingSpec({"tp": Replicate()})
    monkeypatch.delattr("torch.distributed.tensor._redistribute._gen_transform_infos")
    with pytest.raises(commgrid.CommGridError, match=r"torch .* plans redistributions in another"):
        spec.plan(spec, (4, 4), torch.float32)
    commgrid.shutdown()


def planned() -> None:
    commgrid.initialize(tp=4)
    shape, kinds = (8, 12), {
        (Shard(0), Replicate()): [("all_gather", 3 * 24 * 4)],
        (Partial(), Replicate()): [("all_reduce", 2 * 3 * 24 * 4)],
        (Partial(), Shard(1)): [("reduce_scatter", 3 * 24 * 4)],
        (Shard(0), Shard(1)): [("all_to_all", 3 * 6 * 4)],
        (Replicate(), Shard(0)): [("local", 0)],
        (Shard(1), Shard(1)): [],
    }  # fmt: skip
    full = torch.randn(shape)
    for (one, other), steps in kinds.items():
        source, target = ShardingSpec({"tp": one}), ShardingSpec({"tp": other})
        plan = target.plan(source, shape, torch.float32)
        assert [(step.kind, step.sent) for step in plan] == steps
        assert all((step.axis, step.size) == ("tp", 4) for step in plan)
        tensor = source.distribute(full)
        with CommDebugMode() as counted:
            target.redistribute(tensor)
        assert counted.get_total_counts() == sum(step.kind != "local" for step in plan)


def test_the_plan_is_what_torch_does() -> None:
    run_on_ranks(planned, 4)


def refused() -> None:
    commgrid.initialize(tp=2, ep=2, etp=1)
    full = torch.randn(4, 6)
    for error, said, call in (
        (SpecError, "expected a placement for at least one axis", lambda: ShardingSpec({})),
        (SpecError, "tp='rows': expected Shard(dim), Replicate() or",
         lambda: ShardingSpec({"tp": "rows"})),  # type: ignore[dict-item]
        (UnknownGroupError, "no group is named 'tpp'", lambda: ShardingSpec({"tpp": Shard(0)})),
        (SpecError, "axes of two regions are not one mesh",
         lambda: ShardingSpec({"tp": Shard(0), "ep": Shard(1)})),
        (ShapeError, "axis 'tp' shards dim 2, but the tensor of shape (4, 6) has dims 0 to 1",
         lambda: ShardingSpec({"tp": Shard(2)}).local_shape((4, 6))),
        (ShapeError, "a part of shape (4, 6) on rank 0; of a tensor of shape (4, 6) it should be "
                     "(2, 6)",
         lambda: ShardingSpec({"tp": Shard(0)}).from_local(full, (4, 6))),
        (SpecError, "axes of two regions are not one mesh",
         lambda: ShardingSpec({"tp": Shard(0)}).redistribute(
             ShardingSpec({"ep": Shard(0)}).distribute(full))),
    ):  # fmt: skip
        if commgrid.get_grid().rank == 0:
            with pytest.raises(error) as caught:
                call()
            assert said in str(caught.value)


def test_what_does_not_fit_is_named() -> None:
    run_on_ranks(refused, 4)
