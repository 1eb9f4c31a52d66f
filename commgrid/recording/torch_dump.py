"""Dump of torch's flight recorder: a thread writes it after SIGUSR1, also in a job without a trace.

<tmp>/commgrid-<user>/4711.nccl, 4711.gloo     torch's own pickles, with the ranks of each group
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from commgrid.call_records.processes import folder_of_user
from commgrid.recording.stacks import stacks_size
from commgrid.rendezvous.timeouts import timeouts
from commgrid.torch_compat.world import flight_records

_log = logging.getLogger("commgrid")


class _Dumping:
    """The thread, which looks once a beat whether a signal has had stacks written."""

    def __init__(self) -> None:
        self.grids: set[str] = set()
        self._seen = stacks_size()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commgrid dumps", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether it runs; a forked process does not have it."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End it."""
        self._ended.set()
        self._thread.join(2 * timeouts().beat)

    def _run(self) -> None:
        while not self._ended.wait(timeouts().beat):
            size = stacks_size()
            if size > self._seen:
                try:
                    write()
                except Exception:
                    _log.exception("torch's flight recorder cannot be written")
            self._seen = size


_dumping: list[_Dumping] = []  # one at most
_lock = threading.Lock()


def follow(grid: str) -> Callable[[], None]:
    """Write dumps while a grid lives; return the function that ends it."""
    with _lock:
        if not _dumping or not _dumping[0].is_alive:
            _dumping[:] = [_Dumping()]
            atexit.unregister(_stop)
            atexit.register(_stop)  # its thread must not be within torch when Python is taken down
        _dumping[0].grids.add(grid)

    def leave() -> None:
        with _lock:
            for each in _dumping:
                each.grids.discard(grid)
        if not any(each.grids for each in _dumping):
            _stop()

    return leave


def _stop() -> None:
    with _lock:
        if _dumping:
            _dumping.pop().stop()


def write() -> None:
    """Write what torch has recorded, gloo's last: `commgrid dump` waits for that file."""
    about = {"host": socket.gethostname(), "at": time.time()}
    for backend, held in flight_records().items():
        half = folder_of_user() / f"{os.getpid()}.{backend}.half"
        with suppress(OSError):
            half.write_bytes(pickle.dumps({**held, "commgrid": about}))
            half.rename(half.with_suffix(""))
