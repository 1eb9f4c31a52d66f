"""Leaving the store: the rank that serves it leaves last, and waits for no rank that is gone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid.errors import PeerFailedError
from commgrid.failures import named_failures
from commgrid.runtime import registry
from commgrid.testing import run_on_ranks
from tests.flags import tell
from tests.killing import KILLED, kill_me, run_killable
from tests.waiting import comes, until, until_waiting, until_waits

ENDLESS = {"COMMGRID_TIMEOUTS": "exit=100000"}
"""A wait for a rank that does not leave would never end."""


def told(grid: commgrid.HyperCommGrid) -> str:
    try:
        with named_failures():
            while True:
                dist.all_reduce(torch.ones(1), group=grid.get_group("dp"))
    except PeerFailedError as error:
        return str(error)


def survives(watch: bool, shuts_down: bool) -> str:
    grid = commgrid.initialize(timeout=60, watch=watch, backend="gloo")
    if grid.rank == 2:
        kill_me()
    said = told(grid)
    if shuts_down:
        commgrid.shutdown()
    return said


@pytest.mark.parametrize("shuts_down", [False, True])
@pytest.mark.parametrize("watch", [False, True])
def test_a_rank_that_was_named_as_gone_is_not_waited_for(watch: bool, shuts_down: bool) -> None:
    found = run_killable(survives, 4, watch, shuts_down, environ=ENDLESS, timeout=100)
    assert found.pop(2) == KILLED
    assert all("rank 2 is gone" in said for said in found), found


def late(folder: str) -> str:
    """Rank 1 learns of the failure as the others do, and has something to do afterwards."""
    grid = commgrid.initialize(timeout=60, backend="gloo")
    if grid.rank == 2:
        kill_me()
    told(grid)
    mark = Path(folder, "rank 0 ends")
    if grid.rank == 0:
        mark.with_suffix(".pid").write_text(str(os.getpid()))
        mark.with_suffix(".pid").rename(mark)
    else:
        until(mark.exists, f"{mark}")
        until_waiting([int(mark.read_text())])
    tell(f"rank {grid.rank} is done")  # raises where the store is gone
    return "done"


def test_a_late_rank_is_waited_for_beside_one_that_is_gone(tmp_path: Path) -> None:
    assert run_killable(late, 3, str(tmp_path), timeout=100) == ["done", "done", KILLED]


def deletes_late(folder: str, waits: bool) -> str:
    """Rank 1 deletes its keys when rank 0 is at the end of its part."""
    grid = commgrid.initialize(tp=1, backend="gloo")
    printed = Path(folder, f"{grid.rank}.stderr")
    os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT), 2)
    if waits:
        comes("rank 0") if grid.rank == 0 else grid.before_destroy(lambda: until_waits("rank 0"))
    commgrid.shutdown()
    return printed.read_text()


@pytest.mark.parametrize("waits", [True, False])
def test_shutdown_returns_when_nothing_is_left_to_delete(tmp_path: Path, waits: bool) -> None:
    """Ranks end without exit handlers here, as multiprocessing's do: torch printed C++ stacks."""
    found = run_on_ranks(
        deletes_late, 3, str(tmp_path), waits, backend=None, launcher="torchrun", check=False
    )
    assert found == [""] * 3


def leaves_often() -> list[str]:
    places, leave = [], registry.leave

    def counted(at: str, *given: Any) -> Any:
        places.append(at)
        return leave(at, *given)

    registry.leave = counted
    for _ in range(3):
        commgrid.initialize(backend="gloo")
        commgrid.shutdown()
        commgrid.shutdown()
    registry._registry.leave()
    return places


def test_a_world_is_left_once() -> None:
    found = run_on_ranks(leaves_often, 2, backend=None, launcher="torchrun", environ=ENDLESS)
    assert len(set(found[0])) == 3
    assert found == [found[0]] * 2


def shuts_down_alone() -> None:
    grid = commgrid.initialize(backend="gloo")
    if grid.rank == 1:
        kill_me()
    commgrid.shutdown()


def test_shutdown_does_not_wait_for_ever() -> None:
    found = run_killable(shuts_down_alone, 2, environ={"COMMGRID_TIMEOUTS": "exit=0.5"}, timeout=60)
    assert found == [None, KILLED]
