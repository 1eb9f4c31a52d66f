"""Stacks of this process: its note for `commgrid dump`, and what SIGUSR1 and SIGTERM write."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from commgrid.call_records.processes import (
    QUIET,
    Process,
    file_of,
    folder_of_user,
    is_caught,
    remove,
    space_of_pids,
    started,
    whole_after,
    write_whole,
)

Handler = Callable[[int, FrameType | None], object] | int | None


class Termination:
    """SIGTERM writes where all threads are, and then runs the earlier handler.

    Launchers send it to the survivors, so the file tells them from the rank that failed first. If
    it is empty, `close` removes it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        self._register()
        _terminations.append(self)

    def _register(self) -> None:
        self._before = signal.getsignal(signal.SIGTERM)
        faulthandler.register(signal.SIGTERM, file=self._file, all_threads=True, chain=True)

    def run_then(self, handler: Handler) -> None:
        """Have SIGTERM write stacks, and then run another handler."""
        # `signal.signal` takes the place of faulthandler's, which does not know of it.
        faulthandler.unregister(signal.SIGTERM)
        signal.signal(signal.SIGTERM, handler)
        self._register()

    def follow(self) -> None:
        """Write stacks also before a handler that the program has set meanwhile."""
        handler = signal.getsignal(signal.SIGTERM)
        is_new = handler is not self._before and handler is not None
        if is_new and threading.current_thread() is threading.main_thread():  # Python asks for it
            self.run_then(handler)

    def close(self) -> None:
        """Have SIGTERM do what it did before."""
        self.unregister()
        os.close(self._file)
        with suppress(OSError):
            if not self._path.stat().st_size:
                self._path.unlink()

    def unregister(self) -> None:
        """Write no stacks at SIGTERM; in a forked process the file is the parent's."""
        _terminations.remove(self)
        # Else the program has set a handler since, which stays.
        if signal.getsignal(signal.SIGTERM) == self._before:
            faulthandler.unregister(signal.SIGTERM)


_terminations: list[Termination] = []  # whose files are open


def set_handler(number: int, handler: Handler) -> None:
    """Set a signal's handler; at SIGTERM stacks are written before it runs."""
    if number == signal.SIGTERM and _terminations:
        _terminations[-1].run_then(handler)
    else:
        signal.signal(number, handler)


class _Own:
    """Grids that this process has announced, and the file of its stacks (-1: none)."""

    def __init__(self) -> None:
        self.grids: set[str] = set()
        self.stacks = -1


_own = _Own()


def announce(grid: str, rank: int, world_size: int, records: Path | None) -> None:
    """Say that this process has a grid; without a place to write to, nothing is said."""
    _own.grids.add(grid)
    pid, folder = os.getpid(), folder_of_user()
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            return
        if _own.stacks < 0 and not is_caught(pid):
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
            _own.stacks = os.open(file_of(pid, "stacks"), flags, 0o600)
            faulthandler.register(signal.SIGUSR1, file=_own.stacks, all_threads=True)
        said = Process(
            pid, started(pid), space_of_pids(), rank, world_size, _job(world_size),
            " ".join(sys.argv), "" if records is None else str(records), _own.stacks >= 0,
        )  # fmt: skip
        write_whole(file_of(pid, "json"), json.dumps(asdict(said)).encode())


def _leave_to_parent() -> None:
    """In a forked process: the handlers write into the parent's files."""
    for each in list(_terminations):
        each.unregister()
    if _own.stacks >= 0 and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        faulthandler.unregister(signal.SIGUSR1)
    _own.grids, _own.stacks = set(), -1


os.register_at_fork(after_in_child=_leave_to_parent)


def withdraw(grid: str, stop: Callable[[], object]) -> None:
    """Say that a grid is no more; with the last one nothing is left of this process.

    Args:
        grid: as it was announced.
        stop: ends what reads the stacks.
    """
    if _own.grids != {grid}:
        _own.grids.discard(grid)
        return
    stop()
    _own.grids.clear()
    if _own.stacks >= 0:
        if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:  # no handler of the program's own
            faulthandler.unregister(signal.SIGUSR1)
        os.close(_own.stacks)
        _own.stacks = -1
    remove(os.getpid())


def stacks_size() -> int:
    """Bytes of this process's stacks so far."""
    with suppress(OSError):  # the file may be closed meanwhile
        if _own.stacks >= 0:
            return os.fstat(_own.stacks).st_size
    return 0


def stacks_since(size: int) -> bytes:
    """Return this process's stacks beyond so many bytes, once they are complete."""
    if stacks_size() <= size:
        return b""
    return whole_after(file_of(os.getpid(), "stacks"), size, time.monotonic() + 10 * QUIET)


def _job(world_size: int) -> str:
    names = ("MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")
    said = [os.environ.get(name, "-") for name in names]
    # Without a launcher's variables the parent process names the job.
    own = str(os.getppid()) if said == ["-"] * len(names) else ""
    return " ".join([str(world_size), *said, own])
