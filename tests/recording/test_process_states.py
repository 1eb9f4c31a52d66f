"""How the process of a ring stands: alive, ended, killed, told to stop, or not seen lately."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid.call_records import files as trace_files
from commgrid.call_records import processes, ring
from commgrid.call_records.trace import Trace
from commgrid.testing import run_on_ranks
from tests.records import save
from tests.waiting import until

PROGRAM = """
import signal, sys, time
import torch
import torch.distributed as dist
import commgrid
from commgrid.failures import told_when_stopped
if sys.argv[1] != "within":
    commgrid.initialize()
def wait():
    print("up", flush=True)
    while True:
        time.sleep(0.05)
def ends(*_):
    sys.exit(3)
try:
    if sys.argv[1] == "told":
        with told_when_stopped(lambda name: print(name, flush=True)):
            wait()
    elif sys.argv[1] in ("left", "failed"):
        try:
            with told_when_stopped(lambda name: print(name, flush=True)):
                if sys.argv[1] == "failed":
                    raise RuntimeError("Connection closed by peer")
        except RuntimeError:
            pass
        wait()
    elif sys.argv[1] == "within":
        signal.signal(signal.SIGTERM, ends)
        with told_when_stopped(lambda name: print(name, flush=True)):
            commgrid.initialize()
        wait()
    elif sys.argv[1] == "own":
        signal.signal(signal.SIGTERM, ends)
        dist.all_reduce(torch.ones(1))
        wait()
    elif sys.argv[1] == "saves":
        signal.signal(signal.SIGINT, ends)
        wait()
    else:
        wait()
finally:
    commgrid.shutdown()
"""


@contextmanager
def running(tmp_path: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    """A rank that records and waits."""
    (tmp_path / "program.py").write_text(PROGRAM)
    environ = {**os.environ, "COMMGRID_TRACE": str(tmp_path / "trace")}
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py"), how], env=environ, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=100)


def state(tmp_path: Path) -> str:
    (trace,) = trace_files.read(tmp_path / "trace")
    return trace.state


@pytest.mark.parametrize(
    ("how", "number", "expected"),
    [
        ("waits", signal.SIGKILL, "killed"),
        ("waits", signal.SIGTERM, "stopped"),
        ("waits", signal.SIGINT, "stopped"),
        ("told", signal.SIGTERM, "stopped"),
        ("told", signal.SIGINT, "stopped"),
        ("told", signal.SIGKILL, "killed"),
        ("left", signal.SIGTERM, "stopped"),
        ("own", signal.SIGTERM, "stopped"),
        ("failed", signal.SIGTERM, "stopped"),
        ("failed", signal.SIGINT, "stopped"),
        ("failed", signal.SIGKILL, "killed"),
        ("saves", signal.SIGINT, "ended"),  # as it would end without a signal
    ],
)
def test_a_rank_is_alive_until_it_ends(
    tmp_path: Path, how: str, number: signal.Signals, expected: str
) -> None:
    with running(tmp_path, how) as process:
        assert state(tmp_path) == "running"
        process.send_signal(number)
        # Not waited for, it is still in the table of processes.
        until(lambda: processes.started(process.pid) == "", "the end")
        assert state(tmp_path) == expected
    assert state(tmp_path) == expected


def test_a_handler_from_before_a_block_is_run_after_it(tmp_path: Path) -> None:
    """The block is older than the records, whose handler is taken for that of SIGTERM in it."""
    with running(tmp_path, "within") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=100) == 3
    assert state(tmp_path) == "stopped"


def test_a_rank_that_goes_on_after_a_signal_is_alive(tmp_path: Path) -> None:
    """As after a SIGTERM that asks for a checkpoint."""
    (tmp_path / "trace").mkdir()
    with running(tmp_path, "waits"):
        (tmp_path / "trace" / "rank_00000.sigterm").write_text("stacks")
        assert state(tmp_path) == "running"


HERE = (processes.boot(), processes.space_of_pids())
ELSEWHERE = [("another boot", HERE[1]), (HERE[0], "another space")]


def ring_file(folder: Path, rank: int, at: float, pid: int, started: str, where: Any) -> None:
    trace = Trace(rank, (), at=at, host="a host")
    save(folder, trace, state=ring.ALIVE, process=(pid, started, *where))


@pytest.mark.parametrize("where", ELSEWHERE)
def test_a_rank_of_another_host_is_judged_by_when_it_was_seen(tmp_path: Path, where: Any) -> None:
    now = time.time()
    for rank, at in enumerate((now - 60, now + 2, now + 20)):
        ring_file(tmp_path, rank, at, os.getpid(), "0", where)
    assert [t.state for t in trace_files.read(tmp_path)] == ["silent", "silent", "running"]


def test_a_pid_that_is_used_again_is_another_process(tmp_path: Path) -> None:
    own = processes.started(os.getpid())
    for rank, started in enumerate((own, "1", "")):
        ring_file(tmp_path, rank, time.time() - 60, os.getpid(), started, HERE)
    assert [t.state for t in trace_files.read(tmp_path)] == ["running", "killed", ""]


@pytest.mark.parametrize(("ended", "expected"), [(ring.ENDED, "ended"), (ring.STOPPED, "stopped")])
def test_an_end_that_was_noted_needs_no_process(tmp_path: Path, ended: int, expected: str) -> None:
    trace = Trace(0, (), at=5.0, state="running")
    save(tmp_path, trace, state=ended)
    assert trace_files.read(tmp_path) == [replace(trace, state=expected)]
    (tmp_path / "rank_00000.sigterm").write_text("stacks of all threads")
    assert trace_files.read(tmp_path) == [replace(trace, state="stopped")]


def full(*_: int) -> None:
    raise OSError(28, "No space left on device")


def fills_the_disk(folder: str) -> tuple[bool, int, str]:
    """A rank whose ring has no more room, as on a full disk, while its program runs on."""
    os.environ["COMMGRID_TRACE"] = folder
    grid = commgrid.initialize()
    dist.broadcast(torch.ones(1), 0, group=grid.get_group("dp"))
    before, ring._allocate = ring._allocate, full
    for _ in range(5000):
        dist.broadcast(torch.ones(1), 0, group=grid.get_group("dp"))
    ring._allocate = before
    dist.broadcast(torch.ones(7), 0, group=grid.get_group("dp"))
    (trace,) = trace_files.read(Path(folder))
    commgrid.trace.stop()
    commgrid.shutdown()
    assert trace.calls[-1].shape == (1,)  # later ones would have another turn
    return trace.lost, len(trace.calls), trace.state


def test_a_rank_on_a_full_disk_runs_on_and_says_that_calls_are_missing(tmp_path: Path) -> None:
    ((lost, calls, how),) = run_on_ranks(
        fills_the_disk, 1, str(tmp_path), backend=None, launcher="torchrun", check=False
    )
    assert (lost, how) == (True, "running")
    assert 0 < calls < 5000
