"""The last collectives of this process, in a ring, each with its group and its line of code.

A record is made before the call, so a call that hangs is in the ring, its communicator's last.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any, Protocol

import torch.distributed as dist

from commgrid.call_records.operations import TRANSFERS
from commgrid.call_records.ring import Ring
from commgrid.errors import CommGridError
from commgrid.health.detector import Watch
from commgrid.recording.places import GroupNames, caller, place_of
from commgrid.recording.stacks import Termination
from commgrid.torch_compat import interposer as torch_calls
from commgrid.torch_compat.interposer import ByIdentity

CAPACITY = 100_000
"""Records that are kept, the last ones; 128 bytes each."""


class ObservedGroup(Protocol):
    """A communicator whose calls are compared."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def group(self) -> dist.ProcessGroup: ...
    @property
    def suspended(self) -> bool: ...


class ObservedGrid(Protocol):
    """A grid, as its check sees it."""

    @property
    def identity(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def communicators(self) -> Sequence[ObservedGroup]: ...
    @property
    def timeout(self) -> float | None: ...
    @property
    def watch(self) -> Watch | None: ...
    def members_of_communicators(self) -> dict[str, list[int]]: ...
    def before_destroy(self, callback: Callable[[], object], /) -> None: ...


class Recorder:
    """Keeps the last calls of this process in a ring (`commgrid.call_records.ring`).

    Args:
        capacity: how many.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.ring = Ring(capacity)
        self.paused = False
        """Whether nothing is recorded until the next grid is made."""
        self.rank = 0
        self._called = GroupNames(lambda name, ranks: self.ring.note("members", name, ranks))
        self._job = ""
        self._termination: Termination | None = None
        self._numbers: dict[str, int] = {}
        self._turns: dict[tuple[str, str, int | None], int] = {}
        # By file too: code objects of two files may be equal.
        self._places: dict[tuple[str, CodeType | None, int], int] = {}
        self._waits: dict[int, int] = {}
        self._batched: dict[int, list[int]] = {}  # of batches that are being started
        self._together: dict[int, list[int]] = {}  # by the last call of a batch, the others
        self._pending: ByIdentity[int] = ByIdentity()
        self._lock = threading.RLock()  # a handler of a signal may issue calls, or save

    @property
    def job(self) -> str:
        """The name of this job, the same on all its ranks; "": unknown."""
        return self._job

    @job.setter
    def job(self, name: str) -> None:
        with self._lock:
            if name != self._job:
                self.ring.note("job", name)
            self._job = name

    def as_dict(self, last: int | None = None) -> dict[str, Any]:
        """All of it, as a file holds it; times in nanoseconds of a clock that `wall` tells.

        Args:
            last: number of calls of each communicator, at most; None: all in the ring.
        """
        with self._lock:
            return self.ring.as_dict(last)

    def meet(self, rank: int, members: Mapping[str, Sequence[int]]) -> None:
        """Notes the communicators of a grid that was made, and counts their calls from here.

        Before a failure, ranks may have issued different calls on other groups of these names.
        """
        with self._lock:
            self.paused = False
            self.set_rank(rank)
            now = time.perf_counter_ns()
            for name, ranks in members.items():
                self._called.meet(name, ranks)
                if name in self._numbers:
                    self.ring.note("since", name, now)
                    self.ring.entered(self.ring.group(name), 0)
                    del self._numbers[name]
            self._turns = {key: n for key, n in self._turns.items() if key[0] not in members}
            self._waits.clear()

    def set_rank(self, rank: int) -> None:
        """Note which rank this process is."""
        if rank != self.rank:
            self.ring.note("rank", rank)
        self.rank = rank

    def keep_in(self, folder: Path) -> None:
        """Have the ring in a file from now on, `rank_00003.ring`, which outlives the process.

        Raises:
            CommGridError: it cannot be made.
        """
        path = folder / f"rank_{self.rank:05}.ring"
        with self._lock:
            if path == self.ring.path:
                return
            try:
                before, self.ring = self.ring, self.ring.moved(path)
                before.close()
                path.with_suffix(".json").unlink(missing_ok=True)  # of an earlier run
                with suppress(OSError):
                    self._forget_termination()
                    self._termination = Termination(path.with_suffix(".sigterm"))
            except OSError as error:
                raise CommGridError(
                    f"{path}: cannot be written: {error.strerror or error}"
                ) from error

    def _forget_termination(self) -> None:
        if self._termination is not None:
            ended, self._termination = self._termination, None
            ended.close()

    def leave_to_parent(self) -> None:
        """In a forked process: SIGTERM is not the parent's."""
        if self._termination is not None:
            self._termination.unregister()
            self._termination = None

    def close(self) -> None:
        """Write nothing more."""
        self._forget_termination()
        self.ring.close()

    def save(self, folder: Path) -> Path:
        """Writes `rank_00003.json` into a folder, which is made if need be.

        Raises:
            CommGridError: it cannot be written.
        """
        path = folder / f"rank_{self.rank:05}.json"
        half = path.with_suffix(".half")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            half.write_text(json.dumps(self.as_dict()), encoding="utf-8")
            half.rename(path)
        except OSError as error:
            raise CommGridError(f"{path}: cannot be written: {error.strerror or error}") from error
        return path

    def begins(self, its_group: dist.ProcessGroup, made: torch_calls.Arguments) -> int:
        if self.paused:
            return -1
        place = caller()
        with self._lock:
            name, ring = self._called(its_group), self.ring
            is_transfer = made.operation in TRANSFERS
            of = (name, made.operation, made.peer) if is_transfer else (name, "", None)
            code, line = place
            at = "" if code is None else code.co_filename, code, line
            where = self._places.get(at)
            if where is None:
                where = self._places[at] = ring.text(place_of(code, line))
            number, turn = self._numbers.get(name, 0), self._turns.get(of, 0)
            self._numbers[name], self._turns[of] = number + 1, turn + 1
            group = ring.group(name)
            if not is_transfer:
                ring.entered(group, turn + 1)
            return ring.add(
                group, number, made.operation, made.shape, made.dtype, made.size, made.output,
                made.peer, where, time.perf_counter_ns(), turn,
                torch_calls.batch() if is_transfer else 0, made.reduction,
            )  # fmt: skip

    def issued(self, call: object, work: dist.Work | None) -> None:
        assert isinstance(call, int)
        if call < 0:
            return
        now = time.perf_counter_ns()
        with self._lock:
            self.ring.issued(call, now)
            batch = torch_calls.batch()
            if work is None and batch:  # NCCL has one work for all, which the last call gets
                self._batched.setdefault(batch, []).append(call)
            elif work is None:
                self.ring.ended(call, now)
            elif others := self._batched.pop(batch, None):
                self._together[call] = others
        if work is not None:
            self._pending[work] = call

    def failed(self, call: object) -> None:
        """Its record stays without an end."""

    def waits(self, work: dist.Work) -> None:
        call = self._pending.get(work)
        if call is not None and not self.paused:
            thread = threading.get_ident()
            with self._lock:
                before = self._waits.get(thread)
                if before is not None:  # a wait that has failed, and is over
                    self.ring.waits(before, False)
                self._waits[thread] = call
                self.ring.waits(call, True)

    def waited(self, work: dist.Work, failed: bool) -> None:
        if failed:
            return  # the call has no end, and is what this thread was waiting for
        call = self._pending.pop(work)
        if call is not None:
            with self._lock:
                now = time.perf_counter_ns()
                for each in (call, *self._together.pop(call, ())):
                    self.ring.ended(each, now)
                self._waits.pop(threading.get_ident(), None)


_current: list[Recorder] = []


def follow(asked: bool, rank: int, members: Callable[[], Mapping[str, list[int]]]) -> None:
    """Start recording if asked to or COMMGRID_TRACE is set, and note a grid's communicators.

    `COMMGRID_TRACE=1` begins to record; `COMMGRID_TRACE=DIR` has the records in a file there, which
    is as current as the process however that ends.

    Args:
        asked: whether the program does.
        rank: of this process.
        members: returns those of the grid's communicators.
    """
    folder = folder_of_environment()
    is_on = os.environ.get("COMMGRID_TRACE", "") not in ("", "0")
    recorder = start() if asked or is_on else current()
    if recorder is None:
        return
    torch_calls.listen(recorder)  # it may have rested since the last grid
    recorder.meet(rank, members())
    if folder is not None:
        try:
            recorder.keep_in(folder.absolute())
        except CommGridError as error:
            print(f"commgrid: the trace is kept in memory only: {error}", file=sys.stderr)
        # The last registered is the first called: while torch.distributed is still up.
        atexit.unregister(_save_at_exit)
        atexit.register(_save_at_exit, recorder, folder.absolute())


def folder_of_environment() -> Path | None:
    """The folder that COMMGRID_TRACE names, if it does."""
    named = os.environ.get("COMMGRID_TRACE", "")
    return Path(named) if named not in ("", "0", "1") else None


def _save_at_exit(recorder: Recorder, folder: Path) -> None:
    error = getattr(sys, "last_exc", getattr(sys, "last_value", None))
    if not isinstance(error, KeyboardInterrupt):  # after Ctrl-C no rank has ended too early
        recorder.ring.end()
    recorder.close()
    try:
        saved = recorder.save(folder)
        if recorder.ring.path is not None:
            saved.with_suffix(".ring").unlink(missing_ok=True)  # which it holds whole
    except CommGridError as error:
        print(f"commgrid: the trace is lost: {error}", file=sys.stderr)


def start(capacity: int = CAPACITY) -> Recorder:
    """Begin to record, or go on if there is a recorder."""
    if not _current:
        _current.append(Recorder(capacity))
    torch_calls.listen(_current[0])
    return _current[0]


def stop() -> Recorder | None:
    """Ends recording; the recorder keeps what it has."""
    if not _current:
        return None
    torch_calls.stop(_current[0])
    return _current.pop()


def rest() -> None:
    """Pause until the next grid, so that torch's methods are its own meanwhile."""
    if _current:
        torch_calls.stop(_current[0])


def current() -> Recorder | None:
    """Return this process's recorder, None if it does not record."""
    return _current[0] if _current else None


def _leave_to_parent() -> None:
    """In a forked process: what it does is not its parent's, whose memory the ring is.

    Another thread of the parent may have held a lock, so none is taken here.
    """
    for each in _current:
        each.paused = True
        each.leave_to_parent()
    _current.clear()
    atexit.unregister(_save_at_exit)


os.register_at_fork(after_in_child=_leave_to_parent)
