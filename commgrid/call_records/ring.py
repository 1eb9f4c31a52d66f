"""The last calls of a process in mapped memory, which outlives the process.

    ┌ header ─ table ──────────────────────────── rows ─────────────────────┐
    │ rows     groups, pairs, kinds, places, …   │ 7 │ 8 │ 9 │ 3 │ 4 │ 5 │ 6 │
    └────────────────────────────────────────────────────────▲──────────────┘
                                                              the oldest

A ring in a file holds every call at once, and keeps it if the process is killed. Rows refer to the
table by number: an entry has a counter and one JSON value. Number 0 is "not recorded": there was no
room.

| entry | values |
|---|---|
| `rank`, `job`, `process`, `earlier` | of several the last one counts |
| `group` | name, ranks, key, backend; counts its collectives |
| `pair` | group, `send` or `recv`, peer, tag; counts its messages |
| `kind` | operation, dtype, reduction |
| `place` | file, line, function |
| `stack` | places, from the outermost on |
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

FORMAT = 2
"""Version of the format; it rises with changes that readers must handle."""

_MAGIC = b"commgrid ring "
MAGIC = _MAGIC + b"%d\n" % FORMAT

# Magic, capacity, rows, calls, bytes of the table, where rows begin, state, whether calls are
# missing, whether recording has ended before the process, two clocks.
_HEAD = struct.Struct("<16sQQQQQBBB5xdQ")
_TOTALS, _TABLE, _STATE, _LOST, _OVER, _CLOCKS = 24, 40, 56, 57, 58, 64
ALIVE, ENDED, STOPPED, COPIED = range(4)
"""States: the process writes until it ends; it ended well; it was told to stop; this is a copy."""

# Its number, began, issued, ended, bytes, bytes of outputs, tag; group, kind, stack, number on its
# group, turn, batch, number of sizes; peer; dimensions, marks, thread; shape.
_ROW = struct.Struct("<QQQQQQqIIIIIIIiBBH4x5Q")
_ISSUED, _ENDED, _GROUP, _MARKS = 16, 24, 56, 89
_NUMBER, _GROUP_KIND_STACK = struct.Struct(f"<Q{_ROW.size - 8}x"), struct.Struct("<III")
WAITED, KNOWN_OUTPUT, RAISED = 1, 2, 4
_MOST_DIMENSIONS = 5
# Rows that are no calls have a bit more in their number.
_STEP, _SIZES = 1 << 62, 1 << 63
_KINDS = _STEP | _SIZES
_MORE = struct.Struct("<Q16Q")
_SIZES_A_ROW, _SIZES_AT = 16, 13
_COUNT = struct.Struct("<Q")
_ENTRY = struct.Struct("<QI")  # count, bytes of its JSON

_TABLE_AT = 4096
_MOST_TABLE = 8 << 20
_MOST_TEXT = 6 << 20  # of the table before there is no room for places
_RESERVED = 1 << 18  # bytes of a file that are reserved at a time

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
        self.capacity, self.path = capacity, path
        self.rows = self.calls = 0
        self._numbers: dict[tuple[Any, ...], int] = {}  # by entry
        self._entries: list[int] = []  # where each begins
        self._used, self._rows_at = 0, _TABLE_AT + _MOST_TABLE
        self._file, self._reserved = -1, {0: 0, _TABLE_AT: 0, self._rows_at: 0}
        self._is_over, self._free = False, 0  # rows up to which there is room
        size = self._rows_at + capacity * _ROW.size
        if path is None:
            self.memory = mmap.mmap(-1, size)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._make_file(path, size)
        _HEAD.pack_into(
            self.memory, 0, MAGIC, capacity, 0, 0, 0, self._rows_at, ALIVE, 0, 0, 0.0, 0
        )
        self.touch()
        self.entry("none")  # number 0

    def _make_file(self, path: Path, size: int) -> None:
        """Map a new file, which takes the place of an earlier one once it is whole."""
        half = path.with_suffix(".half")
        self._file = os.open(half, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.truncate(self._file, size)
            if not self._reserve(0, _TABLE_AT):
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
        rows = min(self.rows, self.capacity) * _ROW.size
        for at, used in ((_TABLE_AT, self._used), (self._rows_at, rows)):
            if not found._reserve(at, used):
                found.close()
                path.unlink(missing_ok=True)
                raise _full(path)
            found.memory[at : at + used] = self.memory[at : at + used]
        found.memory[_TOTALS:_TABLE_AT] = self.memory[_TOTALS:_TABLE_AT]
        found.rows, found.calls, found._is_over = self.rows, self.calls, self._is_over
        found._used, found._numbers, found._entries = self._used, self._numbers, self._entries
        return found

    def close(self) -> None:
        """Write nothing more. The records can still be read."""
        self._is_over = True
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def touch(self) -> None:
        """Note that the process runs: what its clocks say."""
        struct.pack_into("<dQ", self.memory, _CLOCKS, time.time(), time.perf_counter_ns())

    def end(self, state: int) -> None:
        """Note how the process ends. The first state that is noted stays."""
        self.touch()
        if self.memory[_STATE] == ALIVE:
            self.memory[_STATE] = state

    def over(self) -> None:
        """Note that the process goes on without a record of its later calls."""
        self.touch()
        self.memory[_OVER] = 1

    # -- writing ------------------------------------------------------------------------

    def entry(self, *values: Any) -> int:
        """The number of an entry, which is written down once; 0 where there is no room left.

        Args:
            values: its kind, and what JSON can hold; lists as tuples.
        """
        number = self._numbers.get(values)
        if number is None:
            number = self._wrote(values, _MOST_TEXT if values[0] in ("place", "stack") else None)
            if number:
                self._numbers[values] = number
        return number

    def note(self, what: str, *values: Any) -> None:
        """Write down what holds from now on: `rank`, say, and its value."""
        self._wrote((what, *values))

    def _wrote(self, values: tuple[Any, ...], most: int | None = None) -> int:
        text = json.dumps(values).encode()
        used = self._used + _ENTRY.size + len(text)
        if self._is_over:
            return 0
        if used > (most or _MOST_TABLE) or not self._reserve(_TABLE_AT, used):
            if not most:
                self._lose()
            return 0
        at = _TABLE_AT + self._used
        _ENTRY.pack_into(self.memory, at, 0, len(text))
        self.memory[at + _ENTRY.size : _TABLE_AT + used] = text
        self._used = used
        self._entries.append(at)
        _COUNT.pack_into(self.memory, _TABLE, used)
        return len(self._entries) - 1

    def _lose(self) -> None:
        """Note that calls are missing. No further one is recorded, as its turn would be wrong."""
        self._is_over = True
        self.memory[_LOST] = 1

    def count(self, entry: int, count: int) -> None:
        """Note how many collectives or messages were issued."""
        if entry:
            _COUNT.pack_into(self.memory, self._entries[entry], count)

    def add(
        self, group: int, number: int, kind: int, shape: Sequence[int], size: int,
        output: int | None, peer: int | None, stack: int, began: int, turn: int, batch: int = 0,
        tag: int = 0, thread: int = 0, sizes: Sequence[int] = (),
    ) -> int:  # fmt: skip
        """Write a call down; return its row, -1 if there is no room."""
        if self._is_over:
            return -1
        at = self.rows
        if at + len(sizes) >= self._free and not self._has_room(1 + len(sizes)):
            self._lose()
            return -1
        if len(shape) > _MOST_DIMENSIONS:
            rest = 1
            for each in shape[_MOST_DIMENSIONS - 1 :]:
                rest *= each
            shape = (*shape[: _MOST_DIMENSIONS - 1], rest)
        dimensions = len(shape)
        _ROW.pack_into(
            self.memory, self._rows_at + at % self.capacity * _ROW.size, at, began, 0, 0, size,
            output or 0, tag, group, kind, stack, number, turn, batch, len(sizes),
            -1 if peer is None else peer, dimensions, 0 if output is None else KNOWN_OUTPUT,
            thread, *shape, *_PADDING[dimensions],
        )  # fmt: skip
        self.rows, self.calls = at + 1, self.calls + 1
        for first in range(0, len(sizes), _SIZES_A_ROW):
            self._add_more(_SIZES, sizes[first : first + _SIZES_A_ROW])
        _TWO_COUNTS.pack_into(self.memory, _TOTALS, self.rows, self.calls)
        return at

    def step(self, number: int, when: int) -> None:
        """Note that a training step begins."""
        if not self._is_over and self._has_room(1):
            self._add_more(_STEP, (number, when))
            _COUNT.pack_into(self.memory, _TOTALS, self.rows)

    def _add_more(self, kind: int, values: Sequence[int]) -> None:
        at = self._rows_at + self.rows % self.capacity * _ROW.size
        rest = (0,) * (_SIZES_A_ROW - len(values))
        _MORE.pack_into(self.memory, at, self.rows | kind, *values, *rest)
        self.rows += 1

    def _has_room(self, rows: int) -> bool:
        """Reserve some rows; return False if the disk is full."""
        last = self.rows + max(rows, _RESERVED // _ROW.size)
        if not self._reserve(self._rows_at, min(last, self.capacity) * _ROW.size):
            return False
        self._free = last
        return True

    def issued(self, call: int, when: int) -> None:
        if -1 < call >= self.rows - self.capacity:  # else it is not kept
            at = self._rows_at + call % self.capacity * _ROW.size + _ISSUED
            _COUNT.pack_into(self.memory, at, when)

    def ended(self, call: int, when: int) -> None:
        if -1 < call >= self.rows - self.capacity:
            at = self._rows_at + call % self.capacity * _ROW.size + _ENDED
            _COUNT.pack_into(self.memory, at, when)

    def waits(self, call: int, on: bool, thread: int = 0) -> None:
        """Set or clear the mark that a thread waits in this call."""
        if -1 < call >= self.rows - self.capacity:
            at = self._rows_at + call % self.capacity * _ROW.size + _MARKS
            _MARKS_AND_THREAD.pack_into(self.memory, at, self.memory[at] & ~WAITED | on, thread)

    def raised(self, call: int) -> None:
        """Mark a call that was not issued."""
        if -1 < call >= self.rows - self.capacity:
            self.memory[self._rows_at + call % self.capacity * _ROW.size + _MARKS] |= RAISED

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
                _allocate(self._file, part + reserved, size - reserved + _RESERVED)
        except OSError:
            return False
        self._reserved[part] = size + _RESERVED
        return True


_PADDING = tuple((0,) * (_MOST_DIMENSIONS - n) for n in range(_MOST_DIMENSIONS + 1))
_TWO_COUNTS = struct.Struct("<QQ")
_MARKS_AND_THREAD = struct.Struct("<BH")


def _full(path: Path) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def format_of(data: bytes) -> int | None:
    """The version of a ring's format; None: it is no ring."""
    number = data[len(_MAGIC) : len(MAGIC)].strip()
    return int(number) if data.startswith(_MAGIC) and number.isdigit() else None


class Contents:
    """The contents of a ring at one moment.

    Args:
        memory: of a ring, or the bytes of its file.

    Raises:
        ValueError: it is no ring, or was cut off.
    """

    def __init__(self, memory: bytes | mmap.mmap) -> None:
        if len(memory) < _TABLE_AT or memory[: len(MAGIC)] != MAGIC:
            raise ValueError("it does not begin as a ring of commgrid's does")
        _, capacity, total, self.calls, used, rows_at, self.state, lost, over, self.wall, now = (
            _HEAD.unpack_from(memory)
        )
        rows = min(total, capacity)
        if rows_at < _TABLE_AT + used or len(memory) < rows_at + rows * _ROW.size:
            raise ValueError("it was cut off")
        self.lost, self.over = bool(lost), bool(over)
        self.monotonic, self._total = now, total
        self._table = bytes(memory[_TABLE_AT : _TABLE_AT + used])
        self._held = bytes(memory[rows_at : rows_at + rows * _ROW.size])

    @cached_property
    def entries(self) -> list[tuple[int, Any]]:
        """The count and the values of each entry."""
        found, at = [], 0
        while at < len(self._table):
            count, size = _ENTRY.unpack_from(self._table, at)
            at += _ENTRY.size + size
            found.append((count, json.loads(self._table[at - size : at])))
        return found

    @cached_property
    def _rows(self) -> list[tuple[int, int, int]]:
        """Number, kind (0: a call) and place of each row, in the order of their numbers."""
        # The oldest may be half written over: it has the number of the next.
        return sorted(
            (number & ~_KINDS, number & _KINDS, place * _ROW.size)
            for place, (number,) in enumerate(_NUMBER.iter_unpack(self._held))
            if number & ~_KINDS < self._total
        )

    def noted(self, what: str) -> list[Any]:
        """The values of the last entry of a kind; empty: there is none."""
        found = (values[1:] for _, values in reversed(self.entries) if values[0] == what)
        return next(found, [])

    def unpacked(self) -> tuple[list[tuple[Any, ...]], list[tuple[int, int]]]:
        """Return the rows of calls, each with its sizes as the last value, and the steps."""
        calls: list[tuple[Any, ...]] = []
        steps = []
        for _, kind, at in self._rows:
            if not kind:
                calls.append((*_ROW.unpack_from(self._held, at), []))
            elif kind == _STEP:
                steps.append(_MORE.unpack_from(self._held, at)[1:3])
            elif calls:  # else its call was written over
                count, sizes = calls[-1][_SIZES_AT], calls[-1][-1]
                sizes += _MORE.unpack_from(self._held, at)[1 : 1 + count - len(sizes)]
        return calls, steps

    def packed(self, last: int | None = None) -> bytes:
        """Return a copy of the ring without unused space, which no process writes to.

        Args:
            last: number of calls of each group, at most; None: all.
        """
        kept: list[int] = []
        counts: dict[int, int] = {}
        used, sizes = {0}, list[int]()
        for _, row_kind, at in reversed(self._rows):
            if row_kind == _SIZES:
                sizes.append(at)
                continue
            if not row_kind:
                group, kind, stack = _GROUP_KIND_STACK.unpack_from(self._held, at + _GROUP)
                counts[group] = counts.get(group, 0) + 1
                if last is None or counts[group] <= last:
                    kept += [*sizes, at]
                    used |= {kind, stack}
            else:
                kept.append(at)
            sizes = []
        for number in list(used):
            values = self.entries[number][1]
            used.update(values[1] if values[0] == "stack" else ())
        entries = []
        for number, (count, values) in enumerate(self.entries):
            is_needed = number in used or values[0] not in ("kind", "place", "stack")
            text = json.dumps(values if is_needed else ["none"]).encode()
            entries.append(_ENTRY.pack(count, len(text)) + text)
        table = b"".join(entries)
        state = COPIED if self.state == ALIVE else self.state
        head = _HEAD.pack(
            MAGIC, len(kept), self._total, self.calls, len(table), _TABLE_AT + len(table), state,
            self.lost, self.over, self.wall, self.monotonic,
        )  # fmt: skip
        rows = (self._held[at : at + _ROW.size] for at in reversed(kept))
        return head.ljust(_TABLE_AT, b"\0") + table + b"".join(rows)
