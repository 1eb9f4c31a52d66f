"""Find what is wrong among ranks from their records: which rank waits for which, in which call.

    rank 1 ──► dp all_reduce 17 ──► rank 5 ──► none          rank 5 is the cause
    rank 0 ──► tp ──► rank 1 ──► dp ──► rank 0               a circle: a deadlock

Nothing here needs torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from commgrid.call_analysis.event import Ledger, PendingCall
from commgrid.call_analysis.finding import Diagnosis, Finding, lasted, said
from commgrid.call_analysis.mismatch import KINDS_OF_CALLS, mismatches
from commgrid.call_analysis.program import crossed_group
from commgrid.call_analysis.straggler import slow_ranks
from commgrid.call_analysis.wait_cycle import CIRCLES, circles, deadlock
from commgrid.call_analysis.wait_reason import finding, is_held, on_another_group, skipped, waited
from commgrid.call_records import files as trace_files
from commgrid.call_records import flight_recorder
from commgrid.call_records.call import Call, Group
from commgrid.call_records.trace import Trace
from commgrid.errors import SpecError

PATIENCE = 1.0
"""Seconds for which a rank may wait before that is worth a word."""

_NOTED = 3.0  # a process that records notes each second that it runs


def read(folder: Path) -> list[Trace]:
    """The records of all ranks in a folder: commgrid's, or of torch's flight recorder.

    Raises:
        SpecError: there are none, or a file is something else.
    """
    if not os.path.isdir(folder) or trace_files.has_traces(folder):
        return trace_files.read(folder)  # which says what is wrong with it
    paths = sorted(
        path for path in folder.iterdir()
        if path.is_file() and path.stem[-1:].isdecimal() and path.suffix in ("", ".json", ".pickle")
    )  # fmt: skip
    if not paths:
        raise SpecError(
            f"{folder}: has no rank_*.json and no dump of torch's flight recorder, whose names end "
            "in a rank"
        )
    return flight_recorder.read(paths)


def diagnose(found: Iterable[Trace], patience: float = PATIENCE) -> Diagnosis:
    """Find what is wrong among ranks, the first cause first.

    Args:
        found: the record of each rank.
        patience: seconds that a wait may last.
    """
    found = list(found)
    ledger = Ledger.of(found)
    missing = tuple(sorted(ledger.ranks() - ledger.traces.keys()))
    graph = {
        rank: [wait for wait in ledger.waits(rank) if _counts(ledger, wait, patience)]
        for rank in ledger.traces
    }
    causes = [*_crossed_groups(found), *mismatches(ledger)]
    ends = [*_ends(ledger, graph)]
    known = {(each.group, each.turn) for each in causes}
    ends = [each for each in ends if (each.group, each.turn) not in known]
    if not causes and not ends and not missing:
        causes = [*slow_ranks(ledger)]
    every, more = _by_culprit(sorted([*causes, *ends], key=_order))
    waiting = {
        rank: tuple(sorted({other for wait in waits for other in (*wait.absent, *wait.behind)}))
        for rank, waits in graph.items()
        if any(wait.absent or wait.behind for wait in waits)
    }
    return Diagnosis(
        tuple(sorted(ledger.traces)), tuple(every),
        (*more, *_consequences(ledger, graph, [*every, *more])), missing, waiting,
    )  # fmt: skip


def _crossed_groups(found: list[Trace]) -> Iterator[Finding]:
    """Groups that ranks have made in different orders, so that each means another one."""
    crossed = crossed_group(found)
    if crossed is not None:
        name, ranks, text = crossed
        since = min((call.began for trace in found for call in trace.calls), default=0.0)
        yield Finding(
            "other members", ranks, name, (), "new_group", 0, (), (), since, None, text
        )  # fmt: skip


def _by_culprit(findings: list[Finding]) -> tuple[list[Finding], list[Finding]]:
    """The first of each rank, and what else it has led to."""
    first: list[Finding] = []
    more: list[Finding] = []
    for each in findings:
        known = {rank for other in first for rank in other.ranks}
        (more if known and known >= set(each.ranks) else first).append(each)
    return first, more


def _order(finding: Finding) -> tuple[int, float]:
    # A missing call is found by the ranks that waited for it, later than a wrong call. Open
    # questions come last.
    late = 2 if finding.kind == "missing rank" else 1
    return (0 if finding.kind in KINDS_OF_CALLS else late, finding.since)


def _counts(ledger: Ledger, wait: PendingCall, patience: float) -> bool:
    """Whether a wait is more than a moment's; what a rank that is gone leaves open always is."""
    gone = any(r not in ledger.traces or _is_gone(ledger, r, wait) for r in wait.absent)
    return wait.seconds is None or wait.seconds >= patience or gone


def _is_gone(ledger: Ledger, rank: int, wait: PendingCall) -> bool:
    """Whether a rank's process was over, or was killed about when a wait for it began.

    If all were killed at once, as by Ctrl-C, none of them was first.
    """
    trace = ledger.traces[rank]
    last = trace.at or 0.0
    was_first = last < ledger.now - _NOTED or not all(t.cut for t in ledger.traces.values())
    return trace.over or (trace.cut and was_first and last < wait.call.began + _NOTED)


# -- where waiting ends ----------------------------------------------------------------


def _ends(ledger: Ledger, graph: dict[int, list[PendingCall]]) -> Iterator[Finding]:
    """Where the waiting ends: at ranks that do not wait, and in circles."""
    wanted: dict[tuple[int, Group, str, int], list[PendingCall]] = {}
    unknown: dict[tuple[Group, str, int], list[PendingCall]] = {}
    for waits in graph.values():
        for wait in waits:
            call = wait.call.group, wait.call.operation, wait.turn
            if any(rank not in ledger.traces for rank in wait.absent):
                unknown.setdefault(call, []).append(wait)
            for rank in wait.absent:
                if rank in ledger.traces and not is_held(graph, rank):
                    wanted.setdefault((rank, *call), []).append(wait)
            if not wait.absent and not wait.behind:
                stuck = _stuck(ledger, wait)
                if stuck is not None:
                    yield stuck
    for (rank, *_), waits in sorted(wanted.items(), key=lambda each: each[1][0].call.began):
        yield _why_absent(ledger, graph, rank, waits)
    for waits in unknown.values():
        yield _cannot_tell(ledger, waits)
    for circle in circles(graph):
        yield deadlock(ledger, circle)


def _stuck(ledger: Ledger, wait: PendingCall) -> Finding | None:
    """A rank that has not come out of a call which all have entered, and others have ended."""
    group = wait.call.group
    done = [
        m for m in group.ranks
        if m != wait.rank and not wait.call.is_transfer and ledger.has_ended(group, m, wait.turn)
    ]  # fmt: skip
    if not done:
        return None
    text = (
        f"rank {wait.rank} has not come out of {wait} at "
        f"{wait.call.where}, which all have entered and {said(done)} ended: its device or its "
        "network has stopped"
    )
    return finding("stopped", (wait.rank,), [wait], (wait.call.where,), text)


def _why_absent(
    ledger: Ledger, graph: dict[int, list[PendingCall]], rank: int, waits: list[PendingCall]
) -> Finding:
    """Explain why a rank that does not wait has not entered a call."""
    wait = min(waits, key=lambda each: each.call.began)
    others = sorted({each.rank for each in waits})
    what = str(wait)
    if wait.call.is_transfer:
        other, way = ("recv", "from") if wait.call.operation == "send" else ("send", "to")
        what = f"{wait.call.group.first} {other} {wait.turn} {way} rank {wait.rank}"
    for_whom = f"for which {said(others)} {waited(wait, len(others))} at {wait.call.where}"
    trace = ledger.traces[rank]
    last = trace.calls[-1] if trace.calls else None
    did = (
        "it has no call under way"
        if last is None
        else f"its last call was {_last(ledger, rank, last)}"
    )
    if (astray := on_another_group(ledger, rank, wait, waits)) is not None:
        return astray
    if wait.call.is_transfer and (elsewhere := _other_peer(ledger, graph, rank, wait)) is not None:
        return elsewhere
    if skipped(ledger, rank, wait):
        text = f"rank {rank} skipped {what}, {for_whom}; {did}"
        kind = "skipped call"
    elif _is_gone(ledger, rank, wait) and not trace.over:
        text = (
            f"rank {rank}'s record stops without an end (killed?) before {what}, {for_whom}; {did}"
        )
        kind = "ended early"
    elif trace.over:
        text = f"rank {rank} ended without entering {what}, {for_whom}; {did}"
        kind = "ended early"
    else:
        text = f"rank {rank} has not entered {what}, {for_whom}; {did}"
        kind = "not entered"
    places = (last.where if last is not None else "?", wait.call.where)
    return finding(kind, (rank,), waits, places, text)


def _cannot_tell(ledger: Ledger, waits: list[PendingCall]) -> Finding:
    """Ranks wait for some of which there are no records, so that nothing can be said of these."""
    wait = min(waits, key=lambda each: each.call.began)
    others = sorted({each.rank for each in waits})
    gone = sorted({r for each in waits for r in each.absent if r not in ledger.traces})
    text = (
        f"cannot tell: {said(gone)} left no record (killed before it was written?); {said(others)} "
        f"{waited(wait, len(others))} in {wait} at "
        f"{wait.call.where}"
    )
    return finding("missing rank", tuple(gone), waits, (wait.call.where,), text)


def _last(ledger: Ledger, rank: int, call: Call) -> str:
    return f"{call.group.first} {call.operation} {ledger.turn(rank, call)} at {call.where}"


def _other_peer(
    ledger: Ledger, graph: dict[int, list[PendingCall]], rank: int, wait: PendingCall
) -> Finding | None:
    """A transfer with another one than the rank that waits for it.

    Either the missing rank has issued a transfer without a partner, or the waiting rank has: then a
    third rank waits for it.
    """
    wanted = "recv" if wait.call.operation == "send" else "send"
    for waits in graph.values():
        for other in waits:
            if other.call.operation == wanted and other.absent == (wait.rank,):
                return _swapped(ledger, wait.rank, wait.call, rank, other)
    for call in reversed(ledger.traces[rank].calls):
        if call.operation == wanted and call.group == wait.call.group:
            absent = ledger.absent(rank, call)
            if absent and absent != (wait.rank,):
                return _swapped(ledger, rank, call, absent[0], wait)
    return None


def _swapped(ledger: Ledger, rank: int, call: Call, peer: int, wait: PendingCall) -> Finding:
    """A rank's transfer with a peer that has none with it, for which another one waits."""
    name = wait.call.group.first
    way, back = ("to", "from") if call.operation == "send" else ("from", "to")
    text = (
        f"rank {rank} has issued {name} {call.operation} {way} rank {peer} at {call.where}, to "
        f"which that one has not come; rank {wait.rank} {waited(wait)} at {wait.call.where} for "
        f"{name} {wait.call.operation} {back} rank {rank}"
    )
    places = (call.where, wait.call.where)
    return finding("other peer", (rank,), [wait], places, text)


# -- what follows from it --------------------------------------------------------------


def _consequences(
    ledger: Ledger, graph: dict[int, list[PendingCall]], causes: list[Finding]
) -> Iterator[Finding]:
    """Waits for ranks that wait themselves."""
    told = {
        (each.group, each.turn, rank) for each in causes for rank in (*each.ranks, *each.waiting)
    }
    circular = {r for each in causes if each.kind in CIRCLES for r in each.ranks}
    groups: dict[tuple[Group, str, int, tuple[int, ...]], list[PendingCall]] = {}
    for rank, waits in graph.items():
        for wait in waits if rank not in circular else ():
            on = wait.absent or wait.behind
            if on and (wait.call.group.name, wait.turn, wait.rank) not in told:
                key = wait.call.group, wait.call.operation, wait.turn, on
                groups.setdefault(key, []).append(wait)
    for (*_, on), waits in sorted(groups.items(), key=lambda each: each[1][0].call.began):
        ranks = tuple(sorted(wait.rank for wait in waits))
        first = min(waits, key=lambda each: each.call.began)
        text = (
            f"{said(ranks)} wait{'s' if len(ranks) == 1 else ''} in {first} "
            f"at {first.call.where} for {said(on)}"
            + ("" if first.seconds is None else f", for {lasted(first.seconds)}")
        )
        yield finding("waits", on, waits, (first.call.where,), text)
