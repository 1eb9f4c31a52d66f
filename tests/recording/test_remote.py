"""Asked while others hang, by a signal, and where a call times out."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid import CommGridError
from commgrid.call_analysis import diagnosis
from commgrid.failures import named_failures
from commgrid.recording import recorder, remote
from commgrid.store.driver import StoreDriver
from commgrid.testing import run_on_ranks
from commgrid.torch_compat import world as torch_world
from tests.flags import hear, meet, tell
from tests.waiting import comes, until, until_waits


def one_asks() -> str:
    """Ranks 0 to 2 hang in C++; rank 3, which they wait for, asks."""
    has_come, looked = StoreDriver.has_come, threading.Event()

    def looking(self: StoreDriver, key: str) -> bool:
        looked.set()
        return has_come(self, key)

    StoreDriver.has_come = looking  # type: ignore[method-assign]
    grid = commgrid.initialize(tp=2, timeout=1000.0, trace=True)
    assert looked.wait(100)  # what was asked before is not for this rank
    group, found = grid.get_group("dp_tp"), ""
    if grid.rank == 3:
        until_waits("rank 0", "rank 1", "rank 2")
        found = str(commgrid.diagnose(timeout=100.0, patience=0.0))
        store = torch_world.world_store()
        assert not store.check(["commgrid/questions/1/asked/0"])
        assert not store.check(["commgrid/questions/1/said/0"])
    comes(f"rank {grid.rank}")
    dist.all_reduce(torch.ones(3), group=group)  # here
    meet(grid.rank, 4)
    commgrid.trace.stop()
    assert not any(thread.name == "commgrid answers" for thread in threading.enumerate())
    commgrid.shutdown()
    return found


def test_one_rank_asks_while_the_others_hang() -> None:
    found = run_on_ranks(one_asks, 4, backend=None, launcher="torchrun")[3]
    assert found.startswith("rank 3 has not entered dp_tp all_reduce 0, for which ranks 0-2 have")
    assert "test_remote.py" in found
    assert "one_asks" in found


def signalled(folder: str) -> list[str]:
    """Rank 1 hangs in C++ and gets a signal from rank 0."""
    faulthandler.unregister(signal.SIGUSR1)  # that of the tests' harness
    os.chdir(folder)
    grid = commgrid.initialize(tp=2, timeout=1000.0, trace=True)
    store = torch_world.world_store()
    if grid.rank == 1:
        comes("rank 1")
        dist.all_reduce(torch.ones(3), group=grid.get_group("tp"))
    else:
        until_waits("rank 1")
        for rank, pid in ((1, int(store.get("comes: rank 1"))), (0, os.getpid())):
            os.kill(pid, signal.SIGUSR1)
            until(Path(f"commgrid_trace/rank_0000{rank}.stacks").exists, "the stacks")
        dist.all_reduce(torch.ones(3), group=grid.get_group("tp"))
    commgrid.trace.stop()
    commgrid.shutdown()
    return sorted(each.name for each in Path("commgrid_trace").iterdir())


def test_a_signal_has_a_rank_write_down_where_it_hangs(tmp_path: Path) -> None:
    first, second = run_on_ranks(signalled, 2, str(tmp_path), backend=None, launcher="torchrun")
    names = [f"rank_0000{rank}.{kind}" for rank in (0, 1) for kind in ("ring", "stacks")]
    assert first == second == names
    folder = tmp_path / "commgrid_trace"
    assert "signalled" in (folder / "rank_00001.stacks").read_text()
    found = diagnosis.diagnose(diagnosis.read(folder), patience=0.0)
    assert str(found).startswith("rank 0 has not entered tp all_reduce 0, for which rank 1 has")


def times_out() -> str:
    grid = commgrid.initialize(tp=2, timeout=2.0, trace=True)
    try:
        with named_failures():
            dist.all_reduce(torch.ones(3), group=grid.get_group("dp_tp"))
            if grid.rank == 2:
                hear("others are out")
            else:
                dist.all_reduce(torch.ones(3), group=grid.get_group("dp_tp"))  # here
    except CommGridError as error:
        tell("others are out")
        meet(grid.rank, 4)
        return f"{type(error).__name__}: {error}"
    meet(grid.rank, 4)
    return ""


def test_an_error_by_timeout_says_what_is_wrong() -> None:
    # The ranks still record.
    said = run_on_ranks(times_out, 4, backend=None, launcher="torchrun", check=False)
    assert said[2] == ""
    others = [said[rank] for rank in (0, 1, 3)]
    assert any(each.startswith("PeerTimeoutError") for each in others)
    for each in others:
        assert "rank 2 has not entered dp_tp all_reduce 1, for which ranks 0-1, 3 have" in each
        assert "is gone or does not answer" not in each  # a guess


def answers_late(rank_of_question: int) -> str:
    """Rank 1 lives and records, and its thread does not look for questions."""
    grid = commgrid.initialize(dp=2, trace=True)
    if grid.rank != rank_of_question:
        remote.stop()
    dist.barrier()
    found = str(commgrid.diagnose(timeout=0.2)) if grid.rank == rank_of_question else ""
    dist.barrier()
    commgrid.trace.stop()
    commgrid.shutdown()
    return found


def test_a_living_rank_that_does_not_answer_in_time_is_not_said_to_be_killed() -> None:
    """As in the first second of a job."""
    found = run_on_ranks(answers_late, 2, 0, backend=None, launcher="torchrun")[0]
    assert found == (
        "no fault found in the records of rank 0; not checked: rank 1 did not answer in 0.2 s"
    )


def test_without_records_it_says_so() -> None:
    assert recorder.current() is None
    with pytest.raises(CommGridError, match="does not record its calls"):
        commgrid.diagnose()


def test_an_answer_is_bounded() -> None:
    commgrid.initialize(trace=True)
    try:
        own: Any = recorder.current()
        for group in range(3000):
            entry = own.ring.entry("group", f"a rather long name of {group}", (0,), "", "gloo")
            for turn in range(2):
                kind = own.ring.entry("kind", f"operation {group * 7919}", "float32", "")
                size = group * 104729
                own.ring.add(entry, turn, kind, (group,), size, None, None, 0, 1, turn)
        assert len(remote.packed(own)) <= remote.MOST_BYTES
    finally:
        commgrid.trace.stop()
        commgrid.shutdown()


def test_a_handler_of_the_programs_own_stays() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        commgrid.initialize(trace=True)
        os.kill(os.getpid(), signal.SIGUSR1)
        commgrid.trace.stop()
        commgrid.shutdown()
        assert heard == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)
