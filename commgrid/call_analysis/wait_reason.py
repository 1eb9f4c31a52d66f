"""Reasons why a rank is waited for: it skipped the call, made it on another group, or waits."""

from __future__ import annotations

from dataclasses import replace

from commgrid.call_analysis.event import Ledger, PendingCall
from commgrid.call_analysis.finding import Finding, lasted, said
from commgrid.call_records.call import Call, Group


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
    """Whether a rank has gone past this call, which it made before its present line last time."""
    if wait.call.is_transfer:
        return False
    calls = ledger.traces[rank].calls
    if not calls or calls[-1].where == "?":
        return False
    last, group = calls[-1], wait.call.group.name
    for i in range(len(calls) - 2, 0, -1):
        if _same_call(calls[i], last):
            # Last time the awaited call came right before this line; now another one did.
            before = calls[i - 1]
            return (
                before.group.name == group
                and before.where == wait.call.where
                and not _same_call(calls[-2], before)
            )
    return False


def _same_call(one: Call, other: Call) -> bool:
    return (one.where, one.group.name, one.operation) == (
        other.where,
        other.group.name,
        other.operation,
    )


def is_held(graph: dict[int, list[PendingCall]], rank: int) -> bool:
    """Whether a rank itself waits for another."""
    return any(wait.absent or wait.behind for wait in graph.get(rank, ()))


def on_another_group(
    ledger: Ledger, rank: int, wait: PendingCall, waits: list[PendingCall]
) -> Finding | None:
    """Find a rank that has made the call on another group: the missing one, or the waiting one.

    Args:
        ledger: of all ranks.
        rank: that has not come.
        wait: one rank's wait for it.
        waits: every rank's.
    """
    found = _alone(ledger, rank, wait) or _alone(ledger, wait.rank, wait)
    if found is None:
        return None
    culprit, call, right, others = found
    text = (
        f"rank {culprit} alone issued {call.operation} at {call.where} on "
        f"{call.group.short}, where {said(others)} issue it on {right.short}; "
        f"rank {rank} has not entered {wait}, for which "
        f"rank {wait.rank} {waited(wait)}"
    )
    places = (call.where, wait.call.where)
    return replace(finding("other group", (culprit,), waits, places, text), group=right.name)


def _alone(
    ledger: Ledger, rank: int, wait: PendingCall
) -> tuple[int, Call, Group, tuple[int, ...]] | None:
    """Whether a rank alone makes a call on a communicator that no other joins in.

    A line may issue calls on several communicators: it proves nothing if others have used this one
    from there as well, or if a single rank used the other.

    Returns:
        The rank, its last such call, the group that the others make it on, and these.
    """
    if wait.call.where == "?":
        return None
    sites: dict[str, dict[int, Call]] = {}  # by group's name and rank, the last call
    for who, trace in ledger.traces.items():
        for call in trace.calls:
            if (call.where, call.operation) == (wait.call.where, wait.call.operation):
                sites.setdefault(call.group.name, {})[who] = call
    for group, held in sites.items():
        if held.keys() != {rank} or ledger.partners(rank, held[rank]):
            continue
        for right, others in sites.items():
            members = tuple(sorted(others.keys() - {rank}))
            if right != group and len(members) > 1 and wait.call.group.name in (group, right):
                return rank, held[rank], others[members[0]].group, members
    return None
