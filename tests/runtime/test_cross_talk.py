"""Other groups of the process, torch's own meshes, kept handles: nobody meets the wrong group."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import commgrid
from commgrid.testing import run_on_ranks
from tests.runtime.test_grid import EMBEDDING, check_sums


def alone_on_rank_0() -> list[Any]:
    """A member-only group that counts on one rank and not on the others."""
    if dist.get_rank() == 0:
        return [dist.new_group([0], use_local_synchronization=True)]
    return []


def by_half_the_ranks() -> list[Any]:
    if dist.get_rank() < 4:
        return [dist.new_group([0, 1, 2, 3], use_local_synchronization=True)]
    return []


def by_every_rank() -> list[Any]:
    return [dist.new_group([0, 1]), dist.new_group(list(range(8)))]


def torchs_own_mesh() -> list[Any]:
    return [init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))]


BEFORE = [alone_on_rank_0, by_half_the_ranks, by_every_rank, torchs_own_mesh]


def can_torch_make_more() -> bool:
    """Whether torch itself still makes groups: it names them by how many this process has made,
    and from 2.14 on waits for ever where ranks have made different numbers of them."""
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, dist.distributed_c10d.get_pg_count())
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    return version < (2, 14) or len(set(counts)) == 1


def among_others(before: Callable[[], list[Any]]) -> None:
    kept = before()
    torch_goes_on = can_torch_make_more()
    assert torch_goes_on or before in (alone_on_rank_0, by_half_the_ranks)
    grid = commgrid.initialize(tp=2, pp=2, ep=2, groups=EMBEDDING)
    check_sums(grid)
    grid.check()
    assert can_torch_make_more() == torch_goes_on  # ours do not count
    kept += torchs_own_mesh() if torch_goes_on else []
    second = commgrid.initialize(tp=4, name="second")
    for _ in range(3):
        check_sums(grid)
        check_sums(second)
    # torch's own groups still work beside ours, as do groups made afterwards on every rank.
    if torch_goes_on:
        kept.append(dist.new_group(list(range(8))))
    for group in (dist.group.WORLD, *kept[-1:]):
        if isinstance(group, dist.ProcessGroup):
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == group.size()


@pytest.mark.full("by_every_rank", "by_half_the_ranks")
@pytest.mark.parametrize("before", BEFORE)
def test_beside_other_groups(before: Callable[[], list[Any]]) -> None:
    run_on_ranks(among_others, 8, before)


def reborn() -> None:
    old = commgrid.initialize(tp=2, pp=2)
    handles = [c.group for c in old.communicators]
    commgrid.destroy()
    for cycle in range(3):
        grid = commgrid.initialize(tp=4 if cycle % 2 else 2, pp=2)
        check_sums(grid)
        handles += [c.group for c in grid.communicators]
        commgrid.destroy()
    assert len({id(handle) for handle in handles}) == len(handles)


def test_a_grid_of_the_same_name_while_old_handles_are_kept() -> None:
    run_on_ranks(reborn, 8)


def test_the_same_after_commgrid_started_torch_distributed() -> None:
    def restarted() -> None:
        kept = []
        for _ in range(3):
            grid = commgrid.initialize(tp=2)
            kept.append(grid.get_group("dp"))
            check_sums(grid)
            commgrid.shutdown()

    run_on_ranks(restarted, 4, backend=None, launcher="torchrun")


def test_names_carry_grid_incarnation_group_and_ranks() -> None:
    def names() -> list[str]:
        made = []
        for _ in range(2):
            grid = commgrid.initialize(tp=2)
            made += [c.group.group_name for c in grid.communicators]
            commgrid.destroy()
        return made

    for rank, made in enumerate(run_on_ranks(names, 4)):
        assert len(set(made)) == len(made) == 2 * 13
        assert made[0].startswith("commgrid/default/")
        assert made[0].endswith(f"/tp/{rank // 2 * 2}+2x1")
