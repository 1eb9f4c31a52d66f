"""`commgrid audit --dry`: what a rank of a large job would issue, without the job."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from commgrid import cli
from commgrid.audit.auditing import observed
from commgrid.call_records import files as trace_files
from commgrid.launching.script import run_script
from commgrid.planning.audited import VARIABLE
from commgrid.recording import recorder
from commgrid.testing import run_on_ranks
from tests.audit.audited import EXAMPLES, TEXT, TRAIN
from tests.waiting import until

SCRIPT = EXAMPLES / "train_gpt.py"
FLAGS = f"{TRAIN} {TEXT} --microbatches 2".replace("size 4", "size 8")


def dry(folder: Path, grid: str, world_size: int, *more: str, flags: str = FLAGS) -> int:
    """In a process of its own, since it forks where this one may have threads."""
    argv = ["audit", "--dry", str(SCRIPT), "--grid", grid, "--world-size", str(world_size)]
    argv += ["-o", str(folder), *more, "--json", "--", *flags.split()]
    (status,) = run_on_ranks(cli.main, 1, argv, backend=None, timeout=200)
    return int(status)


def issued(
    folder: Path,
) -> dict[int, list[tuple[str, str, tuple[int, ...], str, *tuple[int | None, ...]]]]:
    """The calls of each rank on groups of several ranks, until the update."""
    found = {}
    for trace in trace_files.read(folder):
        found[trace.rank] = [
            (call.group.name, call.operation, call.shape, call.dtype, call.peer, call.root)
            for call in trace.calls
            if len(call.group.ranks) > 1 and call.operation != "barrier"
        ]
    return found


def real(folder: Path, grid: str, world_size: int) -> None:
    """The same job with all its ranks, for one step."""
    seen = folder / "seen"
    seen.mkdir(parents=True)
    environ = {VARIABLE: grid, "COMMGRID_TRACE": "1"}
    run_on_ranks(
        _traced, world_size, seen, folder, backend=None, launcher="torchrun", environ=environ
    )


def _traced(seen: Path, folder: Path) -> None:
    observed(seen, 1, None, run_script, SCRIPT, [*FLAGS.split(), "--steps", "1"])
    found = recorder.current()
    assert found is not None
    found.save(folder)


@pytest.mark.full("tp=2,dp=2")
@pytest.mark.parametrize("grid", ["tp=2,dp=2", "pp=2,tp=2"])
def test_a_dry_rank_issues_what_a_real_one_does(grid: str, tmp_path: Path) -> None:
    assert dry(tmp_path / "dry", grid, 4) == 0
    real(tmp_path / "real", grid, 4)
    one, other = issued(tmp_path / "dry"), issued(tmp_path / "real")
    assert one.keys() == other.keys() == {0, 1, 2, 3}
    for rank, calls in one.items():
        assert len(calls) > 10
        assert calls == other[rank][: len(calls)]


@pytest.mark.full
def test_a_dry_job_can_be_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry(tmp_path / "dry", "pp=2", 4) == 0
    assert cli.main(["verify", str(tmp_path / "dry"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["finishes"] is True
    assert found["ranks"] == 4


@pytest.mark.full
def test_some_ranks_of_1024(tmp_path: Path) -> None:
    flags = FLAGS.replace("--batch-size 8", "--batch-size 2048")
    assert dry(tmp_path, "tp=4", 1024, "--ranks", "0,1023", flags=flags) == 0
    first, last = trace_files.read(tmp_path)
    assert (first.rank, last.rank) == (0, 1023)
    ranks = next(group.ranks for group in last.groups if "dp" in group.name.split(","))
    assert ranks == tuple(range(3, 1024, 4))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--dry", str(SCRIPT), "--grid", "tp=2"], "--dry records one grid in a folder"),
        (["--dry", str(SCRIPT), "--grid", "tp=2", "dp=2", "-o", "x"], "--dry records one grid"),
        (["--dry", "none.py", "--grid", "tp=2", "-o", "x"], "there is no such program"),
        (
            ["--dry", str(SCRIPT), "--grid", "tp=3", "--world-size", "8", "-o", "x"],
            "its sizes make 6 ranks, not 8",
        ),
        (
            ["--dry", str(SCRIPT), "--grid", "tp=2", "-o", "x", "--ranks", "7"],
            "rank 7: the job has ranks 0-1",
        ),
        ([str(SCRIPT), "--grids", "tp=2", "--world-size", "8"], "--world-size is about --dry"),
    ],
)
def test_wrong_usage_of_dry_is_2(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["audit", *argv]) == 2
    assert said in capsys.readouterr().err


def test_sigterm_leaves_no_rank_behind(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(
        "import os, pathlib, time\n"
        "here = pathlib.Path(__file__).with_name('pid_' + os.environ['RANK'])\n"
        "here.write_text(str(os.getpid()))\n"
        "time.sleep(1000)  # until it is ended\n"
    )
    argv = ["audit", "--dry", str(script), "--grid", "dp=1", "-o", str(tmp_path / "dry")]
    audit = subprocess.Popen([sys.executable, "-m", "commgrid", *argv])
    try:
        pid = tmp_path / "pid_0"
        until(lambda: audit.poll() is None and pid.exists() and pid.read_text(), "a rank")
        audit.terminate()
        assert audit.wait(60) == 143
        assert not Path(f"/proc/{pid.read_text()}").exists()
    finally:
        audit.kill()
