"""Timeline of traces in the Chrome trace format, which Perfetto opens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commgrid.call_records.trace import Trace


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
        last = trace.last
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
