"""train_gpt under torchrun: restarts from the last checkpoint, and what needs none."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.engines.agents import LOOPBACK, Job, job
from tests.engines.said import tracebacks, wait_until
from tests.examples.curves import curve, same_curve, undisturbed
from tests.waiting import until_waiting

TINY = [
    "--layers", "2", "--hidden", "16", "--heads", "4", "--batch-size", "24", "--seq-len", "4",
    "--clip-grad", "1.5", "--lr", "1e-2", "--dtype", "fp64", "--steps", "20", "--log-every", "1",
]  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """The curve of one process to which nothing happens."""
    return undisturbed(TINY, tmp_path_factory.mktemp("alone") / "metrics")


def failed(running: Job, worker: str, step: int) -> dict[str, Any]:
    """When something happened to a worker, and the process it happened to."""
    path = running.folder / f"failed-{step}-{worker}"
    wait_until(lambda: path.exists() and path.read_text(), f"{worker} in step {step}")
    told: dict[str, Any] = json.loads(path.read_text())
    return told


def says(running: Job, said: str) -> None:
    """Wait until the first node has said so."""
    wait_until(lambda: re.search(said, running.log(0).read_text()), said)


def check_curve(metrics: Path, reference: list[dict[str, float]]) -> None:
    rows = curve(metrics)
    assert [each["step"] for each in rows] == list(range(1, 21))
    same_curve(rows, reference, "fp64")


@pytest.mark.nightly
def test_two_restarts_of_eight_ranks(alone: list[dict[str, float]], tmp_path: Path) -> None:
    """One agent: as many ranks as before, from the last checkpoint, once and once more."""
    saved, metrics = str(tmp_path / "saved"), tmp_path / "metrics"
    flags = [
        *TINY, "--tp", "2", "--zero1", "--metrics", str(metrics),
        "--save", saved, "--save-every", "3", "--resume", saved,
    ]  # fmt: skip
    with job(LOOPBACK[:1], timeout=200) as running:
        faults = {"0.3": {"10": "kill"}, "0.0": {"15": "kill"}}
        torchrun = ["--nnodes", "1", "--nproc-per-node", "8", "--max-restarts", "2"]
        running.start(torchrun, ["faulty", json.dumps(faults), *flags])
        for worker, step, back in (("0.3", 10, 9), ("0.0", 15, 12)):
            failed(running, worker, step)
            says(running, rf"goes on after step {back}\n")
        assert running.wait([0]) == [0], running.said()
        said = running.log(0).read_text()
    check_curve(metrics, alone)
    assert "tp 2 · dp 4" in said
    assert not running.processes()


@pytest.mark.nightly
def test_a_host_of_two_ranks_is_gone(alone: list[dict[str, float]], tmp_path: Path) -> None:
    """Two agents of two ranks each: dp shrinks to what is left, by itself."""
    saved, metrics = str(tmp_path / "saved"), tmp_path / "metrics"
    flags = [
        *TINY, "--tp", "2", "--metrics", str(metrics), "--timeout", "10",
        "--save", saved, "--save-every", "3", "--resume", saved,
    ]  # fmt: skip
    with job(LOOPBACK, timeout=200) as running:
        torchrun = ["--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "3"]
        faults = {"1.1": {"10": "host"}}
        running.start(torchrun, ["faulty", json.dumps(faults), *flags])
        failed(running, "1.1", 10)
        says(running, r"goes on after step 9\n")
        assert running.wait([0]) == [0], running.said()
        said = running.log(0).read_text()
    check_curve(metrics, alone)
    first, again = said.index("tp 2 · dp 2 on 4 ranks"), said.index("tp 2 on 2 ranks")
    assert first < again


@pytest.mark.nightly
def test_what_does_not_end_a_process_needs_no_restart(
    alone: list[dict[str, float]], tmp_path: Path
) -> None:
    """A rank that raises, and then one that is stopped: the agent hears of neither."""
    metrics = tmp_path / "metrics"
    flags = [*TINY, "--tp", "2", "--survive", "3", "--timeout", "10", "--metrics", str(metrics)]
    with job(LOOPBACK[:1], timeout=200) as running:
        faults = {"0.2": {"10": "raise"}, "0.3": {"15": "stop"}}
        torchrun = ["--nnodes", "1", "--nproc-per-node", "4", "--max-restarts", "0"]
        running.start(torchrun, ["faulty", json.dumps(faults), *flags])
        failed(running, "0.2", 10)
        says(running, "step    9  goes on with all ranks over tp 2 · dp 2")
        stopped = failed(running, "0.3", 15)
        without = "step   12  goes on without rank 3 over tp 2 on 2 ranks .* rank 2 to spare"
        says(running, without)
        wait_until(lambda: "done: " in running.log(0).read_text(), "the end of the others")
        until_waiting([running.agents[0].pid])
        assert running.agents[0].poll() is None  # it waits for the rank that is stopped
        os.kill(stopped["pid"], signal.SIGCONT)
        assert running.wait([0]) == [0], running.said()
        said = running.log(0).read_text()
        starts = [(running.folder / f"starts-0.{rank}").read_text() for rank in range(4)]
    check_curve(metrics, alone)
    assert starts == ["1"] * 4
    assert "rank 2 failed in step 10, and takes part again: ValueError: no such token" in said
    assert tracebacks(said) == 0, said


@pytest.mark.full
def test_who_fails_again_is_restarted(alone: list[dict[str, float]], tmp_path: Path) -> None:
    """A rank that fails in the same step again ends, and with it this start of the job."""
    saved, metrics = str(tmp_path / "saved"), tmp_path / "metrics"
    flags = [
        *TINY, "--survive", "3", "--metrics", str(metrics),
        "--save", saved, "--save-every", "4", "--resume", saved,
    ]  # fmt: skip
    with job(LOOPBACK[:1], timeout=200) as running:
        torchrun = ["--nnodes", "1", "--nproc-per-node", "2", "--max-restarts", "1"]
        faults = json.dumps({"0.1": {"10": "raise always"}})
        running.start(torchrun, ["faulty", faults, *flags])
        assert running.wait([0]) == [0], running.said()
        said = running.log(0).read_text()
    check_curve(metrics, alone)
    assert len(re.findall("rank 1 failed in step 10, and takes part again", said)) == 1
    # The launcher may end rank 0 before it has said that all go on: rank 1 fails again at once.
    goes_on = "step    9  goes on with all ranks over dp 2 on 2 ranks" in said
    assert goes_on or "stopped by SIGTERM: 9 steps" in said, said
    resumed = said.index("goes on after step 8\n")
    if goes_on:
        assert said.index("goes on with all ranks") < resumed
