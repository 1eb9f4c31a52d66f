"""What a job of an engine said, how its training went on, and the row that a fault makes."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

JOB = [
    "--layers", "4", "--hidden", "32", "--heads", "4", "--batch-size", "8", "--seq-len", "16",
    "--lr", "1e-2", "--dtype", "fp64", "--steps", "20",
]  # fmt: skip
"""train_gpt's flags: its 16 last steps take long enough for a process to be killed in them."""
LONG = [*JOB, "--steps", "1000000", "--log-every", "1"]


def wait_until(true: Callable[[], object], what: str, seconds: float = 120) -> None:
    """Raises AssertionError where it does not become true in time."""
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, f"not in {seconds:g} s: {what}"
        time.sleep(0.01)  # a poll


@contextlib.contextmanager
def killed_after(started: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Where the block leaves it alive, it is killed; its pipes are closed."""
    with started:
        try:
            yield started
        finally:
            started.kill()


def wait_for_step(running: subprocess.Popen[str], step: int) -> None:
    """Reads what train_gpt prints, until it is at a step.

    Raises:
        AssertionError: it ended before; with what it said.
    """
    assert running.stdout is not None
    said = []
    for line in running.stdout:
        if line.startswith(f"step {step:4d} "):
            return
        said.append(line)
    _, err = running.communicate()
    raise AssertionError(
        f"ended with {running.returncode} before step {step}\n{''.join(said)}{err}"
    )


def row(fault: str, moment: str, seen: str, left: int) -> None:
    """Prints a fault's row: fault × moment × what is seen × processes left."""
    line = f"{fault} | {moment} | {seen} | {left} left"
    print(line, file=sys.__stderr__)


def tracebacks(said: str, of: str = "") -> int:
    """How many of Python's tracebacks there are, of those that go through a file."""
    found = re.split(r"^Traceback \(most recent call last\):$", said, flags=re.M)[1:]
    return sum(of in text for text in found)
