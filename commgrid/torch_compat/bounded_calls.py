"""Bounded calls: calls of NCCL's that may never return, on a thread beside the program's.

Nothing stops NCCL while it connects a communicator, or while it waits for a CUDA graph to be freed.
If such a call never returns, its thread cannot be ended, and torch would wait for it at exit. So
the process exits with a status of its own, `STUCK`.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import TypeVar, cast

import torch

from commgrid.errors import CommGridError, PeerFailedError
from commgrid.rendezvous.timeouts import timeouts
from commgrid.store.client import Asked
from commgrid.torch_compat import nccl as torch_nccl

STUCK = 76
"""Exit status of a process in which a call of NCCL's has not returned."""

_log = logging.getLogger("commgrid")
_unended: list[tuple[Asked, str]] = []

T = TypeVar("T")


def bounded(
    seconds: float,
    call: Callable[[], T],
    doing: Callable[[], str],
    late: Callable[[], CommGridError],
    lost: Callable[[], str | None] = lambda: None,
) -> T:
    """Return what a call of NCCL's returns, if it does within so many seconds.

    Args:
        seconds: to wait.
        call: is made on another thread, on this rank's device.
        doing: describes the call for the log, such as `connecting tp`.
        late: makes the error to raise if it does not return.
        lost: returns the failure if another rank is known to be gone.

    Raises:
        PeerFailedError: another rank is gone, and the call did not return within `Timeouts.leave`
            after that.
        CommGridError: what `late` makes; or the call's own error.
    """
    device = torch_nccl.rank_device()

    def on_device() -> T:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a thread begins with device 0
        return call()

    asked, until = Asked(on_device), time.monotonic() + seconds
    failure: str | None = None
    try:
        while not asked.is_over(min(timeouts().beat, max(until - time.monotonic(), 0.0))):
            if failure is None and (failure := lost()) is not None:
                until = min(until, time.monotonic() + timeouts().leave)
            if time.monotonic() >= until:
                raise late() if failure is None else PeerFailedError(failure)
        return cast(T, asked.answer())
    finally:
        if not asked.is_over():
            _unended.append((asked, doing()))


def end_process(why: str) -> None:
    """End this process at once, with the status `STUCK`.

    Args:
        why: the call that does not return; begins the log line.
    """
    _log.critical("%s, which nothing can stop; this process ends with status %d", why, STUCK)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(STUCK)


def _at_exit() -> None:
    if calls := [doing for asked, doing in _unended if not asked.is_over()]:
        end_process(f"at the end of the program NCCL is still {' and '.join(calls)}")


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_unended.clear)  # in which the threads are not there
