"""Leaving groups of gloo's, some of whose ranks have not connected: it ends no process."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from commgrid.planning.group_row import GroupOptions
from commgrid.rendezvous.timeouts import timeouts, use_timeouts
from commgrid.testing import run_on_ranks
from commgrid.torch_compat import ended_groups
from commgrid.torch_compat import groups as torch_groups
from tests.flags import hear, meet, tell

FOREVER = 1000.0  # seconds, for which no test may last
WAITED = 30.0  # seconds; a call that does not end lasts for a thousand
GROUPS = 8  # of two ranks one connects and the other waits for it: either is, in some of these


def made(ranks: list[int], timeout: float) -> list[dist.ProcessGroup]:
    return [
        torch_groups.create_group(
            name, name, ranks,
            backend=None, options=GroupOptions(), timeout=timeout, startup_timeout=FOREVER,
        )
        for name in (f"{ranks} {number}" for number in range(GROUPS))
    ]  # fmt: skip


def waits_in_vain() -> None:
    """Rank 0 waits for rank 1 to connect, until the timeout; then rank 1 leaves."""
    groups = made([0, 1], timeout=0.5)
    dist.barrier()
    if dist.get_rank() == 0:
        for group in groups:
            with pytest.raises(RuntimeError, match=r"[Tt]imed? ?out"):
                dist.recv(torch.ones(1), 1, group=group)
        tell("0 has waited")
        hear("1 has left")
    else:
        hear("0 has waited")
    ended_groups.abort_all(groups, set(groups))
    tell(f"{dist.get_rank()} has left")
    meet(dist.get_rank(), 2)


def test_a_rank_that_leaves_ends_no_process_that_has_waited_for_it() -> None:
    run_on_ranks(waits_in_vain, 2)


def leave_at_once() -> None:
    """All leave groups of which nobody has connected; gloo's thread may be as late as it likes."""
    groups = made([0, 1, 2, 3], timeout=FOREVER)
    dist.barrier()
    use_timeouts(replace(timeouts(), moment=1e-6))
    if dist.get_rank() == 3:
        torch_groups.destroy_all([groups.pop()])
    ended_groups.stop_waiting(groups)
    tell(f"{dist.get_rank()} has left")
    meet(dist.get_rank(), 4)


def test_ranks_that_leave_while_others_connect() -> None:
    run_on_ranks(leave_at_once, 4)


def wakes() -> list[bool]:
    """Wake groups while a message goes over each; return which calls have ended then."""
    rank, groups = dist.get_rank(), made([0, 1], timeout=FOREVER)
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    large = torch.ones(20_000_000)
    under_way = [dist.broadcast(large, 0, group, async_op=True) for group in groups]
    if rank == 0:
        ended_groups.wake(groups, set(groups))
    until = time.monotonic() + WAITED
    while not all(work.is_completed() for work in under_way) and time.monotonic() < until:
        time.sleep(0.1)  # a poll
    ended = [work.is_completed() for work in under_way]
    meet(rank, 2)
    return ended


def test_a_wake_ends_also_the_call_whose_message_is_under_way() -> None:
    assert run_on_ranks(wakes, 2, check=False) == [[True] * GROUPS] * 2
