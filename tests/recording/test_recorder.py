"""Failures of ranks whose calls are recorded or compared: who is named, in which operation."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid import CommGridError
from commgrid.call_records import processes
from commgrid.failures import named_failures
from commgrid.recording.places import whereabouts
from commgrid.testing import run_on_ranks
from tests.killing import KILLED, kill_me, run_killable
from tests.waiting import until


def refused(how: dict[str, Any]) -> str:
    """The operation of a call that torch refuses, where commgrid hears of the call first."""
    is_suspended = how.pop("suspended", False)
    grid = commgrid.initialize(**how)
    if is_suspended:
        grid.suspend(["dp"])
        grid.resume(["dp"])
    with pytest.raises(RuntimeError) as raised:
        dist.all_gather([torch.empty(3)] * 2, torch.ones(2), group=grid.get_group("dp"))
    where = whereabouts(raised.value)
    assert where is not None
    commgrid.shutdown()
    return where.operation


@pytest.mark.parametrize(
    "how",
    [{"trace": True}, {"verify": "order"}, {"suspended": True}],
    ids=["trace", "verify", "suspended"],
)
def test_an_error_names_the_operation_and_not_the_listener(how: dict[str, Any]) -> None:
    assert run_on_ranks(refused, 2, how, check=False) == ["all_gather"] * 2


def dies_before_its_first_call(grid_has: dict[str, Any]) -> str:
    grid = commgrid.initialize(verify="order", **grid_has)
    if grid.rank == 1:
        kill_me()
    try:
        with named_failures():
            dist.all_reduce(torch.ones(1), group=grid.get_group("dp"))
    except CommGridError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    "grid_has", [{"timeout": 3}, {"timeout": 60, "watch": True}], ids=["timeout", "watch"]
)
def test_order_is_not_compared_with_a_dead_rank_for_ever(grid_has: dict[str, Any]) -> None:
    """Rank 2 waited for the words of rank 1, which it had never been connected to."""
    first, gone, last = run_killable(dies_before_its_first_call, 3, grid_has)
    assert gone == KILLED
    for said in (first, last):
        assert said.startswith("Peer"), said
        assert "rank 1" in said.partition(":")[2].partition(":")[0], said


def test_a_programs_own_dump_of_stacks_is_kept() -> None:
    """`signal.getsignal` does not know of handlers in C."""
    faulthandler.unregister(signal.SIGUSR1)
    assert not processes.is_caught(os.getpid())
    faulthandler.register(signal.SIGUSR1)
    try:
        assert processes.is_caught(os.getpid())
    finally:
        faulthandler.unregister(signal.SIGUSR1)


def many_files(folder: str) -> list[str]:
    """A rank with over 1,024 open files is sent the signal for its stacks."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    faulthandler.unregister(signal.SIGUSR1)
    os.environ["COMMGRID_TRACE"] = folder
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1500)]
    commgrid.initialize(trace=True)
    os.kill(os.getpid(), signal.SIGUSR1)
    until(Path(folder, "rank_00000.stacks").exists, "the stacks")
    commgrid.shutdown()
    for each in files:
        os.close(each)
    return sorted(Path(each).suffix for each in os.listdir(folder))


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2000, reason="needs 1,500 open files"
)
def test_a_rank_with_many_open_files_answers(tmp_path: Path) -> None:
    (found,) = run_on_ranks(many_files, 1, str(tmp_path), check=False)
    assert ".stacks" in found
