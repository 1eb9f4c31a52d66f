"""Communicators of equal names: what ranks record of one is the same, and of no other."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import commgrid
from commgrid.call_records import files as trace_files
from commgrid.call_records.trace import Trace
from commgrid.recording import recorder
from commgrid.testing import run_on_ranks
from tests.flags import meet
from tests.killing import kill_me, run_killable


def reduce(size: int, group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.ones(size), group=group)


def recorded() -> bytes:
    own = recorder.current()
    assert own is not None
    commgrid.trace.stop()
    return own.contents()


def two_grids(destroys: bool) -> bytes:
    """Trains on dp 2 · pp 2, of which ranks issue other numbers of calls, and evaluates on dp 4."""
    grid = commgrid.initialize(pp=2, trace=True)
    for _ in range(2 + grid.rank // 2):
        reduce(1, grid.get_group("dp"))
    for _ in range(1 + grid.rank % 2):
        reduce(2, grid.get_group("pp"))
    if destroys:
        grid.destroy()
    else:
        commgrid.shutdown()
    grid = commgrid.initialize(trace=True)
    reduce(3, grid.get_group("dp"))
    reduce(4, grid.get_group("dp"))
    found = recorded()
    commgrid.shutdown()
    return found


def worlds() -> bytes:
    """Three worlds of torch's own; rank 3 issues nothing in the second."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    grid = commgrid.initialize(trace=True)
    for world in range(3):
        if world:
            grid.destroy()
            dist.destroy_process_group()
            of_world = dist.PrefixStore(str(world), store)
            dist.init_process_group("gloo", store=of_world, rank=rank, world_size=4)
        groups = [dist.new_group([0, 1, 2]), dist.new_group([1, 2, 3] if world else [0, 1, 2, 3])]
        mine = groups[0] if rank < 3 else groups[1]
        if world == 1 and rank < 3:
            reduce(5, groups[0])
        elif world != 1:
            for _ in range(1 + world):
                if rank < 3:
                    reduce(6 + world, mine)
            if rank or not world:
                reduce(9 + world, groups[1])
    return recorded()


def own_world_first() -> bytes:
    """Rank 0 has a world of its own before that of all."""
    commgrid.trace.start()
    rank = int(os.environ["RANK"])
    if rank == 0:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        reduce(1, dist.new_group([0]))
        dist.destroy_process_group()
    dist.init_process_group("gloo")
    reduce(2, dist.new_group([0, 1]))
    found = recorded()
    dist.destroy_process_group()
    return found


def meshes() -> bytes:
    commgrid.initialize(trace=True)
    for size in range(1, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        for _ in range(size):
            reduce(size, mesh.get_group("b"))
    found = recorded()
    commgrid.shutdown()
    return found


def suspended() -> bytes:
    grid = commgrid.initialize(pp=2, trace=True)
    kept = grid.get_group("dp")
    reduce(1, kept)
    grid.suspend()
    grid.resume()
    reduce(2, kept)
    reduce(3, grid.get_group("dp"))
    found = recorded()
    commgrid.shutdown()
    return found


def check(rings: Sequence[bytes]) -> list[Trace]:
    """Assert that members say the same of each communicator; return their traces."""
    traces = {trace.rank: trace for trace in trace_files.parse(rings)}
    groups = {group for trace in traces.values() for group in trace.groups}
    for group in groups:
        said = []
        for rank in group.ranks:
            if rank in traces:
                assert group in traces[rank].groups
                own = [call for call in traces[rank].calls if call.group == group]
                calls = [call for call in own if not call.is_transfer]
                assert [call.turn for call in calls] == list(range(len(calls)))
                assert traces[rank].entered.get(group, 0) == len(calls)
                said.append([(call.operation, call.shape) for call in calls])
        assert all(each == said[0] for each in said), (group, said)
    return list(traces.values())


@pytest.mark.parametrize("destroys", [False, True])
def test_grids_one_after_another(destroys: bool) -> None:
    traces = check(
        run_on_ranks(two_grids, 4, destroys, backend=None, launcher="torchrun", timeout=40)
    )
    groups = {call.group: call.group.name for trace in traces for call in trace.calls}
    assert len(groups) == 5
    dp = [group.ranks for group, name in groups.items() if "dp" in name.split(",")]
    assert sorted(dp) == [(0, 1), (0, 1, 2, 3), (2, 3)]


def test_groups_of_torchs_own_in_worlds_one_after_another() -> None:
    traces = check(run_on_ranks(worlds, 4, timeout=40))
    assert len({call.group for trace in traces for call in trace.calls}) == 5


def test_a_rank_may_have_had_a_world_of_its_own() -> None:
    traces = check(run_on_ranks(own_world_first, 2, backend=None, launcher="torchrun", timeout=40))
    assert len({call.group for trace in traces for call in trace.calls}) == 2


def test_meshes_of_equal_names_over_the_same_ranks() -> None:
    traces = check(run_on_ranks(meshes, 4, backend=None, launcher="torchrun", timeout=40))
    groups = {call.group for trace in traces for call in trace.calls}
    assert sorted(group.ranks for group in groups) == [(0, 1)] * 3 + [(2, 3)] * 3


def test_a_resumed_grid_continues_its_counts() -> None:
    traces = check(run_on_ranks(suspended, 4, backend=None, launcher="torchrun", timeout=40))
    calls = [[c for c in trace.calls if c.operation == "all_reduce"] for trace in traces]
    assert [[call.shape for call in own] for own in calls] == [[(1,), (2,), (3,)]] * 4
    assert len({call.group for own in calls for call in own}) == 2


def survivors() -> bytes:
    """Rank 3 ends; the others have issued other numbers of calls, and go on with dp 3."""
    grid = commgrid.initialize(timeout=60, watch=True, trace=True)
    reduce(1, grid.get_group("dp"))
    meet(grid.rank, 4)
    if grid.rank == 3:
        kill_me()
    with pytest.raises((commgrid.CommGridError, RuntimeError)):
        reduce(2, grid.get_group("dp"))
    made = commgrid.rebuild(grace=1.0)
    assert made is not None
    for _ in range(2):
        reduce(70, made.get_group("dp"))
    found = recorded()
    commgrid.shutdown()
    return found


def test_a_grid_that_was_rebuilt_over_survivors() -> None:
    *rings, _ = run_killable(survivors, 4, timeout=40)
    traces = trace_files.parse(rings)
    calls = [call for trace in traces for call in trace.calls if call.shape == (70,)]
    (group,) = {call.group for call in calls}
    assert (len(calls), group.ranks) == (6, (0, 1, 2))
    assert len({trace.entered[group] for trace in traces}) == 1
    # No thread waits in the call that has failed.
    assert not any(call.waiting or call.issued is None for t in traces for call in t.calls)


def unknown() -> list[tuple[int, ...]]:
    """A group that torch's registry has no entry of, before and after it had one."""
    commgrid.initialize(trace=True)
    group = dist.new_group([0, 1])
    dist.distributed_c10d._world.pg_group_ranks.pop(group)
    group.allreduce([torch.ones(2)]).wait()
    found = trace_files.parse([recorded()])[0].calls[-1]
    return [found.group.ranks, found.shape]


def test_a_group_that_torch_does_not_know_has_no_ranks() -> None:
    assert run_on_ranks(unknown, 2, check=False) == [[(), (2,)]] * 2
