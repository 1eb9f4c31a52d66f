"""A rank that is killed between two runs of a transfer is named at once, on gloo too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid.transfer import Transfer
from tests.killing import KILLED, kill_me, run_killable
from tests.transfer.programs import said

FOREVER = 1000.0
"""Seconds to wait for others, longer than the test: an error came without it."""
RANKS, SERVES = 4, 0


def runs(victim: int) -> dict[str, Any]:
    grid = commgrid.initialize(tp=2)
    source = {"w": torch.full((4,), 1.0)}
    target = {"w": torch.zeros(4)}
    transfer = Transfer(source, target, source_grid=grid, target_grid=grid, timeout=FOREVER)
    transfer.run()
    dist.barrier()
    if grid.rank == victim:
        kill_me()
    source["w"].fill_(2.0)
    found = {"told": said(transfer.run), "again": said(transfer.run)}
    return {**found, "holds": target["w"][0].item()}


@pytest.mark.parametrize("victim", [SERVES, pytest.param(2, marks=pytest.mark.full)])
def test_it_is_named_on_all_others(victim: int) -> None:
    found = run_killable(runs, RANKS, victim)
    assert found.pop(victim) is KILLED
    for each in found:
        assert each["told"].startswith("PeerFailedError: "), each
        assert f"rank {victim} is gone: its process has ended" in each["told"]
        assert "nothing was moved; make a new Transfer" in each["told"]
        assert each["again"].startswith("TransferError: an earlier run has ended: ")
        assert each["holds"] == 1.0


def late() -> list[Any]:
    """The nearest program that is right: a rank only comes late, and the next run is a full one."""
    grid = commgrid.initialize(tp=2)
    source, target = {"w": torch.full((4,), 1.0)}, {"w": torch.zeros(4)}
    transfer = Transfer(source, target, source_grid=grid, target_grid=grid, timeout=1.0)
    found = said(transfer.run) if grid.rank != 1 else ""
    dist.barrier()
    if grid.rank == 1:
        found = said(transfer.run)  # it hears that the others had given up
    dist.barrier()
    transfer.run()
    return [found, target["w"][0].item()]


@pytest.mark.full
def test_a_late_rank_does_not_end_the_transfer() -> None:
    for told, value in run_killable(late, 2):
        assert told.startswith("PeerTimeoutError: "), told
        assert value == 1.0
