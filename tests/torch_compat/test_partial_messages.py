"""A rank ends while it sends; gloo never ends a wait for a message of which a part has arrived."""

import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid.collectives.asynchronous import Pending
from commgrid.failures import named_failures
from commgrid.torch_compat.ended_groups import wait_unless_broken
from commgrid.torch_compat.world import world_store
from tests.flags import hear, tell
from tests.killing import KILLED, run_killable
from tests.waiting import comes, stop, until_waits

LARGE = 100_000_000  # bytes: more than sockets hold
HELPER, SENDER, RECEIVER = range(3)


def help_them() -> None:
    """Stop the receiver when it waits, kill the sender when its message fills the sockets."""
    pids = {}
    for rank in (RECEIVER, SENDER):
        until_waits(f"rank {rank}")
        pids[rank] = int(world_store().get(f"comes: rank {rank}"))
        if rank == RECEIVER:
            stop(pids[rank])
            tell("the receiver is stopped")
    os.kill(pids[SENDER], signal.SIGKILL)
    os.kill(pids[RECEIVER], signal.SIGCONT)


def gathers(waits: bool) -> str:
    """Return the receiver's error.

    Args:
        waits: whether it waits for the call; else it leaves with the call under way.
    """
    rank = int(os.environ["RANK"])
    grid = commgrid.initialize(dp=2, ranks=[SENDER, RECEIVER], timeout=1000.0, watch=True)
    if grid is None:
        help_them()
        hear("the receiver is done")
        return ""
    group = grid.get_group("dp")
    if rank == SENDER:
        hear("the receiver is stopped")
    try:
        with named_failures():
            tensor = torch.ones(LARGE, dtype=torch.uint8)
            work = dist.broadcast(tensor, SENDER, group, async_op=True)
            under_way = Pending(work, lambda: tensor, group)
            comes(f"rank {rank}")
            if rank == SENDER or waits:
                under_way.wait()
            assert grid.watch is not None
            while grid.watch.read(10.0) is None:
                pass
    except commgrid.PeerFailedError as error:
        said = str(error)
    del work, under_way, group, grid  # gloo's threads are not waited for
    tell("the receiver is done")
    return said


@pytest.mark.full("False")
@pytest.mark.parametrize("waits", [True, False])
def test_a_rank_with_a_part_of_a_message_learns_who_has_ended(waits: bool) -> None:
    found = run_killable(gathers, 3, waits)
    assert found[SENDER] == KILLED
    assert found[RECEIVER].startswith(f"rank {SENDER} is gone: its process has ended (rank ")


class Late:
    """The handle of a collective that ends just as a look at it ends in vain.

    Args:
        error: its own.
    """

    def __init__(self, error: RuntimeError | None) -> None:
        self.error, self.looks = error, 0

    def wait(self, *limit: timedelta) -> None:
        if limit:
            self.looks += 1
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        return self.looks == 2


@pytest.mark.parametrize("error", [None, RuntimeError("its own")])
def test_a_collective_that_ends_after_a_look_is_no_failure(error: RuntimeError | None) -> None:
    grid = commgrid.initialize()
    work: Any = Late(error)
    try:
        if error is None:
            wait_unless_broken(work, grid.get_group("dp"))
        else:
            with pytest.raises(RuntimeError, match="its own"):
                wait_unless_broken(work, grid.get_group("dp"))
        assert work.looks == 2
    finally:
        commgrid.shutdown()
