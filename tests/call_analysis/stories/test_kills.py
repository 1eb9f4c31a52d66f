"""Ranks killed in each phase of a job with two grids in turn: the first one is named."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist

import commgrid
from commgrid import PeerFailedError, PeerTimeoutError
from commgrid.failures import named_failures
from tests.call_analysis.stories.job import Here, wrong
from tests.waiting import state, until


def steps(here: Here, grid: Any, victim: int | None, name: str = "dp") -> None:
    """Five steps; in the fourth the victim is killed, on its way to the others."""
    for step in range(5):
        if step == 3 and here.rank == victim:
            here.die()
        dist.all_reduce(torch.ones(4), group=grid.get_group(name))
        dist.broadcast(torch.ones(2), grid.get_ranks(name)[-1], group=grid.get_group(name))


@wrong(2)
def test_in_the_first_grid(here: Here) -> None:
    grid = here.grid(dp=2, pp=2)
    steps(here, grid, 2)
    dist.barrier(group=grid.get_group("pp_dp"))
    commgrid.destroy()
    steps(here, here.grid(dp=4), None)


@wrong(3, short=True)
def test_in_the_second_grid(here: Here) -> None:
    """dp has other members than in the first."""
    grid = here.grid(dp=2, pp=2)
    steps(here, grid, None)
    commgrid.destroy()
    steps(here, here.grid(dp=4), 3)


@wrong(1, short=True)
def test_between_the_grids(here: Here) -> None:
    """The others wait for it in `initialize`, which records no call."""
    grid = here.grid(dp=4)
    steps(here, grid, None)
    here.meet("first")
    commgrid.destroy()
    if here.rank == 1:
        here.die()
    grid = here.grid(dp=2, pp=2)
    steps(here, grid, None)


@wrong(0)
def test_back_in_a_third_grid(here: Here) -> None:
    """Of the same shape as the first."""
    for shape in ({"dp": 4}, {"dp": 2, "tp": 2}):
        grid = here.grid(**shape)
        steps(here, grid, None)
        here.meet("steps")
        commgrid.destroy()
    steps(here, here.grid(dp=4), 0)


@wrong(1)
def test_in_one_of_two_grids_that_live(here: Here) -> None:
    actor, critic = here.grid(name="actor", tp=2, dp=2), here.grid(name="critic", dp=4)
    steps(here, actor, None)
    steps(here, critic, None)
    steps(here, actor, 1, "tp")
    steps(here, critic, None)


@wrong(2)
def test_while_the_others_are_in_another_group(here: Here) -> None:
    """Ranks 0 and 1 do not miss it until they come to the group of all."""
    grid = here.grid(tp=2)
    steps(here, grid, 2, "tp")
    dist.barrier(group=grid.get_group("dp_tp"))


@wrong(3, short=True)
def test_within_a_call(here: Here) -> None:
    """It waits for rank 0, which is late, when it is killed."""
    grid = here.grid(dp=4)
    steps(here, grid, None)
    if here.rank == 3:
        threading.Timer(0.3, here.die).start()
    if here.rank == 0:
        until_gone(here, 3)
    steps(here, grid, None)


def until_gone(here: Here, rank: int) -> None:
    """Wait until a rank's process has ended: it is a zombie of the test's."""
    pid = int(here.path("pid", rank).read_text())
    until(lambda: state(pid, pid) in "ZX", f"rank {rank} ends")


@wrong(1, 2, killed=(1,), short=True)
def test_in_a_rebuild(here: Here) -> None:
    """Rank 1 is killed in a step; rank 2 on its way to the rebuilt grid."""
    grid = here.grid(dp=4, watch=True)
    try:
        with named_failures(grid):
            steps(here, grid, 1)
    except (PeerFailedError, PeerTimeoutError):
        if here.rank == 2:
            here.die()
    grid = commgrid.rebuild(grace=3.0)
    steps(here, grid, None)


@wrong(1, 2, killed=(1,))
def test_after_a_rebuild(here: Here) -> None:
    """Rank 1 is killed in the first grid, rank 2 in the one of three ranks."""
    grid = here.grid(dp=4, watch=True)
    try:
        with named_failures(grid):
            steps(here, grid, 1)
    except (PeerFailedError, PeerTimeoutError):
        pass
    grid = commgrid.rebuild(grace=3.0)
    steps(here, grid, 2)


@wrong(2)
def test_between_two_messages(here: Here) -> None:
    """A stage of a pipeline; its neighbours wait for its next message, and others for theirs."""
    group = here.grid(pp=4).get_group("pp")
    x = torch.ones(1 << 18)
    for micro in range(5):
        if here.rank == 2 and micro == 3:
            here.die()
        if here.rank:
            dist.recv(x, here.rank - 1, group)
        if here.rank < 3:
            dist.send(x, here.rank + 1, group)


@wrong(0, short=True)
def test_before_all_calls(here: Here) -> None:
    grid = here.grid(dp=4)
    if here.rank == 0:
        here.die()
    steps(here, grid, None)
