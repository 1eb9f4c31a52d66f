"""train_gpt in Ray's actors: trains, loses a worker and goes on, stops, and refuses."""

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.said import JOB, LONG, row, tracebacks, wait_until
from tests.examples.curves import ROOT, curve, same_curve, undisturbed

MARK = "COMMGRID_RAY_TEST"
NO_RAY = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install ray"
)


def environment(folder: Path) -> dict[str, str]:
    """Ray's own files stay in a folder, and it tells nobody that it was used."""
    return {
        **os.environ, MARK: str(folder), "PYTHONPATH": str(ROOT), "HOME": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip


@contextlib.contextmanager
def started(folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The example with some flags, and what it prints; nothing of it is left afterwards."""
    log = folder / "log"
    with log.open("wb") as out:
        running = subprocess.Popen(
            [sys.executable, "examples/ray_train.py", *flags], cwd=ROOT, env=environment(folder),
            stdin=subprocess.DEVNULL, stdout=out, stderr=out,
        )  # fmt: skip
    try:
        yield running, log
    finally:
        for pid in left(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        running.wait(60)


def left(folder: Path) -> list[int]:
    """Every live process of the job, Ray's own too."""
    mark, found = f"{MARK}={folder}\0".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes() + b"\0":
                    found.append(int(entry.name))
    return found


def workers(said: str) -> list[int]:
    """The processes of the last start's ranks, in order."""
    (*_, line) = re.findall(r"^ranks  (.*)$", said, flags=re.M)
    return [int(pid) for pid in re.findall(r"\d+: pid (\d+) on", line)]


@pytest.mark.nightly
@NO_RAY
def test_a_killed_worker_and_the_job_goes_on(tmp_path: Path) -> None:
    saved, metrics = tmp_path / "saved", tmp_path / "metrics"
    reference = undisturbed(JOB, tmp_path / "alone")
    flags = ["--tp", "2", "--save", str(saved), "--save-every", "2", "--metrics", str(metrics)]
    with started(tmp_path, "--workers", "4", *JOB, *flags) as (running, log):
        wait_until((saved / "step_00000002").exists, "the checkpoint of step 2", 300)
        victim = workers(log.read_text())[3]
        wait_until((saved / "step_00000004").exists, "the checkpoint of step 4")
        os.kill(victim, signal.SIGKILL)
        again = "start 1 of 4 has failed"
        wait_until(lambda: again in log.read_text(), again)
        assert running.wait(200) == 0, log.read_text()
        wait_until(lambda: not left(tmp_path), "the end of Ray", 20)
        said = log.read_text()
    before = said.partition(again)[0]
    (dead,) = re.findall(r"^rank 3 \(pid \d+ on \S+\) has died$", before, flags=re.M)
    (others,) = re.findall(r"^rank \d: (?:PeerFailedError|PeerTimeoutError): .*$", before, re.M)
    assert tracebacks(before) == 0, before
    assert re.search(r"goes on after step (4|6|8)\n", said)
    rows = curve(metrics)
    assert [each["step"] for each in rows] == list(range(1, 21))
    same_curve(rows, reference, "fp64")
    row("Ray: kill -9 of rank 3 of 4", "a step", f"{dead}; {others}", len(left(tmp_path)))


@pytest.mark.nightly
@NO_RAY
def test_a_killed_worker_and_the_others_go_on(tmp_path: Path) -> None:
    """In their actors, from memory: nothing is saved, and nothing starts again."""
    metrics = tmp_path / "metrics"
    reference = undisturbed(JOB, tmp_path / "alone")
    flags = ["--tp", "2", "--survive", "3", "--metrics", str(metrics), "--restarts", "0"]
    with started(tmp_path, "--workers", "4", *JOB, "--log-every", "1", *flags) as (running, log):
        wait_until(lambda: metrics.exists() and len(curve(metrics)) >= 5, "step 5", 300)
        os.kill(workers(log.read_text())[3], signal.SIGKILL)
        wait_until(lambda: "goes on without rank 3" in log.read_text(), "the others")
        assert running.wait(200) == 0, log.read_text()
        wait_until(lambda: not left(tmp_path), "the end of Ray", 20)
        said = log.read_text()
    (line,) = re.findall(r"goes on without rank 3 .*", said)
    assert re.search(r"over tp 2 on 2 ranks \(was tp 2 · dp 2\): .* from memory, in", line)
    assert len(re.findall(r"^rank 3 \(pid \d+ on \S+\) has died$", said, flags=re.M)) == 1
    assert len(re.findall(r"^ranks  ", said, flags=re.M)) == 1  # one start
    assert "has failed" not in said
    assert tracebacks(said) == 0, said
    rows = curve(metrics)
    assert [each["step"] for each in rows] == list(range(1, 21))
    same_curve(rows, reference, "fp64")
    row("Ray --survive: kill -9 of rank 3 of 4", "a step", line, len(left(tmp_path)))


@pytest.mark.nightly
@NO_RAY
def test_a_stop_is_one_line(tmp_path: Path) -> None:
    with started(tmp_path, "--workers", "2", *LONG) as (running, log):
        wait_until(lambda: "step    3" in log.read_text(), "three steps")
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 128 + signal.SIGTERM
        wait_until(lambda: not left(tmp_path), "the end of Ray", 20)
        said = log.read_text()
    assert said.splitlines()[-1] == "stopped by SIGTERM; nothing was saved"
    assert tracebacks(said) == 0, said
    row("Ray: SIGTERM to the driver", "a step", said.splitlines()[-1], 0)


@pytest.mark.full("sizes")
@pytest.mark.nightly("flag", "no_ray", "workers")
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--workers", "3", "--tp", "2"], "SpecError: axes: tp=2 .* does not divide 3 ranks"),
        (["--workers", "0"], r"argument --workers: .*0"),
        (["--workers", "2", "--warmpu", "1"], "unknown flag --warmpu; did you mean '--warmup'"),
        (["--workers", "2"], r"Ray is not installed here .*; pip install ray"),
    ],
    ids=["sizes", "workers", "flag", "no_ray"],
)
def test_what_is_wrong_is_said_before_anything_starts(
    flags: list[str], told: str, tmp_path: Path
) -> None:
    hidden = tmp_path / "ray.py"  # as where it is not installed
    hidden.write_text("raise ImportError('hidden by a test')")
    done = subprocess.run(
        [sys.executable, "examples/ray_train.py", *flags], cwd=ROOT, text=True,
        env={**environment(tmp_path), "PYTHONPATH": f"{tmp_path}:{ROOT}"}, capture_output=True,
        timeout=100,
    )  # fmt: skip
    assert done.returncode != 0
    assert re.search(told, done.stderr.splitlines()[-1]), done.stderr
    assert tracebacks(done.stderr) == 0
