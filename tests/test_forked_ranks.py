"""Ranks are forked: what their parent has left behind is none of their business."""

import gc

import torch
import torch.distributed as dist

from tests.ranks import run_on_ranks


def collects() -> bool:
    return gc.collect() >= 0


def parent_with_garbage() -> list[bool]:
    """Is itself a forked rank, so that nobody else has its process group."""
    gc.disable()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.new_group([0])
    dist.all_reduce(torch.ones(1), group=group)
    cycle = [group]
    cycle.append(cycle)
    dist.destroy_process_group()
    del group, cycle
    return run_on_ranks(collects, 2, init=None, timeout=300)


def test_a_rank_does_not_collect_its_parents_process_groups() -> None:
    """Seen as a rank that hung at whatever point its garbage collector ran: it waited for the
    threads of a group that a doctest had made in the parent."""
    assert run_on_ranks(parent_with_garbage, 1, init=None) == [[True, True]]
