"""Dumps of this process: what a thread writes for `commgrid dump`, also in a job without a trace.

SIGUSR1 has the thread write where each thread of the process is, and what was recorded:

    <tmp>/commgrid-<user>/4711.stacks      `faulthandler` writes these at once
    <tmp>/commgrid-<user>/4711.torch       the dump of torch's flight recorder, a pickle
    rank_00003.ring, rank_00003.stacks     if the process records

A file `4711.ask` has it gather the records of ranks on other hosts; `4711.asked` then holds the
ranks that have answered.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import pickle
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from commgrid.call_records import files as trace_files
from commgrid.call_records.processes import file_of, write_whole
from commgrid.errors import CommGridError
from commgrid.recording import recorder
from commgrid.recording.remote import others
from commgrid.recording.stacks import stacks_since, stacks_size
from commgrid.rendezvous.timeouts import timeouts
from commgrid.torch_compat import world as torch_world

_log = logging.getLogger("commgrid")

FOLDER = "commgrid_trace"
"""Folder of the records that a signal asks for, if COMMGRID_TRACE names none."""


class _Dumping:
    """The thread, which looks once a beat for requests, and for stacks that a signal wrote."""

    def __init__(self) -> None:
        self._seen = stacks_size()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commgrid dumps", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it."""
        self._ended.set()
        self._thread.join(2 * timeouts().beat)

    def _run(self) -> None:
        while not self._ended.wait(timeouts().beat):
            self._seen = min(self._seen, stacks_size())  # a new grid has a new file
            try:
                if stacks := stacks_since(self._seen):
                    self._seen += len(stacks)
                    _write_records(stacks)
                    _write_torchs()
                if file_of(os.getpid(), "ask").exists():
                    _gather()
            except Exception:
                _log.exception("commgrid dump gets no answer from this rank")


_dumping: list[_Dumping] = []  # one at most
os.register_at_fork(after_in_child=_dumping.clear)  # which does not have the thread
_lock = threading.Lock()


def follow() -> None:
    """Write dumps as long as this process has a grid."""
    with _lock:
        if not _dumping:
            _dumping.append(_Dumping())
            atexit.unregister(stop)
            atexit.register(stop)  # its thread must not be within torch when Python is taken down


def stop() -> None:
    """End the thread."""
    with _lock:
        if _dumping:
            _dumping.pop().stop()


def _write_records(stacks: bytes) -> None:
    """Write what this process has recorded, and the stacks beside it."""
    own = recorder.current()
    if own is not None:
        with suppress(CommGridError, OSError):
            # A ring in a file is as current as it can be.
            path = own.ring.path or own.save(Path(FOLDER))
            with path.with_suffix(".stacks").open("ab") as file:
                file.write(stacks)
            print(f"commgrid: rank {own.rank} has written {path}", file=sys.stderr)


def _write_torchs() -> None:
    """Write what torch has recorded."""
    about = {"host": socket.gethostname(), "at": time.time()}
    data = pickle.dumps({**torch_world.flight_records(), "commgrid": about})
    with suppress(OSError):
        write_whole(file_of(os.getpid(), "torch"), data)


def _gather() -> None:
    """Ask all ranks for their records over the store, and write them where `commgrid dump` says."""
    ask = file_of(os.getpid(), "ask")
    request = json.loads(ask.read_bytes())
    ask.unlink()
    own = recorder.current()
    records = others(torch_world.world_rank(), request["timeout"])
    records += [own.contents()] if own is not None else []
    traces = trace_files.parse(records)
    for trace, data in zip(traces, records, strict=True):
        path = Path(request["folder"]) / f"rank_{trace.rank:05}.ring"
        if not path.exists():  # the file of a rank of this host has more
            path.write_bytes(data)
    with suppress(OSError):
        answered = json.dumps([trace.rank for trace in traces]).encode()
        write_whole(file_of(os.getpid(), "asked"), answered)
