"""Calls that one rank makes on another communicator than the others."""

from __future__ import annotations

from dataclasses import replace

from commgrid.observe import traces
from commgrid.observe.findings import Finding
from commgrid.observe.ledger import Ledger, Wait
from commgrid.observe.traces import Call
from commgrid.observe.waiting import finding, waited


def on_another_group(ledger: Ledger, rank: int, wait: Wait, waits: list[Wait]) -> Finding | None:
    """Whether a rank has not come to a call since it, or who waits for it, has another group.

    Args:
        ledger: of all ranks.
        rank: that has not come.
        wait: of one that waits for it.
        waits: of all that do.
    """
    found = _astray(ledger, rank, wait)
    if found is None:
        return None
    culprit, call, right = found
    turn = ledger.turn(wait.rank, wait.call)
    text = (
        f"rank {culprit} issued {call.operation} at {call.where} on {traces.short(call.group)}, "
        f"where others issue it on {traces.short(right)}; rank {rank} has not entered "
        f"{wait.channel.name} {wait.call.operation} {turn}, for which rank {wait.rank} "
        f"{waited(wait)}"
    )
    places = (call.where, wait.call.where)
    return replace(finding("other group", (culprit,), waits, turn, places, text), group=right)


def _astray(ledger: Ledger, rank: int, wait: Wait) -> tuple[int, Call, str] | None:
    """Who makes a call on another communicator than most ranks do at its place.

    Returns:
        The rank, its call, and the group that most make it on; it is either the rank that has not
        come or the one that waits for it.
    """
    if wait.call.where == "?":
        return None
    sites: dict[str, dict[int, list[Call]]] = {}  # by group and rank
    for who, trace in ledger.traces.items():
        for call in trace.calls:
            if (call.where, call.operation) == (wait.call.where, wait.call.operation):
                sites.setdefault(call.group, {}).setdefault(who, []).append(call)
    wanted = sites[wait.call.group]
    for group, held in sites.items():
        if group == wait.call.group or rank not in held:
            continue
        more = len(held[rank]) > len(held.get(wait.rank, ()))
        if more and len(wanted[wait.rank]) > len(wanted.get(rank, ())):
            if len(held) > len(wanted):
                return wait.rank, wanted[wait.rank][-1], group
            return rank, held[rank][-1], wait.call.group
    return None
