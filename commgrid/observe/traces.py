"""Traces as data: what ranks have recorded, read from files, summed up, and drawn for Perfetto.

Nothing here needs torch: traces are looked at where nobody trains.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from commgrid.errors import SpecError

FORMAT = 1
KEYS = (
    "group", "number", "operation", "shape", "dtype", "bytes", "peer", "where", "began", "issued",
    "ended", "turn",
)  # fmt: skip
"""What a file holds of each call, in this order; `turn` came later and may be absent."""


@dataclass(frozen=True)
class Call:
    """A collective of one rank, or one half of a transfer.

    Args:
        group: its communicator's names with commas.
        number: how many the rank had issued on it before.
        operation: such as `all_reduce`.
        shape, dtype, bytes: of what the rank handed in; of `recv` what it took.
        peer: the group rank of a transfer's other side, or of the root of a collective with one.
        where: file, line and function of the program.
        began, issued, ended: seconds of the wall clock; None where it had not come to that.
        turn: by which members' calls are matched: of a collective, how many collectives the rank
            had issued on the communicator before; of a transfer, how many in this direction
            between the two. None in files of before 0.1.
    """

    group: str
    number: int
    operation: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    peer: int | None
    where: str
    began: float
    issued: float | None
    ended: float | None
    turn: int | None = None

    @property
    def is_transfer(self) -> bool:
        """Whether it is between two ranks alone."""
        return self.operation in ("send", "recv")


@dataclass(frozen=True)
class Trace:
    """What one rank has recorded.

    Args:
        rank: which.
        calls: in the order in which it issued them.
        dropped: how many earlier ones were not kept.
        members: of each group, the ranks.
        batches: of messages that were started as one, by group and number: which batch.
        at: when it was written, in seconds of the wall clock; None: unknown.
        over: whether the process was ending.
        waits: the calls, by group and number, that a thread was in the middle of waiting for, or
            that a wait had failed for; None: not recorded.
        entered: of each group, how many collectives the rank had issued.
        since: of each group, when its present communicator came, in seconds of the wall clock:
            calls before belong to another one.
        on_device: whether calls run in order on a device, which `ended` then is about.
    """

    rank: int
    calls: tuple[Call, ...]
    dropped: int
    members: dict[str, tuple[int, ...]]
    batches: dict[tuple[str, int], int] = field(default_factory=dict)
    at: float | None = None
    over: bool = False
    waits: tuple[tuple[str, int], ...] | None = None
    entered: Mapping[str, int] = field(default_factory=dict)
    since: Mapping[str, float] = field(default_factory=dict)
    on_device: bool = False


@dataclass(frozen=True)
class Sum:
    """Calls of one operation, on one group, from one place, of all ranks.

    Args:
        group, operation, where: what they have in common.
        calls: of the rank that has most.
        bytes: of that rank.
        seconds: from call to end of the wait, of the rank that spent most.
        share: of the time from that rank's first call to its last; calls that overlap count each.
    """

    group: str
    operation: str
    where: str
    calls: int
    bytes: int
    seconds: float
    share: float


def read(folder: Path) -> list[Trace]:
    """The traces that ranks have saved in a folder, by rank.

    Raises:
        SpecError: there is none, or a file is something else.
    """
    paths = sorted(folder.glob("rank_*.json")) if folder.is_dir() else []
    if not paths:
        raise SpecError(
            f"{folder}: has no rank_*.json; expected the folder that COMMGRID_TRACE or "
            "commgrid.trace.save was given"
        )
    return [_read(path) for path in paths]


def _read(path: Path) -> Trace:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise SpecError(f"{path}: format {found['format']}, this version reads {FORMAT}")
        return parse(found)
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SpecError(
            f"{path}: is no trace of commgrid's ({type(error).__name__}: {error}); was it cut off?"
        ) from error


def parse(found: Mapping[str, Any]) -> Trace:
    """A trace from what a file holds."""
    offset = found["wall"] - found["monotonic"] / 1e9
    waits = found.get("waits")
    return Trace(
        rank=int(found["rank"]),
        calls=tuple(_call(each, offset) for each in found["calls"]),
        dropped=int(found["dropped"]),
        members={name: tuple(ranks) for name, ranks in found["members"].items()},
        batches={
            (group, number): batch
            for batch, (group, first, last) in enumerate(found.get("batches", ()))
            for number in range(first, last + 1)
        },
        at=float(found["wall"]),
        over=bool(found.get("over", False)),
        waits=tuple((group, int(number)) for group, number in waits) if waits is not None else None,
        entered={group: int(count) for group, count in found.get("entered", {}).items()},
        since={group: at / 1e9 + offset for group, at in found.get("since", {}).items()},
    )


def _call(row: Sequence[Any], offset: float) -> Call:
    held = dict(zip(KEYS, row, strict=len(row) != len(KEYS) - 1))
    times = {
        key: None if held[key] is None else held[key] / 1e9 + offset
        for key in ("began", "issued", "ended")
    }
    return Call(**{**held, **times, "shape": tuple(held["shape"])})


def summed(traces: Iterable[Trace]) -> list[Sum]:
    """What all calls come to, the longest first."""
    found: dict[tuple[str, str, str], Sum] = {}
    for trace in traces:
        own: dict[tuple[str, str, str], list[Call]] = {}
        for call in trace.calls:
            own.setdefault((call.group, call.operation, call.where), []).append(call)
        whole = _length(trace.calls)
        for key, calls in own.items():
            seconds = sum(c.ended - c.began for c in calls if c.ended is not None)
            share = seconds / whole if whole else 0.0
            made = Sum(*key, len(calls), sum(c.bytes for c in calls), seconds, share)
            if key not in found or made.seconds > found[key].seconds:
                found[key] = made
    return sorted(found.values(), key=lambda each: (-each.seconds, each.group, each.operation))


def _length(calls: Sequence[Call]) -> float:
    """Seconds from the first call to the end of the last."""
    if not calls:
        return 0.0
    return max(call.ended or call.issued or call.began for call in calls) - calls[0].began


def as_table(sums: Sequence[Sum], most: int = 30) -> str:
    """A line for each sum, the longest first.

    Args:
        sums: as `summed` gives them.
        most: lines.
    """
    if not sums:
        return "nothing was recorded"
    rows = [("group", "operation", "calls", "bytes", "seconds", "share", "where")]
    rows += [
        (short(s.group), s.operation, f"{s.calls:,}", f"{s.bytes:,}", f"{s.seconds:.4f}",
         f"{s.share:.1%}", s.where)
        for s in sums[:most]
    ]  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), row[1].ljust(widths[1])]
        cells += [row[column].rjust(widths[column]) for column in range(2, 6)]
        lines.append("  ".join([*cells, row[6]]))
    if len(sums) > most:
        lines.append(f"and {len(sums) - most} more")
    return "\n".join(lines)


def short(group: str) -> str:
    """The first name of a communicator, and how many more it has.

    >>> short("dp"), short("tp,cp,ep")
    ('dp', 'tp +2')
    """
    first, *more = group.split(",")
    return f"{first} +{len(more)}" if more else first


def as_events(traces: Sequence[Trace]) -> dict[str, Any]:
    """The Chrome trace format, which Perfetto opens: a process for each rank, a row for each group.

    Source: "Trace Event Format" of the Chromium project; complete events ("ph": "X"), times in
    microseconds.
    """
    start = min((trace.calls[0].began for trace in traces if trace.calls), default=0.0)
    events: list[dict[str, Any]] = []
    for trace in traces:
        events.append(
            {"ph": "M", "pid": trace.rank, "name": "process_name",
             "args": {"name": f"rank {trace.rank}"}}
        )  # fmt: skip
        rows = {group: i for i, group in enumerate(dict.fromkeys(c.group for c in trace.calls))}
        for group, row in rows.items():
            events.append(
                {"ph": "M", "pid": trace.rank, "tid": row, "name": "thread_name",
                 "args": {"name": group}}
            )  # fmt: skip
        last = max((c.ended or c.issued or c.began for c in trace.calls), default=start)
        for call in trace.calls:
            ended = call.ended if call.ended is not None else call.issued
            unfinished = {} if ended is not None else {"unfinished": True}
            events.append(
                {
                    "ph": "X", "pid": trace.rank, "tid": rows[call.group],
                    "name": f"{call.operation} {call.number}", "cat": call.operation,
                    "ts": round((call.began - start) * 1e6, 3),
                    "dur": round(((last if ended is None else ended) - call.began) * 1e6, 3),
                    "args": {
                        "group": call.group, "shape": list(call.shape), "dtype": call.dtype,
                        "bytes": call.bytes, "where": call.where,
                        **({} if call.peer is None else {"peer": call.peer}), **unfinished,
                    },
                }
            )  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}
