"""Traces as data: what ranks have recorded, summed up, and drawn for Perfetto.

Nothing here needs torch: traces are also read on machines without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from commgrid.observe.call import Call, Group


@dataclass(frozen=True)
class Trace:
    """The record of one rank.

    Args:
        rank: which.
        calls: in the order in which it issued them.
        dropped: how many earlier ones were not kept.
        members: of each group, the ranks.
        batches: of messages that were started as one, by group and number: which batch.
        at: when it was written, in seconds of the wall clock; None: unknown.
        over: whether the process was ending.
        cut: whether its process was killed or aborted, and not by a launcher's SIGTERM.
        waits: the calls, by group and number, that a thread was in the middle of waiting for, or
            that a wait had failed for; None: not recorded.
        entered: of each group, how many collectives the rank had issued.
        since: of each group, when its present communicator came, in seconds of the wall clock:
            calls before belong to another one.
        on_device: whether calls run in order on a device, which `ended` then is about.
        job: what all ranks of one job call it, and no other job; "": not recorded.
    """

    rank: int
    calls: tuple[Call, ...]
    dropped: int
    members: dict[str, tuple[int, ...]]
    batches: dict[tuple[str, int], int] = field(default_factory=dict)
    at: float | None = None
    over: bool = False
    cut: bool = False
    waits: tuple[tuple[str, int], ...] | None = None
    entered: Mapping[str, int] = field(default_factory=dict)
    since: Mapping[str, float] = field(default_factory=dict)
    on_device: bool = False
    job: str = ""


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


def summed(
    traces: Iterable[Trace], price: Callable[[Trace, Call], float] | None = None
) -> list[Sum]:
    """Sum up all calls, the longest first.

    Args:
        traces: of any ranks.
        price: seconds of a call, instead of the recorded time; NaN, unknown, counts as 0.
            Shares are then of the sum over a rank's calls.
    """
    found: dict[tuple[str, str, str], Sum] = {}
    for trace in traces:
        own: dict[tuple[str, str, str], list[Call]] = {}
        for call in trace.calls:
            own.setdefault((call.group.name, call.operation, call.where), []).append(call)
        each = {key: _seconds(trace, calls, price) for key, calls in own.items()}
        whole = _length(trace.calls) if price is None else sum(each.values())
        for key, calls in own.items():
            seconds = each[key]
            share = seconds / whole if whole else 0.0
            made = Sum(*key, len(calls), sum(c.bytes for c in calls), seconds, share)
            if key not in found or made.seconds > found[key].seconds:
                found[key] = made
    return sorted(found.values(), key=lambda each: (-each.seconds, each.group, each.operation))


def _seconds(
    trace: Trace, calls: Iterable[Call], price: Callable[[Trace, Call], float] | None
) -> float:
    if price is None:
        return sum(call.ended - call.began for call in calls if call.ended is not None)
    return sum(s for s in (price(trace, call) for call in calls) if not math.isnan(s))


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
    digits = 4 if max(s.seconds for s in sums) >= 1e-3 else 6
    rows += [
        (Group(s.group, ()).short, s.operation, f"{s.calls:,}", f"{s.bytes:,}",
         f"{s.seconds:.{digits}f}", f"{s.share:.1%}", s.where)
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
        rows = {
            group: i for i, group in enumerate(dict.fromkeys(c.group.name for c in trace.calls))
        }
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
                    "ph": "X", "pid": trace.rank, "tid": rows[call.group.name],
                    "name": f"{call.operation} {call.number}", "cat": call.operation,
                    "ts": round((call.began - start) * 1e6, 3),
                    "dur": round(((last if ended is None else ended) - call.began) * 1e6, 3),
                    "args": {
                        "group": call.group.name, "shape": list(call.shape), "dtype": call.dtype,
                        "bytes": call.bytes, "where": call.where,
                        **{key: rank for key, rank in (("peer", call.peer), ("root", call.root))
                           if rank is not None}, **unfinished,
                    },
                }
            )  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}
