"""A rank that has ended before a run is named at once, also where it serves the store."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch

import commgrid
from commgrid.launching.local_ranks import Ranks
from commgrid.testing import run_on_ranks
from commgrid.transfer import Transfer
from tests.flags import hear, meet, tell
from tests.killing import kill_me
from tests.transfer.programs import said
from tests.waiting import comes, until_waits

FOREVER = 1000.0
"""Seconds to wait for others, longer than the test: an error came without it."""
ENDS = {"killed": kill_me, "exits": lambda: os._exit(0), "returns": sys.exit}


def run_without(how: str, victim: int, moved: bool, waits: bool) -> Any:
    """The victim ends before the first run or the second, while the others wait or before."""
    grid = commgrid.initialize(dp=4, timeout=FOREVER)
    source, target = {"w": torch.ones(4)}, {"w": torch.zeros(4)}
    transfer = Transfer(source, target, source_grid=grid, target_grid=grid)
    if moved:
        transfer.run()
    others = [f"rank {rank}" for rank in range(4) if rank != victim]
    if grid.rank == victim:
        (until_waits if waits else hear)(*others)
        ENDS[how]()
    (comes if waits else tell)(f"rank {grid.rank}")
    return said(transfer.run), target["w"].tolist(), said(transfer.run)


QUICK = ("returns", 2, False, True)
CASES = [
    pytest.param(
        how, victim, moved, waits, id=f"{how} {victim} {moved} {waits}",
        marks=[] if (how, victim, moved, waits) == QUICK else pytest.mark.full,
    )
    for how in ENDS for victim in (0, 2) for moved in (False, True) for waits in (True, False)
]  # fmt: skip


@pytest.mark.parametrize(("how", "victim", "moved", "waits"), CASES)
def test_a_rank_that_has_ended_is_named(how: str, victim: int, moved: bool, waits: bool) -> None:
    """Rank 0 serves the store."""
    ranks = Ranks(
        run_without, 4, how, victim, moved, waits, backend=None, launcher="torchrun", killable=True
    )
    with ranks:
        ends = ranks.wait()
    for rank in {*range(4)} - {victim}:
        assert ends[rank].returned, str(ends[rank])
        told, held, again = ends[rank].value
        assert told.startswith(f"PeerFailedError: rank {victim} "), told
        assert "(in transfer 'default'); nothing was moved" in told, told
        assert held == [float(moved)] * 4
        assert again.startswith("TransferError: an earlier run has ended: "), again


def closed_on_one() -> Any:
    """Rank 1 closes what the others run again, and all then make another one."""
    grid = commgrid.initialize(dp=3, timeout=FOREVER)
    source, target = {"w": torch.ones(4)}, {"w": torch.zeros(4)}

    def made() -> Transfer:
        return Transfer(source, target, source_grid=grid, target_grid=grid)

    first, told = made(), ""
    first.run()
    if grid.rank == 1:
        first.close()
    else:
        told = said(first.run)
    again = made()
    source["w"].fill_(2.0)
    again.run()
    again.close()
    meet(grid.rank, 3)
    commgrid.shutdown()
    return told, target["w"].tolist()


def test_a_rank_that_has_closed_the_transfer_is_named() -> None:
    why = (
        "PeerFailedError: rank 1 has closed the transfer, or its program has ended "
        "(in transfer 'default'); nothing was moved; make a new Transfer"
    )
    for rank, (told, held) in enumerate(
        run_on_ranks(closed_on_one, 3, backend=None, launcher="torchrun")
    ):
        assert told == ("" if rank == 1 else why)
        assert held == [2.0] * 4


def closed_in_turn() -> list[str]:
    """A correct program: ranks close at different times, each after as many runs."""
    grid = commgrid.initialize(dp=3, timeout=FOREVER)
    source, target = {"w": torch.ones(4)}, {"w": torch.zeros(4)}
    transfer = Transfer(source, target, source_grid=grid, target_grid=grid)
    found = [said(transfer.run) for _ in range(20)]
    transfer.close()
    commgrid.shutdown()
    return found


def test_ranks_may_close_a_transfer_at_different_times() -> None:
    found = run_on_ranks(closed_in_turn, 3, backend=None, launcher="torchrun")
    assert found == [[""] * 20] * 3
