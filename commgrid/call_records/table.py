"""Sums of recorded calls by group, operation and place, and their table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from commgrid.call_records.call import Call, Group
from commgrid.call_records.trace import Trace


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


def summed(traces: Iterable[Trace]) -> list[Sum]:
    """Sum up all calls of any ranks, the longest first."""
    found: dict[tuple[str, str, str], Sum] = {}
    for trace in traces:
        own: dict[tuple[str, str, str], list[Call]] = {}
        for call in trace.calls:
            own.setdefault((call.group.name, call.operation, call.where), []).append(call)
        whole = trace.last - trace.calls[0].began if trace.calls else 0.0
        for key, calls in own.items():
            seconds = sum(call.ended - call.began for call in calls if call.ended is not None)
            share = seconds / whole if whole else 0.0
            made = Sum(*key, len(calls), sum(c.bytes for c in calls), seconds, share)
            if key not in found or made.seconds > found[key].seconds:
                found[key] = made
    return sorted(found.values(), key=lambda each: (-each.seconds, each.group, each.operation))


def as_table(sums: Sequence[Sum], most: int = 30) -> str:
    """A line for each sum, the longest first.

    Args:
        sums: as `summed` gives them.
        most: lines.
    """
    if not sums:
        return "nothing was recorded"
    rows: list[Sequence[str]] = [
        ("group", "operation", "calls", "bytes", "seconds", "share", "where")
    ]
    digits = 4 if max(s.seconds for s in sums) >= 1e-3 else 6
    rows += [
        (Group(s.group, ()).short, s.operation, f"{s.calls:,}", f"{s.bytes:,}",
         f"{s.seconds:.{digits}f}", f"{s.share:.1%}", s.where)
        for s in sums[:most]
    ]  # fmt: skip
    more = f"\nand {len(sums) - most} more" if len(sums) > most else ""
    return aligned(rows, right=range(2, 6)) + more


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Lines of rows whose columns are as wide as their widest cells.

    Args:
        rows: cells, as many in each.
        right: the columns whose cells stand to the right.

    >>> print(aligned([["step", "rank 0"], ["1", "0.5"]], right=[1]))
    step  rank 0
    1        0.5
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
