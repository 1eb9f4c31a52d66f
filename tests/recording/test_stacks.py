"""`commgrid dump`: another process has the ranks of a job write down where they are."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid import SpecError
from commgrid.call_analysis import diagnosis
from commgrid.call_records import processes
from commgrid.call_records.processes import Process
from commgrid.cli import main
from commgrid.cli.commands import dump
from commgrid.testing import run_on_ranks
from tests.waiting import comes, until_waits


def hangs(folder: str, traced: bool) -> list[str]:
    """Rank 1 hangs in C++; rank 0 dumps both."""
    faulthandler.unregister(signal.SIGUSR1)  # that of the tests' harness
    if traced:
        os.environ["COMMGRID_TRACE"] = f"{folder}/trace"
    grid = commgrid.initialize(tp=2, timeout=1000.0)
    pid = os.getpid()
    if grid.rank == 0:
        until_waits("rank 1")
        assert main(["dump", "--pid", str(pid), "-o", f"{folder}/dump"]) == 0
    else:
        comes("rank 1")
    dist.all_reduce(torch.ones(3), group=grid.get_group("tp"))
    commgrid.trace.stop()
    commgrid.shutdown()
    assert not any(each.pid == pid for each in processes.running())
    return [path.name for path in processes.folder_of_user().glob(f"{pid}.*")]


@pytest.mark.parametrize("traced", [True, False])
def test_ranks_write_where_they_are_and_go_on(
    tmp_path: Path, traced: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_on_ranks(
        hangs, 2, str(tmp_path), traced, backend=None, launcher="torchrun", check=False
    ) == [[], []]
    folder = tmp_path / "dump"
    kinds = ("ring", "stacks") if traced else ("stacks",)
    names = [f"rank_0000{rank}.{kind}" for rank in (0, 1) for kind in kinds]
    names = [*names, "torch_trace_rank_0", "torch_trace_rank_1"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert "hangs" in (folder / "rank_00001.stacks").read_text()
    said = capfd.readouterr().out
    assert "stacks of ranks 0-1" in said
    if traced:
        assert ", calls of ranks 0-1, " in said
        found = diagnosis.diagnose(diagnosis.read(folder), patience=0.0)
        assert str(found).startswith("rank 0 has not entered tp all_reduce 0, for which rank 1 has")
    else:
        assert ", calls of no rank, torch's calls of ranks 0-1\n" in said


def of(rank: int, job: str = "2", **given: Any) -> Process:
    values = {
        "pid": 100 + rank, "started": "1", "space": processes.space_of_pids(), "rank": rank,
        "world_size": 2, "job": job,
        "program": f"train_{job}.py", "ring": "", "answers": True, **given,
    }  # fmt: skip
    return Process(**values)


def test_which_job_is_meant() -> None:
    two = [of(0), of(1)]
    assert processes.of_one_job(two, None) == two
    assert processes.of_one_job([*two, of(0, "other", pid=7)], 101) == two
    with pytest.raises(SpecError, match="no process of yours on this host has a grid"):
        processes.of_one_job([], None)
    with pytest.raises(
        SpecError,
        match=r"2 jobs run here: train_2\.py, ranks 0-1, pid 100; train_other\.py, rank 0, pid 7; "
        r"give --pid",
    ):
        processes.of_one_job([*two, of(0, "other", pid=7)], None)
    with pytest.raises(SpecError, match=r"--pid 5: is no process .*: train_2\.py, ranks 0-1"):
        processes.of_one_job(two, 5)


def test_a_process_that_does_not_handle_the_signal_gets_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would end by it."""
    sent: list[int] = []
    monkeypatch.setattr(processes.os, "kill", lambda pid, number: sent.append(number))
    monkeypatch.setattr(processes, "is_caught", lambda pid: False)
    (found,) = processes.dump([of(0, pid=os.getpid())], tmp_path, 1.0)
    assert sent == []
    assert (found.stacks, found.records, found.why) == (
        False, False, "the program handles SIGUSR1 itself",
    )  # fmt: skip


def test_what_ended_processes_have_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "folder_of_user", lambda: tmp_path)
    (tmp_path / "77.json").write_text(json.dumps(vars_of(of(0, pid=77))))
    (tmp_path / "77.stacks").write_text("")
    (tmp_path / "78.json").write_text("no JSON")
    others = [of(0, pid=79, space="a container"), {"pid": 80, "of": "another version"}]
    for pid, each in zip((79, 80), others, strict=True):
        said = each if isinstance(each, dict) else vars_of(each)
        (tmp_path / f"{pid}.json").write_text(json.dumps(said))
    assert processes.running() == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["79.json", "80.json"]


def vars_of(process: Process) -> dict[str, Any]:
    return {name: getattr(process, name) for name in Process.__dataclass_fields__}


def test_a_handler_that_came_later_stays() -> None:
    faulthandler.unregister(signal.SIGUSR1)
    before = signal.getsignal(signal.SIGUSR1)
    heard: list[int] = []
    try:
        commgrid.initialize()
        signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
        commgrid.shutdown()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_rank_that_says_nothing_is_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dump, "running", lambda: [of(0, answers=False)])
    assert main(["dump", "-o", str(tmp_path)]) == 1
    assert "no stacks of rank 0: the program handles SIGUSR1 itself" in capsys.readouterr().out
    assert main(["dump", "--timeout", "0"]) == 2
    assert "--timeout 0: expected seconds" in capsys.readouterr().err
