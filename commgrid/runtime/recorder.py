"""What this process has issued: a ring of the last collectives, each with its name and its place.

A record is made before the call, so that one that never returns is the last of its communicator.
"""

from __future__ import annotations

import atexit
import inspect
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from commgrid.errors import CommGridError
from commgrid.runtime import torch_calls

FORMAT = 1
"""Of the files; it rises when a reader has to know."""

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
        shape, dtype: of what the rank hands in, of `recv` what it takes; of several tensors the
            first one's.
        bytes: of all of it.
        peer: the group rank of a transfer's other side.
        code, line: where the program called.
        began, issued, ended: nanoseconds of `time.perf_counter_ns`; `ended` is when the wait for it
            was over, None where nobody has waited.
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
    issued: int | None = None
    ended: int | None = None

    @property
    def where(self) -> str:
        """File, line and function of the call."""
        if self.code is None:
            return "?"
        return f"{Path(self.code.co_filename).name}:{self.line} {self.code.co_name}"

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
        rank: of this process.
        members: of each communicator of its grids, by its names with commas, the ranks.
    """

    capacity: int = CAPACITY
    records: deque[Record] = field(init=False)
    total: int = 0
    rank: int = 0
    members: dict[str, list[int]] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)
    _names: WeakKeyDictionary[dist.ProcessGroup, str] = field(default_factory=WeakKeyDictionary)
    _pending: WeakKeyDictionary[dist.Work, Record] = field(default_factory=WeakKeyDictionary)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.records = deque(maxlen=self.capacity)

    @property
    def dropped(self) -> int:
        """How many are not kept any more."""
        return self.total - len(self.records)

    def as_dict(self) -> dict[str, Any]:
        """All of it, as a file holds it; times in nanoseconds of a clock that `wall` tells."""
        return {
            "format": FORMAT, "rank": self.rank, "wall": time.time(),
            "monotonic": time.perf_counter_ns(), "dropped": self.dropped, "members": self.members,
            "calls": [
                [r.group, r.number, r.operation, list(r.shape), r.dtype, r.bytes, r.peer, r.where,
                 r.began, r.issued, r.ended]
                for r in list(self.records)
            ],
        }  # fmt: skip

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
        self, group: dist.ProcessGroup, operation: str, tensors: Sequence[Tensor], peer: int | None
    ) -> Record:
        name = self._names.get(group)
        if name is None:
            name = self._names[group] = _called(group)
        code, line = _caller()
        first = tensors[0] if tensors else None
        record = Record(
            name, 0, operation,
            () if first is None else tuple(first.shape),
            "" if first is None else _DTYPES.get(first.dtype, str(first.dtype)),
            sum(each.nbytes for each in tensors), peer, code, line, time.perf_counter_ns(),
        )  # fmt: skip
        with self._lock:
            record.number = self._numbers.get(name, 0)
            self._numbers[name] = record.number + 1
            self.total += 1
            self.records.append(record)
        return record

    def issued(self, call: object, work: dist.Work | None) -> None:
        assert isinstance(call, Record)
        call.issued = time.perf_counter_ns()
        if work is None:
            call.ended = call.issued
        else:
            self._pending[work] = call

    def waited(self, work: dist.Work) -> None:
        record = self._pending.pop(work, None)
        if record is not None:
            record.ended = time.perf_counter_ns()


_DTYPES = {
    getattr(torch, name): name
    for name in (
        "float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8",
        "bool",
    )
}  # fmt: skip


def _called(group: dist.ProcessGroup) -> str:
    """The names of a communicator of commgrid's, which its description holds, or torch's own."""
    return group.group_desc or group.group_name


_SKIPPED = (
    str(Path(torch.__file__).parent) + "/",
    str(Path(__file__).parents[1]) + "/",
)
_DECORATORS = ("/typing_extensions.py", "/warnings.py", "/contextlib.py", "/functools.py")
_inside: dict[CodeType, bool] = {}


def _caller() -> tuple[CodeType | None, int]:
    """The innermost place outside torch and commgrid; within a thread of torch's, commgrid's."""
    own: tuple[CodeType | None, int] = (None, 0)
    each: FrameType | None = inspect.currentframe()
    while each is not None:
        code = each.f_code
        inside = _inside.get(code)
        if inside is None:
            file = code.co_filename
            inside = file.startswith(_SKIPPED) or file.endswith(_DECORATORS)
            _inside[code] = inside
        if not inside:
            return code, each.f_lineno
        if own[0] is None and code.co_filename.startswith(_SKIPPED[1]):
            own = code, each.f_lineno
        each = each.f_back
    return own


_current: list[Recorder] = []


def follow(asked: bool, rank: int, members: Mapping[str, list[int]]) -> None:
    """Records from now on, if a program or its environment asks for it, and knows a grid.

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
    recorder.rank = rank
    recorder.members.update(members)
    if named and folder != "1":
        # The last registered is the first called: while torch.distributed is still up.
        atexit.unregister(_save_at_exit)
        atexit.register(_save_at_exit, recorder, Path(folder).absolute())


def _save_at_exit(recorder: Recorder, folder: Path) -> None:
    try:
        recorder.save(folder)
    except CommGridError as error:
        print(f"commgrid: the trace is lost: {error}", file=sys.stderr)


def start(capacity: int = CAPACITY) -> Recorder:
    """Begins to record; what records already goes on."""
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
    """What records in this process; None: nothing."""
    return _current[0] if _current else None
