"""Jobs that are killed or interrupted: `diagnose` names the rank that went first, or who waits.

torchrun starts them, as users do: its agent ends the other ranks.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.waiting import until, until_waiting

ROOT = Path(__file__).parents[2]

KILLED = """
import os, signal, sys, threading
import torch, torch.distributed as dist
import commgrid
from tests.waiting import comes, until_waits

when = sys.argv[1]
grid = commgrid.initialize(tp=2, timeout=100)
tp, dp = grid.get_group("tp"), grid.get_group("dp")


def die():  # once another waits for this rank: the launcher ends them all soon after
    until_waits(*("rank 0", "rank 2") if when == "within a call" else ("rank 0",))
    if when == "aborts":
        os.abort()
    os.kill(os.getpid(), signal.SIGKILL)


dies_in = 0 if when == "before all calls" else 2
for step in range(4):
    if step == dies_in and when == "within a call":
        if grid.rank == 2:
            comes("rank 2")
            threading.Thread(target=die).start()
        if grid.rank == 3:
            signal.pause()  # so that rank 2 stays in its call
    elif step == dies_in and grid.rank == 2:
        die()
    dist.all_reduce(torch.ones(4), group=tp)
    if step == dies_in and grid.rank == 0:
        comes("rank 0")
    dist.all_reduce(torch.ones(4), group=dp)
"""

STUCK = """
import os, pathlib, sys
import torch, torch.distributed as dist
import commgrid

grid = commgrid.initialize(pp=4, timeout=1000)
x, rank = torch.ones(4), grid.rank
if rank == 1:
    dist.recv(x, 0)
pathlib.Path(f"{sys.argv[1]}/{rank}.pid").write_text(str(os.getpid()))
if rank == 0:
    dist.send(x, 1)
elif rank == 1:
    dist.send(x, 3)  # for rank 2
elif rank == 2:
    dist.recv(x, 1)
    dist.send(x, 3)
else:
    dist.recv(x, 2)
dist.barrier()
"""


def job(folder: Path, text: str, *flags: str) -> subprocess.Popen[bytes]:
    program = folder / "train.py"
    program.write_text(text)
    environ = {**os.environ, "COMMGRID_TRACE": str(folder / "trace"), "PYTHONPATH": str(ROOT)}
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
    ]
    return subprocess.Popen(
        [*launch, str(program), *flags], env=environ, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip


def diagnosed(folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "commgrid", "diagnose", str(folder / "trace")],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stderr == ""
    return done.returncode, done.stdout


@pytest.mark.full
@pytest.mark.parametrize("when", ["before all calls", "between calls", "within a call", "aborts"])
def test_the_rank_that_was_killed_is_named(tmp_path: Path, when: str) -> None:
    with job(tmp_path, KILLED, when) as running:
        assert running.wait(timeout=100) != 0
    status, said = diagnosed(tmp_path)
    assert status == 1, said
    assert said.startswith("rank 2 was killed before "), said
    assert "train.py:" in said.splitlines()[0]


INTERRUPTED = """
import itertools, os, pathlib, signal, sys
import torch, torch.distributed as dist
import commgrid

grid = commgrid.initialize(tp=2, timeout=100)
signal.signal(signal.SIGTERM, lambda *_: os._exit(1))  # as programs with a handler of their own
for step in itertools.count():
    dist.all_reduce(torch.ones(4), group=grid.get_group("tp"))
    dist.all_reduce(torch.ones(4), group=grid.get_group("dp"))
    if step == 10:
        pathlib.Path(f"{sys.argv[1]}/at_work_{grid.rank}").touch()
"""


@pytest.mark.full
def test_no_rank_of_an_interrupted_job_is_blamed(tmp_path: Path) -> None:
    with job(tmp_path, INTERRUPTED, str(tmp_path)) as running:
        until(lambda: len(list(tmp_path.glob("at_work_*"))) == 4, "all ranks are at work")
        running.send_signal(signal.SIGINT)
        running.wait(timeout=100)
    status, said = diagnosed(tmp_path)
    # On a loaded machine a rank may have been slow, which is no blame for the end.
    is_slow = said.startswith("rank ") and " is slow: the others of " in said.splitlines()[0]
    assert (status, said[:14]) == (0, "no fault found") or is_slow, said


@pytest.mark.full
def test_what_a_job_hung_in_is_told_after_sigterm(tmp_path: Path) -> None:
    """A scheduler's SIGTERM ends the job while all ranks wait; each still leaves its record."""
    with job(tmp_path, STUCK, str(tmp_path)) as running:
        marks = [tmp_path / f"{rank}.pid" for rank in range(4)]
        until(lambda: all(path.exists() and path.read_text() for path in marks), "the marks")
        until_waiting(int(path.read_text()) for path in marks)
        time.sleep(5)  # longer than diagnose's --patience of 1 s, by which records are judged
        running.send_signal(signal.SIGTERM)
        running.wait(timeout=100)
    status, said = diagnosed(tmp_path)
    assert status == 1
    assert said.startswith("ranks 1-3 wait for each other: rank 1 waits in "), said
    assert "send 0 at train.py:14 <module> for rank 3" in said
    assert "recv 0 at train.py:16 <module> for rank 1" in said
