"""Programs with a bug: the rank at fault is named while the job hangs, and when it was stopped."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

import commgrid
from tests.call_analysis.stories.job import Here, wrong

LARGE = 1 << 20


def sums(group: Any, count: int = 2, dtype: torch.dtype = torch.float32) -> None:
    dist.all_reduce(torch.ones(count, dtype=dtype), group=group)


def steps(grid: Any, count: int = 3) -> None:
    """Steps of all ranks before something goes wrong."""
    for _ in range(count):
        for name in ("tp", "dp", "dp_tp"):
            sums(grid.get_group(name))


@wrong(3, circle=True, verify=True, untraced=True)
def test_a_call_left_out(here: Here) -> None:
    grid = here.grid(tp=2)
    steps(grid)
    here.hangs()
    if here.rank != 3:
        sums(grid.get_group("tp"))
    sums(grid.get_group("dp_tp"))


@wrong(1, short=True)
def test_a_call_left_out_in_the_second_grid(here: Here) -> None:
    """In the first grid of that name all was well, with more calls and other members."""
    grid = here.grid(dp=2, tp=2)
    steps(grid, 5)
    commgrid.destroy()
    grid = here.grid(dp=4)
    sums(grid.get_group("dp"))
    here.hangs()
    if here.rank != 1:
        sums(grid.get_group("dp"))
    else:
        time.sleep(1000)


@wrong(0, 1, verify=True, size=2, untraced=True, short=True)
def test_two_groups_in_opposite_order(here: Here) -> None:
    grid = here.grid(dp=2)
    other = dist.new_group([0, 1])
    groups = [grid.get_group("dp"), other]
    sums(other)
    here.hangs()
    for group in groups if here.rank else groups[::-1]:
        sums(group)


@wrong(2, live=True, verify=True, short=True)
def test_another_root(here: Here) -> None:
    group = here.grid(dp=4).get_group("dp")
    for root in range(3):
        dist.broadcast(torch.ones(4), root, group=group)
    here.hangs()
    dist.broadcast(torch.ones(4), 2 if here.rank == 2 else 1, group=group)
    dist.barrier(group=group)


@wrong(1, live=True, verify=True)
def test_another_dtype_of_as_many_bytes(here: Here) -> None:
    """gloo takes the bytes as they are: nothing hangs, and the sums are wrong."""
    group = here.grid(dp=4).get_group("dp")
    sums(group, 4)
    if here.rank == 1:
        dist.all_reduce(torch.ones(4, dtype=torch.int32), group=group)
    else:
        sums(group, 4)


@wrong(3, live=True, verify=True)
def test_another_reduction(here: Here) -> None:
    group = here.grid(dp=4).get_group("dp")
    sums(group, 4)
    op = dist.ReduceOp.MAX if here.rank == 3 else dist.ReduceOp.SUM
    dist.all_reduce(torch.ones(4), op, group=group)


@wrong(2, live=True)
def test_another_size(here: Here) -> None:
    """gloo may end the process that gets more than it expects."""
    group = here.grid(dp=4).get_group("dp")
    sums(group)
    here.hangs()
    sums(group, 5 if here.rank == 2 else 4)


@wrong(1, live=True, untraced=True)
def test_another_operation(here: Here) -> None:
    group = here.grid(dp=4).get_group("dp")
    sums(group)
    here.hangs()
    if here.rank == 1:
        dist.broadcast(torch.ones(2), 1, group=group)
    else:
        sums(group)
    dist.barrier(group=group)


@wrong(0, 1, size=2, short=True)
def test_a_wrong_tag(here: Here) -> None:
    """Rank 1 waits for tag 2, and rank 0 for rank 1 after it has sent tag 1."""
    group = here.grid(dp=2).get_group("dp")
    works = [dist.isend(torch.ones(2), 1, group, 1)] if here.rank == 0 else []
    here.hangs()
    if here.rank == 1:
        dist.recv(torch.ones(2), 0, group, 2)
    dist.barrier(group=group)
    for work in works:
        work.wait()


@wrong(0, 1, verify=True)
def test_a_message_that_no_rank_receives(here: Here) -> None:
    group = here.grid(dp=4).get_group("dp")
    dist.barrier(group=group)
    here.hangs()
    if here.rank == 0:
        dist.send(torch.ones(LARGE), 1, group)
    dist.barrier(group=group)


@wrong(0, 1, verify=True, size=2)
def test_sends_first_on_both(here: Here) -> None:
    group = here.grid(dp=2).get_group("dp")
    dist.barrier(group=group)
    here.hangs()
    x = torch.ones(LARGE)
    dist.send(x, 1 - here.rank, group)
    dist.recv(x, 1 - here.rank, group)


@wrong(1, 2, 3)
def test_a_stage_that_sends_past_the_next(here: Here) -> None:
    group = here.grid(pp=4).get_group("pp")
    dist.barrier(group=group)
    here.hangs()
    x = torch.ones(LARGE)
    if here.rank:
        dist.recv(x, here.rank - 1, group)
    if here.rank < 3:
        dist.send(x, 3 if here.rank == 1 else here.rank + 1, group)


@wrong(0, 1, size=2, untraced=True)
def test_one_microbatch_fewer(here: Here) -> None:
    """Rank 0 sends four, rank 1 waits for a fifth; rank 0 waits in the step's barrier."""
    group = here.grid(pp=2).get_group("pp")
    here.hangs()
    for _ in range(4 + here.rank):
        if here.rank == 0:
            dist.send(torch.ones(2), 1, group)
        else:
            dist.recv(torch.ones(2), 0, group)
    dist.barrier(group=group)


@wrong(0, 1, size=2, short=True)
def test_all_threads_wait_for_each_other(here: Here) -> None:
    """Two threads a rank, and four groups: none of the four calls has its partner."""
    here.grid(dp=2)
    groups = [dist.new_group([0, 1]) for _ in range(4)]
    mine = groups[2 * here.rank : 2 * here.rank + 2]
    thread = threading.Thread(target=sums, args=(mine[0],), daemon=True)
    thread.start()
    here.hangs()
    sums(mine[1])
    thread.join()


@wrong(2, untraced=True, short=True)
def test_a_rank_that_is_stuck_in_its_loader(here: Here) -> None:
    group = here.grid(dp=4).get_group("dp")
    sums(group)
    here.hangs()
    if here.rank == 2:
        load_batch()
    sums(group)


def load_batch() -> None:
    time.sleep(1000)


@wrong(0, 2)
def test_an_all_to_all_in_which_one_pair_disagrees(here: Here) -> None:
    """Rank 0 gives rank 2 three values, which expects two of it."""
    group = here.grid(dp=4).get_group("dp")
    sums(group)
    given, taken = [2] * 4, [2] * 4
    if here.rank == 0:
        given[2] = 3
    here.hangs()
    x, y = torch.ones(sum(given)), torch.empty(sum(taken))
    dist.all_to_all_single(y, x, taken, given, group=group)
    dist.barrier(group=group)


@wrong(1, short=True)
def test_a_raise_on_one_rank(here: Here) -> None:
    grid = here.grid(tp=2)
    steps(grid)
    if here.rank == 1:
        raise ValueError("a broken sample")
    here.hangs()
    sums(grid.get_group("dp_tp"))


@wrong(2, circle=True, verify=True)
def test_a_raise_that_is_caught_past_a_call(here: Here) -> None:
    grid = here.grid(tp=2)
    steps(grid)
    here.hangs()
    try:
        if here.rank == 2:
            raise ValueError("a broken sample")
        sums(grid.get_group("dp"))
    except ValueError:
        pass
    sums(grid.get_group("dp_tp"))


@wrong(3)
def test_a_loop_that_ends_earlier(here: Here) -> None:
    """Rank 3 has fewer batches, and its program ends."""
    grid = here.grid(dp=4)
    for step in range(4):
        if here.rank == 3 and step == 3:
            sys.exit(0)
        if step == 3:
            here.hangs()
        sums(grid.get_group("dp"))


@wrong(1, circle=True, short=True)
def test_the_group_of_another_grid(here: Here) -> None:
    """Both grids have a dp group of all ranks: rank 1 takes the actor's for the critic's."""
    actor, critic = here.grid(name="actor", dp=4), here.grid(name="critic", dp=4)
    for grid in (actor, critic):
        sums(grid.get_group("dp"))
    here.hangs()
    sums((actor if here.rank == 1 else critic).get_group("dp"))


@wrong(3, circle=True)
def test_the_group_of_another_axis(here: Here) -> None:
    grid = here.grid(tp=2)
    steps(grid)
    here.hangs()
    sums(grid.get_group("dp" if here.rank == 3 else "tp"))
    dist.barrier(group=grid.get_group("dp_tp"))


@wrong(2)
def test_a_checkpoint_thread_that_died(here: Here) -> None:
    """Its rank trains on until the others wait for it at the end of their saves."""
    grid = here.grid(dp=4)
    saving = dist.new_group()
    thread = threading.Thread(target=dist.barrier, args=(saving,), daemon=True)
    if here.rank != 2:
        thread.start()
    for _ in range(3):
        sums(grid.get_group("dp"))
    here.hangs()
    if here.rank == 2:
        time.sleep(1000)
    thread.join()
