"""Whether a thread of this machine waits: observed, in place of a sleep "until the others wait".

A thread waits while the kernel says that it sleeps (state `S`), at several looks in a row. A busy
machine does not look like that: who waits for a core is in state `R`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

LOOKS = 5
LOOK_SECONDS = 0.01
HANG_SECONDS = 120.0  # ends a test that hangs


def until(true: Callable[[], object], what: str) -> None:
    """Wait for a condition.

    Raises:
        AssertionError: it does not become true, and the test would hang.
    """
    end = time.monotonic() + HANG_SECONDS
    while not true():
        assert time.monotonic() < end, f"not in {HANG_SECONDS:g} s: {what}"
        time.sleep(LOOK_SECONDS)  # a poll


def state(pid: int, thread: int) -> str:
    """The state of a thread as the kernel names it, such as S; X, dead, if there is none."""
    try:
        stat = Path(f"/proc/{pid}/task/{thread}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    return stat.rpartition(")")[2].split()[0]


def sleeps(pid: int, thread: int | None = None) -> bool:
    """Whether a process's main thread, or another, is in state S; also if it has ended."""
    return state(pid, thread or pid) in "SZXT"


def stop(pid: int) -> None:
    """Stop a process, and return when all its threads stand still.

    `os.kill` returns earlier: a thread that runs on another core may still answer a request.
    """
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    until(
        lambda: all(state(pid, int(each.name)) in "ZXT" for each in tasks.iterdir()),
        f"all threads of process {pid} are stopped",
    )


def until_waiting(pids: Iterable[int], thread: int | None = None) -> None:
    """Wait until every process waits for something, or has ended.

    The caller knows that each has come as far as the call in question: it has seen a mark that
    the process left right before.
    """
    waiting, looks = list(pids), 0

    def all_sleep() -> bool:
        nonlocal looks
        looks = looks + 1 if all(sleeps(pid, thread) for pid in waiting) else 0
        return looks >= LOOKS

    until(all_sleep, f"processes {waiting} wait")


def until_threads_wait(threads: Iterable[threading.Thread]) -> None:
    """As `until_waiting`, for threads of this process."""
    for each in threads:
        if each.native_id is not None:
            until_waiting([os.getpid()], each.native_id)


def comes(name: str) -> None:
    """Tell other ranks that this process is about to wait in a call, through torch's store."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"comes: {name}", str(os.getpid()))


def until_waits(*names: str) -> None:
    """Wait until processes that have told `comes` are waiting, or have ended."""
    store = dist.distributed_c10d._get_default_store()
    keys = [f"comes: {name}" for name in names]
    store.wait(keys, timedelta(seconds=HANG_SECONDS))
    until_waiting([int(store.get(key)) for key in keys])
