"""train_gpt under a real SLURM of two nodes: trains, is killed and goes on, stops, and refuses."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.said import JOB, LONG, row, tracebacks, wait_for_step, wait_until
from tests.engines.slurm_cluster import Cluster, cluster, why_not
from tests.examples.curves import curve, same_curve, undisturbed

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
SMALL = ["--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=1"]
"""sbatch's options go before those in the file: nodes of two devices in place of eight."""
GPT = ["python", "examples/train_gpt.py"]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with cluster() as made:
        yield made
    assert made.processes() == []


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """The curve of one process that nobody kills."""
    return undisturbed(JOB, tmp_path_factory.mktemp("alone") / "metrics")


def batch(slurm: Cluster, log: Path, *more: str, **variables: str) -> str:
    """Queues a batch file; its job's number."""
    given = ["sbatch", "--parsable", f"--output={log}", *SMALL, *more]
    return slurm.run(*given, **variables).strip()


def wait_for_job(slurm: Cluster, job: str, log: Path) -> str:
    """Until a job has ended; what it has printed."""

    def ended() -> bool:
        state = slurm.run("scontrol", "show", "job", job)
        return re.search(r"JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT)", state) is not None

    wait_until(ended, f"the end of job {job}")
    wait_until(lambda: not slurm.tasks(), "the end of its tasks")
    return log.read_text()


@pytest.mark.nightly
def test_the_batch_file_trains(
    slurm: Cluster, unbroken: list[dict[str, float]], tmp_path: Path
) -> None:
    metrics, log = tmp_path / "metrics", tmp_path / "log"
    flags = [*JOB, "--tp", "2", "--metrics", str(metrics)]
    said = wait_for_job(slurm, batch(slurm, log, "examples/slurm/train_gpt.sbatch", *flags), log)
    assert "grid   tp 2 · dp 2 on 4 ranks (cpu)" in said
    same_curve(curve(metrics), unbroken, "fp64")


@pytest.mark.nightly
def test_a_killed_process_and_the_job_goes_on(
    slurm: Cluster, unbroken: list[dict[str, float]], tmp_path: Path
) -> None:
    victim = 3  # on the second node
    log, runs = tmp_path / "log", tmp_path / "runs"
    flags = [*JOB, "--tp", "2", "--save-every", "2"]
    job = batch(slurm, log, "examples/slurm/restart.sbatch", *flags, RUNS=str(runs))
    wait_until(lambda: len(slurm.tasks()) == 4, "four tasks")
    tasks = slurm.tasks()
    wait_until(lambda: (runs / job / "step_00000004").exists(), "the checkpoint of step 4")
    os.kill(tasks[victim], signal.SIGKILL)
    again = f"start 1 of job {job} has failed"
    wait_until(lambda: again in log.read_text(), again)
    said = wait_for_job(slurm, job, log)
    before, _, after = said.partition(again)
    assert re.search(rf"srun: error: \S+: task {victim}: Killed", before)
    assert tracebacks(before) == 0
    assert "PeerFailedError: " in before, before
    assert re.search(r"goes on after step (4|6|8)\n", after)
    rows = curve(Path(f"{runs / job}.jsonl"))
    assert [each["step"] for each in rows] == list(range(1, 21))
    same_curve(rows, unbroken, "fp64")
    seen = re.findall(r"PeerFailedError: .*", before)[0]
    row(f"srun: kill -9 of rank {victim} of 4", "a step", seen, len(slurm.tasks()))


@pytest.mark.nightly
def test_stops_are_one_line(slurm: Cluster) -> None:
    """scancel, and Ctrl-C twice, as srun wants it."""
    for name, stop in (("SIGTERM", scancel), ("SIGINT", ctrl_c)):
        with slurm.running("srun", "-N2", "-n2", *GPT, *LONG) as running:
            wait_for_step(running, 3)
            stop(slurm, running)
            out, err = running.communicate(timeout=60)
        last = out.splitlines()[-1]
        assert last.startswith(f"stopped by {name}: "), (last, err)
        assert out.count("stopped by") == 1
        assert tracebacks(err) == 0, err
        wait_until(lambda: not slurm.tasks(), "the end of its tasks")
        row(f"srun: {stop.__name__}", "a step", last, len(slurm.tasks()))


def scancel(slurm: Cluster, running: subprocess.Popen[str]) -> None:
    (job,) = slurm.run("squeue", "--noheader", "--format=%i").split()
    slurm.run("scancel", job)


def ctrl_c(slurm: Cluster, running: subprocess.Popen[str]) -> None:
    running.send_signal(signal.SIGINT)
    time.sleep(0.3)  # srun takes two within a second for a stop, and one for a question
    running.send_signal(signal.SIGINT)


@pytest.mark.nightly
def test_what_all_find_wrong_is_a_line_of_each(slurm: Cluster) -> None:
    """SLURM may end a rank before it prints."""
    for flags, told in (
        (["--tp", "3"], "SpecError: axes: tp=3 "),
        (["--tqp", "2"], "unknown flag"),
    ):
        with slurm.running("srun", "-N2", "-n2", *GPT, *JOB, *flags) as running:
            _, err = running.communicate(timeout=120)
        assert running.returncode in (1, 2)
        lines = [line for line in err.splitlines() if not line.startswith("srun: ")]
        assert 1 <= len(lines) <= 2, err
        assert all(told in line for line in lines), err


@pytest.mark.nightly
def test_survivors_go_on(slurm: Cluster, tmp_path: Path) -> None:
    """Without --kill-on-bad-exit and --wait srun leaves the others of a killed task alone."""
    metrics, log = tmp_path / "metrics", tmp_path / "log"
    flags = [*JOB, "--steps", "60", "--survive", "2", "--metrics", str(metrics)]
    srun = ["srun", "-N2", "-n2", "--no-kill", f"--output={log}", f"--error={log}"]
    with slurm.running(*srun, *GPT, *flags) as running:
        wait_until(lambda: len(slurm.tasks()) == 2, "two tasks")
        tasks = slurm.tasks()
        wait_until(lambda: metrics.exists() and len(curve(metrics)) >= 10, "ten steps")
        os.kill(tasks[1], signal.SIGKILL)
        _, err = running.communicate(timeout=120)
    said = log.read_text()
    assert "task 1: Killed" in err
    assert running.returncode == 128 + signal.SIGKILL  # of the one that is gone
    (seen,) = re.findall(r"^.*goes on .*1 rank.*$", said, re.M)
    assert re.search(r"^done: \d+ steps in .*, to step 60", said, re.M), said
    row("srun --no-kill: kill -9 of rank 1 of 2", "a step", seen, len(slurm.tasks()))
