"""The last calls of a process in mapped memory, which outlives the process.

    ┌ header ─ counts ─ texts ────────────────── records ───────────────────┐
    │ total    by group one JSON value a line    │ 7 │ 8 │ 9 │ 3 │ 4 │ 5 │ 6 │
    └────────────────────────────────────────────────────────▲──────────────┘
                                                              the oldest

A ring in a file holds every call at once, and keeps it if the process is killed. Names, places and
members of groups are texts that records refer to by number. `Ring.as_dict` and `read` give the
same: the contents that `trace_files` parses.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

FORMAT = 1
"""Version of the traces in JSON; it rises with changes that readers must handle."""

MAGIC = b"commgrid ring 1\n"

# Magic, capacity, total, bytes of texts, whether the process ended well, two clocks, pid.
_HEAD = struct.Struct("<16sQQQQdQQ")
_TOTAL, _TEXTS, _OVER, _CLOCKS = 24, 32, 40, 48
# Its number, began, issued, ended, bytes, bytes of outputs; group, operation, dtype, place, number
# on its group, turn, batch, reduction; peer; dimensions, state; shape.
_RECORD = struct.Struct("<QQQQQQIIIIIIIIiBB2x5Q")
_ISSUED, _ENDED, _STATE = 16, 24, 85
_WAITED, _KNOWN_OUTPUT = 1, 2
_MOST_DIMENSIONS = 5
_COUNT = struct.Struct("<Q")

_GROUPS = 4096
_COUNTS_AT = 4096
_TEXTS_AT = _COUNTS_AT + _COUNT.size * _GROUPS
_MOST_TEXT = 4 << 20
_RECORDS_AT = _TEXTS_AT + _MOST_TEXT
_STEP = 1 << 18  # bytes of a file that are reserved at a time

_allocate: Callable[[int, int, int], None] | None = getattr(os, "posix_fallocate", None)


class Ring:
    """Keeps a process's last calls.

    Args:
        capacity: how many.
        path: of the file; None: in memory only.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, capacity: int, path: Path | None = None) -> None:
        self.capacity, self.path, self.total = capacity, path, 0
        self._texts: dict[str, int] = {}
        self._lines = 0
        self._used = 0
        self._groups: dict[str, int] = {}
        self._file, self._reserved = -1, {0: 0, _TEXTS_AT: 0, _RECORDS_AT: 0}
        size = _RECORDS_AT + capacity * _RECORD.size
        if path is None:
            self.memory = mmap.mmap(-1, size)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._make_file(path, size)
        _HEAD.pack_into(self.memory, 0, MAGIC, capacity, 0, 0, 0, 0.0, 0, os.getpid())
        self.touch()
        self.text("?")  # number 0: what there was no room for

    def _make_file(self, path: Path, size: int) -> None:
        """Map a new file, which takes the place of an earlier one once it is whole."""
        half = path.with_suffix(".half")
        self._file = os.open(half, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.truncate(self._file, size)
            if not self._reserve(0, _TEXTS_AT):
                raise _full(path)
            self.memory = mmap.mmap(self._file, size)
            os.rename(half, path)
        except BaseException:
            self.close()
            half.unlink(missing_ok=True)
            raise

    def moved(self, path: Path) -> Ring:
        """Return a ring in a file with this one's records."""
        found = Ring(self.capacity, path)
        rows = min(self.total, self.capacity) * _RECORD.size
        for at, used in ((_TEXTS_AT, self._used), (_RECORDS_AT, rows)):
            if not found._reserve(at, used):
                found.close()
                path.unlink(missing_ok=True)
                raise _full(path)
            found.memory[at : at + used] = self.memory[at : at + used]
        found.memory[_TOTAL:_TEXTS_AT] = self.memory[_TOTAL:_TEXTS_AT]
        found.total, found._used, found._lines = self.total, self._used, self._lines
        found._texts, found._groups = self._texts, self._groups
        return found

    def close(self) -> None:
        """Write nothing more. The records can still be read."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def touch(self) -> None:
        """Note that the process runs: what its clocks say."""
        struct.pack_into("<dQ", self.memory, _CLOCKS, time.time(), time.perf_counter_ns())

    def end(self) -> None:
        """Note that the process ends well."""
        self.touch()
        _COUNT.pack_into(self.memory, _OVER, 1)

    # -- writing ------------------------------------------------------------------------

    def text(self, value: str) -> int:
        """The number of a text, which is written down once; 0 where there is no room left."""
        number = self._texts.get(value)
        if number is None:
            number = self._lines
            if not self._wrote(value):
                return 0
            self._texts[value] = number
        return number

    def note(self, what: str, *values: Any) -> None:
        """Write down what is not about one call; of several notes the last one counts.

        Args:
            what: `rank` or `job` and its value; `members` or `since`, a group and its value.
            values: what JSON can hold.
        """
        self._wrote([what, *values])

    def _wrote(self, value: Any) -> bool:
        line = json.dumps(value).encode() + b"\n"
        used = self._used + len(line)
        if used > _MOST_TEXT or not self._reserve(_TEXTS_AT, used):
            return False
        self.memory[_TEXTS_AT + self._used : _TEXTS_AT + used] = line
        self._used = used
        self._lines += 1
        _COUNT.pack_into(self.memory, _TEXTS, used)
        return True

    def group(self, name: str) -> int:
        """The number of a group, for `add`."""
        number = self._groups.get(name)
        if number is None:
            number = self._groups[name] = min(len(self._groups), _GROUPS - 1)
            # All further groups have one number, and no name.
            self.note("group", "?" if number == _GROUPS - 1 else name, number)
        return number

    def entered(self, group: int, count: int) -> None:
        """Note how many collectives were issued on a group."""
        _COUNT.pack_into(self.memory, _COUNTS_AT + group * _COUNT.size, count)

    def add(
        self, group: int, number: int, operation: str, shape: Sequence[int], dtype: str,
        size: int, output: int | None, peer: int | None, where: int, began: int, turn: int,
        batch: int, reduction: str = "",
    ) -> int:  # fmt: skip
        """Write a call down; return its number, -1 if there is no room."""
        at = self.total
        offset = at % self.capacity * _RECORD.size
        if not self._reserve(_RECORDS_AT, offset + _RECORD.size):
            return -1
        kept = shape
        if len(shape) > _MOST_DIMENSIONS:
            rest = 1
            for each in shape[_MOST_DIMENSIONS - 1 :]:
                rest *= each
            kept = (*shape[: _MOST_DIMENSIONS - 1], rest)
        dimensions = len(kept)
        _RECORD.pack_into(
            self.memory, _RECORDS_AT + offset, at, began, 0, 0, size, output or 0, group,
            self.text(operation), self.text(dtype), where, number, turn, batch,
            self.text(reduction), -1 if peer is None else peer, dimensions,
            0 if output is None else _KNOWN_OUTPUT, *kept, *_PADDING[dimensions],
        )  # fmt: skip
        self.total = at + 1
        _COUNT.pack_into(self.memory, _TOTAL, at + 1)
        return at

    def issued(self, call: int, when: int) -> None:
        self._stamp(call, _ISSUED, when)

    def ended(self, call: int, when: int) -> None:
        self._stamp(call, _ENDED, when)

    def waits(self, call: int, on: bool) -> None:
        """Set or clear the mark that a thread waits in this call."""
        if self._has(call):
            at = _RECORDS_AT + call % self.capacity * _RECORD.size + _STATE
            self.memory[at] = self.memory[at] & ~_WAITED | on

    def _stamp(self, call: int, field: int, when: int) -> None:
        if self._has(call):
            at = _RECORDS_AT + call % self.capacity * _RECORD.size + field
            _COUNT.pack_into(self.memory, at, when)

    def _has(self, call: int) -> bool:
        """Whether a call is kept."""
        return max(self.total - self.capacity, 0) <= call < self.total

    def _reserve(self, part: int, size: int) -> bool:
        """Allocate disk blocks for the first bytes of a part; return False if the disk is full.

        A write to a mapped page without blocks ends the process on a full disk.
        """
        reserved = self._reserved[part]
        if size <= reserved:
            return True
        if self._file < 0:
            return self.path is None
        try:
            if _allocate is not None:
                _allocate(self._file, part + reserved, size - reserved + _STEP)
        except OSError:
            return False
        self._reserved[part] = size + _STEP
        return True

    # -- reading ------------------------------------------------------------------------

    def as_dict(self, last: int | None = None) -> dict[str, Any]:
        """All of it, as a file in JSON holds it.

        Args:
            last: number of calls of each group, at most; None: all in the ring.
        """
        self.touch()
        return read(self.memory, last)


_PADDING = tuple((0,) * (_MOST_DIMENSIONS - n) for n in range(_MOST_DIMENSIONS + 1))


def _full(path: Path) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def load(path: Path) -> dict[str, Any]:
    """Read the file of a process, however it ended.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no ring, or was cut off.
    """
    try:
        return read(path.read_bytes(), None)
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError(f"its contents do not fit together: {error!r}") from error


def read(memory: bytes | mmap.mmap, last: int | None) -> dict[str, Any]:
    """A ring's calls and what they refer to; times in nanoseconds of a clock that `wall` tells.

    Raises:
        ValueError: it is no ring.
    """
    if len(memory) < _RECORDS_AT or memory[: len(MAGIC)] != MAGIC:
        raise ValueError("it does not begin as a ring of commgrid's does")
    _, capacity, total, used, over, wall, monotonic, pid = _HEAD.unpack_from(memory)
    if len(memory) < _RECORDS_AT + capacity * _RECORD.size or used > _MOST_TEXT:
        raise ValueError("it was cut off")
    lines = bytes(memory[_TEXTS_AT : _TEXTS_AT + used]).splitlines()
    texts = [json.loads(line) for line in lines]
    groups: dict[int, str] = {}
    held: dict[str, Any] = {
        "format": FORMAT, "rank": 0, "wall": wall, "monotonic": monotonic, "dropped": 0,
        "members": {}, "over": bool(over), "pid": pid, "waits": [], "entered": {}, "since": {},
        "batches": [], "job": "", "calls": [],
    }  # fmt: skip
    for text in texts:
        if not isinstance(text, list):
            continue
        what, *rest = text
        if what == "group":
            groups.setdefault(rest[1], rest[0])
        elif what in ("members", "since"):
            held[what][rest[0]] = rest[1]
        else:
            held[what] = rest[0]
    for number, name in groups.items():
        (count,) = _COUNT.unpack_from(memory, _COUNTS_AT + number * _COUNT.size)
        if count:
            held["entered"][name] = count
    batches: dict[tuple[int, str], list[Any]] = {}
    kept: dict[int, int] = {}
    first = max(total - capacity, 0)
    for row in reversed(list(_rows(memory, capacity, first, total))):
        _, began, issued, ended, size, output, group, operation, dtype = row[:9]
        where, number, turn, batch, reduction, peer, dimensions, state, *shape = row[9:]
        kept[group] = kept.get(group, 0) + 1
        if last is not None and kept[group] > last:
            continue
        name = groups.get(group, "?")
        is_present = began >= held["since"].get(name, 0)
        held["calls"].append(
            [name, number, texts[operation], shape[:dimensions], texts[dtype], size,
             None if peer < 0 else peer, texts[where], began, issued or None, ended or None, turn,
             output if state & _KNOWN_OUTPUT else None, texts[reduction]]
        )  # fmt: skip
        if state & _WAITED and not ended and is_present:
            held["waits"].append([name, number])
        if batch and is_present:
            batches.setdefault((batch, name), [name, number, number])[1] = number
    held["calls"].reverse()
    held["waits"].reverse()
    held["batches"] = list(batches.values())[::-1]
    held["dropped"] = total - len(held["calls"])
    return held


def _rows(
    memory: bytes | mmap.mmap, capacity: int, first: int, total: int
) -> Iterator[tuple[Any, ...]]:
    for number in range(first, total):
        row = _RECORD.unpack_from(memory, _RECORDS_AT + number % capacity * _RECORD.size)
        if row[0] == number:  # the oldest may be half written over
            yield row
