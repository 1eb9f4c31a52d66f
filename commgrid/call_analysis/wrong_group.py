"""Calls that one rank makes on another communicator than the others."""

from __future__ import annotations

from dataclasses import replace

from commgrid.call_analysis.event import Ledger, PendingCall
from commgrid.call_analysis.finding import Finding, said
from commgrid.call_analysis.wait_state import finding, waited
from commgrid.call_records.call import Call, Group


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
    found_here = finding("other group", (culprit,), waits, places, text)
    return replace(found_here, group=right.name)


def _alone(
    ledger: Ledger, rank: int, wait: PendingCall
) -> tuple[int, Call, Group, tuple[int, ...]] | None:
    """Whether a rank alone makes a call on a communicator that no other joins in.

    A line may issue calls on several communicators: what others have made there on this one too
    says nothing, and neither does a single rank that is of another mind.

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
