"""Starts a program on one grid, under torchrun, and ends it in every case."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from commgrid.errors import CommGridError
from commgrid.planning.audited import VARIABLE, AuditedGrid

_GRACE_SECONDS = 5.0
_LINES = 12
_STARTING = re.compile(r"[WEI]\d{4} .*torch/distributed/run\.py")
_LAUNCHERS = re.compile(r"[WEI]\d{4} .*torch/distributed/elastic/")


def run_on_grid(
    grid: AuditedGrid,
    script: Path,
    flags: Sequence[str],
    folder: Path,
    *,
    steps: int,
    timeout: float,
    beginning: Path | None = None,
) -> None:
    """Runs a program until it has taken its steps, and an observer beside it.

    Args:
        grid: whose sizes it is given, and how many ranks.
        script: the program.
        flags: its own.
        folder: where its ranks leave what they see, and `output.txt` what they print.
        steps: how many are looked at.
        timeout: seconds until it is killed.
        beginning: the folder of a grid whose weights it begins with; None: its own.

    Raises:
        CommGridError: it failed, or took too long; with the last lines that it printed.
    """
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={grid.world_size}", "-m", "commgrid.audit.child",
        str(folder), str(steps), str(beginning or ""), str(script), *flags, *grid.flags,
    ]  # fmt: skip
    environ = {**os.environ, VARIABLE: grid.variable}
    printed = folder / "output.txt"
    with printed.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environ
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise CommGridError(
                f"grid {grid.text!r}: {script.name} has not done {steps} steps in {timeout:g} s, "
                "and was killed; give it fewer or smaller steps, or a longer --timeout"
                f"{_last_lines(printed)}"
            ) from None
        finally:
            with _undisturbed():
                _end(process)
    if code:
        raise CommGridError(
            f"grid {grid.text!r}: {script.name} failed with exit code {code}; it printed"
            f"{_last_lines(printed)}"
        )


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C does not keep the first from ending everything."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a launcher that still runs, and every process below it."""
    if process.poll() is not None:
        return
    below = _descendants(process.pid)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_SECONDS)
    for pid in [*below, process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    until = time.monotonic() + _GRACE_SECONDS
    while any(Path(f"/proc/{pid}").exists() for pid in below) and time.monotonic() < until:
        time.sleep(0.02)


def _descendants(pid: int) -> list[int]:
    """The processes below one; none where there is no /proc."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(entry.parent.name))
    found, left = [], [pid]
    while left:
        children = parents.get(left.pop(), [])
        found += children
        left += children
    return found


def _last_lines(path: Path) -> str:
    """The last lines of the program's output, without the launcher's report."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    end = next((i for i, line in enumerate(lines) if _LAUNCHERS.match(line)), len(lines))
    said = [each for each in lines[:end] if each.strip() and not _STARTING.match(each)]
    return "".join(f"\n    {line}" for line in said[-_LINES:])
