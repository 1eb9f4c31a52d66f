"""The last collectives of this process, in a ring, each with its group and its line of code.

A record is made before the call: a call that never returns is the last of its communicator.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from commgrid.errors import CommGridError
from commgrid.planning.rank_lists import describe_ranks
from commgrid.runtime.libraries import OWN, is_programs
from commgrid.torch_compat import calls as torch_calls

FORMAT = 1
"""Version of the file format; it rises with changes that readers must handle."""

CAPACITY = 100_000
"""Records that are kept, the last ones; about 300 bytes each."""


@dataclass(slots=True, eq=False)
class Record:
    """One collective, or one half of a transfer.

    Args:
        group: what the group is called: the names of a commgrid communicator with commas, or how
            torch describes another.
        number: how many this rank had issued on it before.
        operation: such as `all_reduce`.
        shape, dtype: of the input, for `recv` of the output; of several tensors those of the
            first.
        bytes: of all tensors.
        peer: the group rank of a transfer's other side, or of the root of a collective with one.
        turn: how many collectives this rank had issued on it before; of a transfer, how many in
            its direction with this peer.
        code, line: where the program called.
        began, issued, ended: nanoseconds of `time.perf_counter_ns`; `ended` is when the wait for it
            was over, None if there was no wait.
    """

    group: str
    number: int
    operation: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    peer: int | None
    code: CodeType | None
    line: int
    began: int
    turn: int = 0
    issued: int | None = None
    ended: int | None = None

    @property
    def where(self) -> str:
        """File, line and function of the call."""
        return place_of(self.code, self.line)

    @property
    def seconds(self) -> float | None:
        """From the call to the end of the wait; None where there was none yet."""
        return None if self.ended is None else (self.ended - self.began) / 1e9


@dataclass(eq=False)
class Recorder:
    """Keeps the last calls of this process.

    Args:
        capacity: how many.
        total: how many there have been.
        over: whether the process ends.
        paused: whether nothing is recorded until the next grid is made.
        rank: of this process.
        members: of each communicator of its grids, by its names with commas, the ranks.
        job: what all ranks of this job call it, and no other job; "": that is not known.
    """

    capacity: int = CAPACITY
    records: deque[Record] = field(init=False)
    total: int = 0
    over: bool = False
    paused: bool = False
    rank: int = 0
    members: dict[str, list[int]] = field(default_factory=dict)
    job: str = ""
    _since: dict[str, int] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)
    _turns: dict[tuple[str, str, int | None], int] = field(default_factory=dict)
    _batches: deque[list[Any]] = field(init=False)
    _waits: dict[int, Record] = field(default_factory=dict)
    _names: WeakKeyDictionary[dist.ProcessGroup, str] = field(default_factory=WeakKeyDictionary)
    _pending: WeakKeyDictionary[dist.Work, Record] = field(default_factory=WeakKeyDictionary)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.records = deque(maxlen=self.capacity)
        self._batches = deque(maxlen=self.capacity)

    @property
    def dropped(self) -> int:
        """How many are not kept any more."""
        return self.total - len(self.records)

    def as_dict(self, last: int | None = None) -> dict[str, Any]:
        """All of it, as a file holds it; times in nanoseconds of a clock that `wall` tells.

        Args:
            last: number of calls of each communicator, at most; None: all in the ring.
        """
        with self._lock:
            records, dropped = list(self.records), self.dropped
            entered = {key[0]: n for key, n in self._turns.items() if not key[1]}
            members, waits = dict(self.members), list(self._waits.values())
            since, batches = dict(self._since), [each[1:] for each in self._batches]
        if last is not None:
            kept = _last_of_each(records, last)
            dropped += len(records) - len(kept)
            records = kept
        return {
            "format": FORMAT, "rank": self.rank, "wall": time.time(),
            "monotonic": time.perf_counter_ns(), "dropped": dropped, "members": members,
            "over": self.over, "waits": [[r.group, r.number] for r in waits], "entered": entered,
            "since": since, "batches": batches, "job": self.job,
            "calls": [
                [r.group, r.number, r.operation, list(r.shape), r.dtype, r.bytes, r.peer, r.where,
                 r.began, r.issued, r.ended, r.turn]
                for r in records
            ],
        }  # fmt: skip

    def meet(self, rank: int, members: Mapping[str, list[int]]) -> None:
        """Notes the communicators of a grid that was made, and counts their calls from here.

        Before a failure, ranks may have issued different calls on other groups of these names.
        """
        with self._lock:
            self.rank, self.paused = rank, False
            self.members.update(members)
            now = time.perf_counter_ns()
            for name in members.keys() & self._numbers.keys():
                self._since[name] = now
                del self._numbers[name]
            self._turns = {key: n for key, n in self._turns.items() if key[0] not in members}
            self._waits.clear()
            self._batches.clear()

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

    def begins(
        self,
        its_group: dist.ProcessGroup,
        operation: str,
        tensors: Sequence[Tensor],
        peer: int | None,
    ) -> Record:
        name = self._names.get(its_group)
        if name is None:
            name = self._name(its_group)
        code, line = caller()
        first = tensors[0] if tensors else None
        record = Record(
            name, 0, operation,
            () if first is None else tuple(first.shape),
            "" if first is None else DTYPES.get(first.dtype, str(first.dtype)),
            first.nbytes if len(tensors) == 1 and first is not None
            else sum(each.nbytes for each in tensors), peer, code, line, time.perf_counter_ns(),
        )  # fmt: skip
        if self.paused:
            return record
        with self._lock:
            record.number = self._numbers.get(name, 0)
            self._numbers[name] = record.number + 1
            of = (name, operation, peer) if operation in _TRANSFERS else (name, "", None)
            record.turn = self._turns.get(of, 0)
            self._turns[of] = record.turn + 1
            self.total += 1
            self.records.append(record)
            if of[1] and (batch := torch_calls.batch()):
                if not self._batches or self._batches[-1][:2] != [batch, name]:
                    self._batches.append([batch, name, record.number, record.number])
                self._batches[-1][3] = record.number
        return record

    def issued(self, call: object, work: dist.Work | None) -> None:
        assert isinstance(call, Record)
        call.issued = time.perf_counter_ns()
        if work is None:
            call.ended = call.issued
        else:
            call.ended = None
            self._pending[work] = call

    def failed(self, call: object) -> None:
        """Its record stays without an end."""

    def waits(self, work: dist.Work) -> None:
        record = self._pending.get(work)
        if record is not None and not self.paused:
            self._waits[threading.get_ident()] = record

    def waited(self, work: dist.Work, failed: bool) -> None:
        if failed:
            return  # the call has no end, and is what this thread was waiting for
        record = self._pending.pop(work, None)
        if record is not None:
            record.ended = time.perf_counter_ns()
            self._waits.pop(threading.get_ident(), None)

    def _name(self, group: dist.ProcessGroup) -> str:
        """Note a group's name and members."""
        ranks = list(dist.get_process_group_ranks(group))
        name = _called(group)
        if self.members.setdefault(name, ranks) != ranks:  # another's; nobody else's has its ranks
            name = f"{name} of {describe_ranks(ranks)}"
            self.members[name] = ranks
        self._names[group] = name
        return name


def _last_of_each(records: Sequence[Record], most: int) -> list[Record]:
    """The last calls of each communicator, in their order."""
    counts: dict[str, int] = {}
    kept = []
    for record in reversed(records):
        counts[record.group] = counts.get(record.group, 0) + 1
        if counts[record.group] <= most:
            kept.append(record)
    return kept[::-1]


_TRANSFERS = ("send", "recv")

DTYPES = {
    getattr(torch, name): name
    for name in (
        "float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8",
        "bool",
    )
}  # fmt: skip


def _called(group: dist.ProcessGroup) -> str:
    """The names of a communicator of commgrid's, which its description holds, or torch's own."""
    described, name = group.group_desc, group.group_name
    if described in ("", "undefined"):
        return name
    owner = name.split("/", 2)[1] if name.startswith("commgrid/") else "default"
    return described if owner == "default" else f"{owner}:{described}"


_is_programs: dict[str, bool] = {}  # by file; code objects of two files may be equal


def place_of(code: CodeType | None, line: int) -> str:
    """File, line and function of a call."""
    return "?" if code is None else f"{_name_of(code.co_filename)}:{line} {code.co_name}"


@cache
def _name_of(file: str) -> str:
    return Path(file).name


def caller() -> tuple[CodeType | None, int]:
    """Return the innermost frame of the program; called by what torch's calls call.

    On threads without one, such as autograd's, it is the innermost frame of commgrid.
    """
    own: tuple[CodeType | None, int] = (None, 0)
    each: FrameType | None = sys._getframe(2)
    while each is not None:
        code = each.f_code
        found = _is_programs.get(code.co_filename)
        if found is None:
            found = _is_programs[code.co_filename] = is_programs(code.co_filename)
        if found:
            return code, each.f_lineno
        file = code.co_filename
        if own[0] is None and file.startswith(OWN) and file != torch_calls.__file__:
            own = code, each.f_lineno
        each = each.f_back
    return own


_current: list[Recorder] = []


def follow(asked: bool, rank: int, members: Mapping[str, list[int]]) -> None:
    """Start recording if asked to or COMMGRID_TRACE is set, and note a grid's communicators.

    `COMMGRID_TRACE=1` begins to record; `COMMGRID_TRACE=DIR` also saves there when the process
    ends.

    Args:
        asked: whether the program does.
        rank: of this process.
        members: of the grid's communicators.
    """
    folder = os.environ.get("COMMGRID_TRACE", "")
    named = folder not in ("", "0")
    recorder = start() if asked or named else current()
    if recorder is None:
        return
    recorder.meet(rank, members)
    if named and folder != "1":
        # The last registered is the first called: while torch.distributed is still up.
        atexit.unregister(_save_at_exit)
        atexit.register(_save_at_exit, recorder, Path(folder).absolute())


def _save_at_exit(recorder: Recorder, folder: Path) -> None:
    recorder.over = True
    try:
        recorder.save(folder)
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


def current() -> Recorder | None:
    """Return this process's recorder, None if it does not record."""
    return _current[0] if _current else None
