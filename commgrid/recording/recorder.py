"""The last collectives of this process, in a ring, each with its group and its line of code.

A record is made before the call, so a call that hangs is in the ring, its communicator's last.
"""

from __future__ import annotations

import atexit
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import torch.distributed as dist

from commgrid.call_records.operations import TRANSFERS
from commgrid.call_records.processes import boot, space_of_pids, started, write_whole
from commgrid.call_records.ring import ENDED, STOPPED, Contents, Ring
from commgrid.errors import (
    CommGridError,
    GridMismatchError,
    PeerFailedError,
    PeerTimeoutError,
    writing,
)
from commgrid.recording.counts import Begun, CallCount, ChannelCounts
from commgrid.recording.observed import ObservedGrid
from commgrid.recording.places import Stacks, group_of
from commgrid.recording.stacks import Termination
from commgrid.torch_compat import interposer as torch_calls
from commgrid.torch_compat import world as torch_world
from commgrid.torch_compat.interposer import ByIdentity
from commgrid.torch_compat.peer_errors import is_peer_failure
from commgrid.version import VERSION

CAPACITY = 100_000
"""Records that are kept, the last ones; 136 bytes each."""
_ON, _OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


class _Thread(threading.local):
    """A thread's number by its first call, and its call under way, if that is recorded."""

    begun: Begun | None = None

    def __init__(self, numbers: Iterator[int]) -> None:
        self.number = next(numbers) & 0xFFFF


class Recorder:
    """Keeps the last calls of this process in a ring (`commgrid.call_records.ring`).

    Args:
        capacity: how many.
    """

    ended: ClassVar[int] = 0
    """How many recordings the program has ended."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.ring = Ring(capacity)
        pid, host, its_boot = os.getpid(), socket.gethostname(), boot()
        host = f"{host} {its_boot[:8]}".rstrip()  # two hosts may have one name
        self.ring.note("process", pid, started(pid), its_boot, space_of_pids(), host, VERSION)
        self.paused = False
        """Whether nothing is recorded until the next grid is made."""
        if self.ended:
            self.ring.note("earlier", self.ended)
        self.is_asked, self.holders = False, 0
        """Whether the program records, and how many do: also grids that compare their calls."""
        self.rank = 0
        self.job = ""
        """The name of this job, the same on all its ranks; "": unknown."""
        self._termination: Termination | None = None
        self._channels: ByIdentity[ChannelCounts] = ByIdentity()
        self._by_key: dict[tuple[str, tuple[int, ...]], ChannelCounts] = {}
        self._stacks = Stacks(self._number_of)
        self.thread = _Thread(itertools.count())
        self._failed: dict[int, int] = {}  # by thread, the call whose wait has failed
        self._batched: dict[int, list[int]] = {}  # of batches that are being started
        self._together: dict[int, list[int]] = {}  # by the last call of a batch, the others
        self._pending: ByIdentity[int] = ByIdentity()
        self._lock = threading.RLock()  # a handler of a signal may issue calls, or save

    def contents(self, last: int | None = None) -> bytes:
        """Return a copy of the ring, which `call_records.files.parse` reads.

        Args:
            last: number of calls of each communicator, at most; None: all.
        """
        with self._lock:
            self.ring.touch()
            found = Contents(self.ring.memory)
        return found.packed(last)  # the program's calls do not wait for it

    def meet(self, grid: ObservedGrid) -> None:
        """Note the communicators of a grid, and record again after a failure."""
        with self._lock:
            self.paused = False
            for thread in list(self._failed):  # another grid takes the place of theirs
                self._goes_on(thread)
            self.set_rank(grid.rank)
            for each in grid.communicators:
                if not each.suspended:
                    self._channel(each.group)

    def set_rank(self, rank: int) -> None:
        """Note which rank this process is."""
        if rank != self.rank:
            self.ring.note("rank", rank)
        self.rank = rank

    def set_job(self, name: str) -> None:
        """Note the job's name."""
        with self._lock:
            if name != self.job:
                self.ring.note("job", name)
            self.job = name

    def step(self, number: int) -> None:
        """Note that a training step begins."""
        with self._lock:
            self.ring.step(number, time.perf_counter_ns())

    def keep_in(self, folder: Path) -> None:
        """Have the ring in a file from now on, `rank_00003.ring`, which outlives the process.

        Raises:
            CommGridError: it cannot be made.
        """
        path = folder / f"rank_{self.rank:05}.ring"
        with self._lock:
            if path == self.ring.path:
                return
            with writing(f"{path}", CommGridError):
                before, self.ring = self.ring, self.ring.moved(path)
                before.close()
                with suppress(OSError):
                    if before.path is not None and before.path.parent == folder:
                        before.path.unlink()  # of the rank that this process was
                    self._forget_termination()
                    self._termination = Termination(path.with_suffix(".sigterm"))

    def _forget_termination(self) -> None:
        if self._termination is not None:
            ended, self._termination = self._termination, None
            ended.close()

    def end(self, state: int) -> None:
        """Write nothing more than how the process ends."""
        self.ring.end(state)
        self._forget_termination()
        self.ring.close()

    def save(self, folder: Path) -> Path:
        """Writes `rank_00003.ring` into a folder, which is made if need be.

        Raises:
            CommGridError: it cannot be written.
        """
        path = folder.absolute() / f"rank_{self.rank:05}.ring"
        if self.ring.path is not None and path.resolve() == self.ring.path.resolve():
            return path  # where all is already
        with writing(f"{path}", CommGridError):
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, self.contents())
        return path

    # -- a call, from its beginning to its end ------------------------------------------

    def _channel(self, its_group: dist.ProcessGroup) -> ChannelCounts:
        """The record of a communicator, which a resumed group continues."""
        found = self._channels.get(its_group)
        if found is None:
            if torch_world.is_initialized():  # perhaps only since the recording began
                self.set_rank(torch_world.world_rank())
            group = group_of(its_group)
            of = group.key, group.ranks
            found = self._by_key.get(of)
            if found is None:
                entry = self.ring.entry("group", group.name, group.ranks, group.key, group.backend)
                found = self._by_key[of] = ChannelCounts(entry)
            self._channels[its_group] = found
        return found

    def _number_of(self, places: list[tuple[str, int, str]]) -> int:
        """The ring's number of a stack; 0: there is no room, or no place."""
        numbers = tuple(self.ring.entry("place", *place) for place in places)
        return self.ring.entry("stack", numbers) if numbers and all(numbers) else 0

    def begins(self, its_group: dist.ProcessGroup, made: torch_calls.Arguments) -> Begun | None:
        self.thread.begun = None
        if self.paused:
            return None
        if self._termination is not None:
            self._termination.follow()
        with self._lock:
            if self._failed:
                self._goes_on(self.thread.number)
            stack, operation, ring = self._stacks(), made.operation, self.ring
            channel = self._channel(its_group)
            turns: CallCount = channel
            batch = 0
            if operation in TRANSFERS:
                batch, of = torch_calls.batch(), (operation, made.peer, made.tag)
                if of not in channel.pairs:
                    channel.pairs[of] = CallCount(ring.entry("pair", channel.entry, *of))
                turns = channel.pairs[of]
            turn = turns.count
            row = ring.add(
                channel.entry, channel.calls,
                ring.entry("kind", operation, made.dtype, made.reduction), made.shape, made.size,
                made.output, made.peer, stack, time.perf_counter_ns(), turn, batch, made.tag,
                self.thread.number, made.sizes,
            )  # fmt: skip
            channel.calls += 1
            turns.count = turn + 1
            if row >= 0:
                ring.count(turns.entry, turn + 1)
            self.thread.begun = Begun(row, channel, turns, turn)
        return self.thread.begun

    def issued(self, call: object, work: dist.Work | None) -> None:
        if not isinstance(call, Begun) or call.row < 0:
            return
        row, now = call.row, time.perf_counter_ns()
        with self._lock:
            self.ring.issued(row, now)
            if work is None or self._batched:
                batch = torch_calls.batch()
                if work is None and batch:  # NCCL has one work for all, which the last call gets
                    self._batched.setdefault(batch, []).append(row)
                elif work is None:
                    self.ring.ended(row, now)
                elif others := self._batched.pop(batch, None):
                    self._together[row] = others
            if work is not None:
                self._pending[work] = row

    def failed(self, call: object) -> None:
        """Take back a call that torch has refused: made again, it has the same turn.

        A call that has failed because of a peer stays, without an end, since peers may wait in it.
        """
        error = sys.exc_info()[1]
        if not isinstance(call, Begun):
            return
        with self._lock:
            if error is not None and _is_of_peers(error):
                self.ring.issued(call.row, time.perf_counter_ns())
                self._stays(call.row)
                return
            call.is_refused = True
            self.ring.raised(call.row)
            if call.turns.count == call.turn + 1:
                call.turns.count = call.turn
                call.channel.calls -= 1
                if call.row >= 0:
                    self.ring.count(call.turns.entry, call.turn)

    def waits(self, work: dist.Work) -> None:
        call = self._pending.get(work)
        if call is not None and not self.paused:
            thread = self.thread.number
            with self._lock:
                if self._failed:
                    self._goes_on(thread)
                self.ring.waits(call, True, thread)

    def waited(self, work: dist.Work, failed: bool) -> None:
        if failed:
            call = self._pending.get(work)
            if call is not None:
                self._stays(call)
            return
        call = self._pending.pop(work)
        if call is not None:
            with self._lock:
                now = time.perf_counter_ns()
                self.ring.ended(call, now)
                for each in self._together.pop(call, ()) if self._together else ():
                    self.ring.ended(each, now)

    def _stays(self, row: int) -> None:
        """Note that this thread has failed in a call: it counts as waiting until its next one."""
        thread = self.thread.number
        with self._lock:
            self._goes_on(thread)
            self.ring.waits(row, True, thread)
            self._failed[thread] = row

    def _goes_on(self, thread: int) -> None:
        """Clear the wait of a thread in the call in which it has failed."""
        row = self._failed.pop(thread, None)
        if row is not None:
            self.ring.waits(row, False, thread)


def _is_of_peers(error: BaseException) -> bool:
    """Whether a call has raised because of another rank, so that it may have been issued."""
    peers = dist.DistError, PeerFailedError, PeerTimeoutError, GridMismatchError
    return isinstance(error, peers) or is_peer_failure(error)


_current: list[Recorder] = []
_in_file: list[Recorder] = []  # the recorder whose ring is a file, even after it ended


def follow(asked: bool, grid: ObservedGrid) -> None:
    """Start recording if asked to or COMMGRID_TRACE is set, and note a grid's communicators.

    `COMMGRID_TRACE=1` begins to record; `COMMGRID_TRACE=DIR` keeps the records in a file there,
    complete even if the process is killed.

    Args:
        asked: whether the program does.
        grid: which was made.
    """
    is_on, folder = asked_by_environment()
    recorder = start() if asked or is_on else current()
    if recorder is None:
        return
    torch_calls.listen(recorder)  # it may have rested since the last grid
    recorder.meet(grid)
    if folder is not None:
        if _in_file and _in_file[0] is not recorder:
            _in_file[0].end(ENDED)  # whose file is taken
        _in_file[:] = [recorder]
        try:
            recorder.keep_in(folder.absolute())
        except CommGridError as error:
            print(f"commgrid: the trace is kept in memory only: {error}", file=sys.stderr)
        # The last registered is the first called: while torch.distributed is still up.
        atexit.unregister(_end_at_exit)
        atexit.register(_end_at_exit, recorder)


def asked_by_environment() -> tuple[bool, Path | None]:
    """Return whether COMMGRID_TRACE asks to record, and the folder that it names, if it does."""
    named = os.environ.get("COMMGRID_TRACE", "").strip()
    if named.lower() in _OFF:
        return False, None
    return True, None if named.lower() in _ON else Path(named)


def _end_at_exit(recorder: Recorder) -> None:
    error = getattr(sys, "last_exc", getattr(sys, "last_value", None))
    # After Ctrl-C no rank has ended too early.
    recorder.end(STOPPED if isinstance(error, KeyboardInterrupt) else ENDED)


def end_stopped() -> None:
    """Note that this process ends since it was told to, by Ctrl-C or SIGTERM."""
    for each in (*_current, *_in_file):
        each.ring.end(STOPPED)


def start(capacity: int = CAPACITY) -> Recorder:
    """Begin to record for the program, or go on if there is a recorder."""
    found = hold(capacity)
    found.holders -= found.is_asked
    found.is_asked = True
    return found


def stop() -> Recorder | None:
    """End the program's recording; the recorder keeps what it has."""
    found = current()
    if found is not None and found.is_asked:
        found.is_asked = False
        release(found)
        Recorder.ended += 1
        return found
    return None


def hold(capacity: int = CAPACITY) -> Recorder:
    """Record for one holder more, such as a grid that compares its calls, until `release`."""
    if not _current:
        _current.append(Recorder(capacity))
    _current[0].holders += 1
    torch_calls.listen(_current[0])
    return _current[0]


def release(found: Recorder) -> None:
    """End what `hold` began; the last release stops the recorder."""
    found.holders -= 1
    if not found.holders and found in _current:  # else this process was forked meanwhile
        torch_calls.stop(found)
        _current.remove(found)
        found.ring.over()


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
    _current.clear()
    _in_file.clear()
    atexit.unregister(_end_at_exit)


os.register_at_fork(after_in_child=_leave_to_parent)
