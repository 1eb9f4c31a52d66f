"""Words for ranks that wait, and the state of the ranks they wait for."""

from __future__ import annotations

from commgrid.call_analysis.event import Ledger, PendingCall
from commgrid.call_analysis.finding import Finding, lasted
from commgrid.call_records.call import Call


def waited(wait: PendingCall, ranks: int = 1) -> str:
    if wait.seconds is None:
        return "waits" if ranks == 1 else "wait"
    return f"{'has' if ranks == 1 else 'have'} waited {lasted(wait.seconds)}"


def finding(
    kind: str,
    ranks: tuple[int, ...],
    waits: list[PendingCall],
    where: tuple[str, ...],
    text: str,
) -> Finding:
    first = min(waits, key=lambda each: each.call.began)
    return Finding(
        kind, ranks, first.call.group.name, first.call.group.ranks, first.call.operation,
        first.turn, where,
        tuple(sorted({each.rank for each in waits} - set(ranks))), first.call.began,
        max((each.seconds for each in waits if each.seconds is not None), default=None), text,
    )  # fmt: skip


def skipped(ledger: Ledger, rank: int, wait: PendingCall) -> bool:
    """Whether a rank is past the place where, the time before, it made this call."""
    if wait.call.is_transfer:
        return False
    calls = ledger.traces[rank].calls
    if not calls or calls[-1].where == "?":
        return False
    last, group = calls[-1], wait.call.group.name
    for i in range(len(calls) - 2, 0, -1):
        if _same_place(calls[i], last):
            # The step after the call before, then and now.
            before = calls[i - 1]
            return (
                before.group.name == group
                and before.where == wait.call.where
                and not _same_place(calls[-2], before)
            )
    return False


def _same_place(one: Call, other: Call) -> bool:
    return (one.where, one.group.name, one.operation) == (
        other.where,
        other.group.name,
        other.operation,
    )


def is_held(graph: dict[int, list[PendingCall]], rank: int) -> bool:
    """Whether a rank itself waits for another."""
    return any(wait.absent or wait.behind for wait in graph.get(rank, ()))
