"""Leaving groups of gloo's, some of whose ranks have not connected: it ends no process."""

from __future__ import annotations

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
