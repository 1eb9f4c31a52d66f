"""Communicators of equal names: grids one after another, rebuilt ones, groups of torch."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import commgrid
from commgrid import PeerFailedError, PeerTimeoutError
from commgrid.collectives import all_gather, all_reduce
from commgrid.failures import named_failures
from tests.call_analysis.stories.job import Here, correct


def total(group: Any, x: float = 1.0) -> float:
    y = torch.tensor([x])
    dist.all_reduce(y, group=group)
    return float(y)


def passes_on(grid: Any, x: Tensor) -> None:
    """One message from each stage to the next."""
    ranks = grid.get_ranks("pp")
    at = ranks.index(grid.rank)
    if at:
        dist.recv(x, ranks[at - 1], grid.get_group("pp"))
    if at + 1 < len(ranks):
        dist.send(x, ranks[at + 1], grid.get_group("pp"))


@correct(untraced=True, short=True)
def test_training_and_evaluation_on_other_grids(here: Here) -> None:
    """dp 2 with pp 2, then dp 4; the last rank is a root that the first dp has not."""
    grid = here.grid(dp=2, pp=2)
    for _ in range(3):
        passes_on(grid, torch.ones(4))
        assert total(grid.get_group("dp")) == 2
    here.now()
    commgrid.destroy()
    grid = here.grid(dp=4)
    for root in (3, 0, 2):
        dist.broadcast(torch.ones(8), root, group=grid.get_group("dp"))
    assert total(grid.get_group("dp")) == 4
    here.now()


@correct()
def test_training_and_evaluation_in_turn(here: Here) -> None:
    """Four times, other numbers of calls each time."""
    for turn in range(2):
        grid = here.grid(tp=2, dp=2)
        for _ in range(turn + 2):
            assert total(grid.get_group("tp")) == 2
            dist.broadcast(torch.ones(3), grid.get_ranks("dp")[1], group=grid.get_group("dp"))
        commgrid.destroy()
        grid = here.grid(pp=2, dp=2)
        dist.all_gather_into_tensor(torch.empty(4), torch.ones(2), group=grid.get_group("dp"))
        passes_on(grid, torch.ones(4, dtype=torch.float64))
        here.now()
        commgrid.destroy()
    here.grid(dp=4)


@correct()
def test_a_grid_of_a_phase(here: Here) -> None:
    """Actor and critic: two grids of other shapes that live side by side, used by turns."""
    actor = here.grid(name="actor", tp=2, dp=2)
    critic = here.grid(name="critic", dp=4)
    for step in range(3):
        assert total(actor.get_group("tp")) == 2
        dist.broadcast(torch.ones(step + 1), step, group=critic.get_group("dp"))
        assert total(actor.get_group("dp")) == 2
        assert total(critic.get_group("dp")) == 4
    here.now(ask=0)


@correct(short=True)
def test_grids_of_parts_of_the_job(here: Here) -> None:
    """Two ranks generate, two train; then they swap."""
    for parts in (((0, 1), (2, 3)), ((1, 2), (0, 3))):
        for name, ranks in zip(("generate", "train"), parts, strict=True):
            grid = here.grid(name=name, ranks=ranks, dp=2)
            if grid is not None:
                for _ in range(2 if name == "train" else 5):
                    assert total(grid.get_group("dp")) == 2
                dist.broadcast(torch.ones(2), ranks[1], group=grid.get_group("dp"))
        here.now()
        for name in ("generate", "train"):
            if commgrid.is_initialized(name):
                commgrid.destroy(name)
    here.grid(dp=4)


@correct(size=3, killed=(1,), short=True, order=False)
def test_a_rebuild_over_survivors(here: Here) -> None:
    """Rank 1 is killed; dp of three ranks becomes dp of two, with other calls."""
    grid = here.grid(dp=3, watch=True)
    try:
        with named_failures(grid):
            for step in range(20):
                dist.broadcast(torch.ones(4), 2, group=grid.get_group("dp"))
                if here.rank == 1 and step == 2:
                    here.die()
                total(grid.get_group("dp"))
    except (PeerFailedError, PeerTimeoutError):
        pass
    grid = commgrid.rebuild(grace=3.0)
    for _ in range(4):
        assert total(grid.get_group("dp")) == 2
    dist.broadcast(torch.ones(9), 2, group=grid.get_group("dp"))
    here.meet("rebuilt", (0, 2))
    here.now(ranks=(0, 2))


@correct(size=3, open=True)
def test_a_smaller_grid_by_choice(here: Here) -> None:
    """All are alive, and two continue; the third waits for a place, and a dump has none of it."""
    grid = here.grid(dp=3)
    dist.broadcast(torch.ones(4), 2, group=grid.get_group("dp"))
    assert total(grid.get_group("dp")) == 3
    grid = commgrid.rebuild(ranks=[0, 2])
    if grid is not None:
        for _ in range(4):
            assert total(grid.get_group("dp")) == 2
        dist.broadcast(torch.ones(5), 2, group=grid.get_group("dp"))
        here.now(ranks=(0, 2))
        commgrid.shutdown()  # with which rank 1 returns


@correct()
def test_groups_suspended_and_resumed(here: Here) -> None:
    grid = here.grid(tp=2)
    for name in ("tp", "dp", "dp_tp"):
        total(grid.get_group(name))
    grid.suspend(["tp", "dp_tp"])
    assert total(grid.get_group("dp")) == 2
    here.now()
    grid.resume()
    for name in ("dp_tp", "tp", "tp"):
        total(grid.get_group(name))
    if here.rank < 2:
        total(grid.get_group("tp"))
    here.now(ask=3)


@correct(order=False, short=True, untraced=True)
def test_new_groups_after_a_second_start_of_torch(here: Here) -> None:
    """torch counts its groups from the beginning again."""
    commgrid.join()
    if "COMMGRID_TRACE" in os.environ:
        commgrid.trace.start()
    pair = dist.new_group([0, 1])
    if here.rank < 2:
        assert total(pair) == 2
    here.meet("first")
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", rank=here.rank, world_size=4,
        store=dist.FileStore(str(here.folder / "store"), 4),
    )  # fmt: skip
    pair = dist.new_group([2, 3])
    if here.rank >= 2:
        dist.broadcast(torch.ones(4), 3, group=pair)
        dist.broadcast(torch.ones(4), 2, group=pair)
    three = dist.new_group([0, 1, 3])
    if here.rank != 2:
        assert total(three) == 3
    here.grid(dp=2, tp=2)
    here.now()


@correct(order=False, untraced=True)
def test_grids_in_worlds_one_after_another(here: Here) -> None:
    """Grids and groups of torch have the names of those in the earlier world."""
    for world, size in enumerate((2, 4, 2)):
        store = dist.FileStore(str(here.folder / f"store{world}"), 4)
        dist.init_process_group("gloo", rank=here.rank, world_size=4, store=store)
        grid = here.grid(tp=size)
        for _ in range(1 + (here.rank // size + world) % 2):
            dist.broadcast(torch.ones(world + 1), grid.get_ranks("tp")[0], grid.get_group("tp"))
        ranks = [[0, 1], [1, 2, 3], [0, 1, 3]][world]
        group = dist.new_group(ranks)
        if here.rank in ranks:
            assert total(group) == len(ranks)
            dist.barrier(group) if world == 1 else total(group)
        here.now()
        commgrid.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()
    here.grid(dp=4)


@correct()
def test_groups_made_by_some_ranks_alone(here: Here) -> None:
    """With `use_local_synchronization` each rank counts its own groups."""
    grid = here.grid(dp=4)
    sides = [0, 1] if here.rank < 2 else [2, 3]
    own = dist.new_group(sides, use_local_synchronization=True)
    for _ in range(1 + sides[0]):
        assert total(own) == 2
    ends = dist.new_group([0, 3], use_local_synchronization=True) if here.rank in (0, 3) else None
    if ends is not None:
        dist.broadcast(torch.ones(2), 3, group=ends)
    assert total(grid.get_group("dp")) == 4
    here.now()


@correct(short=True)
def test_two_meshes_with_equal_dims_over_the_same_ranks(here: Here) -> None:
    here.grid(dp=4)
    first = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    second = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for step in range(3):
        assert total(first.get_group("tp")) == 2
        dist.all_gather_into_tensor(torch.empty(6), torch.ones(3), group=second.get_group("tp"))
        if step == 1:
            assert total(second.get_group("dp")) == 2
    total(first.get_group("dp"))
    here.now()


@correct()
def test_two_meshes_with_equal_dims_and_other_sizes(here: Here) -> None:
    here.grid(dp=4)
    first = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert total(first.get_group("dp")) == 2
    second = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    assert total(second.get_group("dp")) == 4
    dist.broadcast(torch.ones(2), 3, group=second.get_group("dp"))
    assert total(first.get_group("dp")) == 2
    here.now()


@correct(untraced=True)
def test_groups_that_are_made_and_destroyed(here: Here) -> None:
    """As a library does around each of its phases; torch may give a number again."""
    grid = here.grid(dp=4)
    for turn in range(4):
        ranks = [[0, 1], [2, 3], [0, 1, 2], [1, 2, 3]][turn]
        made = dist.new_group(ranks)
        if here.rank in ranks:
            for _ in range(turn + 1):
                assert total(made) == len(ranks)
            dist.broadcast(torch.ones(turn + 1), ranks[-1], group=made)
        dist.barrier(group=grid.get_group("dp"))
        if here.rank in ranks:
            dist.destroy_process_group(made)
    here.now()


@correct(size=2)
def test_groups_of_one_rank(here: Here) -> None:
    grid = here.grid(dp=2)
    for _ in range(3 if here.rank else 1):
        all_reduce(torch.ones(2), grid.get_group("tp"))
        all_gather(torch.ones(2, 2), "cp", dim=0)
    assert total(grid.get_group("dp")) == 2
    here.now()


@correct()
def test_loops_over_a_partition(here: Here) -> None:
    """`new_subgroups`: each rank has one of them, and uses it as often as it likes."""
    grid = here.grid(dp=4)
    own, groups = dist.new_subgroups(2)
    assert len(groups) == 2
    for _ in range(1 + 2 * (here.rank // 2)):
        assert total(own) == 2
    for each in groups:
        if here.rank in dist.get_process_group_ranks(each):
            dist.barrier(each)
    assert total(grid.get_group("dp")) == 4
    here.now()
