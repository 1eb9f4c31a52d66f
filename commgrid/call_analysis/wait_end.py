"""Ends of waiting: ranks that others wait for and that wait for none, and circles."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from commgrid.call_analysis.event import Event
from commgrid.call_analysis.finding import Finding, lasted, without_record
from commgrid.call_analysis.standing import Standing, Standings, finding, threads_of
from commgrid.call_analysis.wait_cycle import circles, deadlock, for_ever, held_threads
from commgrid.layout.rank_text import describe_ranks as said

_NOTED = 3.0  # a process that records notes each second that it runs


def lasting(standings: Standings, patience: float) -> list[Standing]:
    """Return the waits of at least `patience`, each with the absent ranks of at least that.

    A wait for a rank that has ended or was killed always counts. The record of a rank that was
    written before the wait began does not show the rank's later calls.

    Args:
        standings: of all ranks.
        patience: seconds.
    """

    def is_long(wait: Standing, rank: int) -> bool:
        if standings.is_unknown(rank) or wait.seconds is None or is_gone(standings, rank, wait):
            return True
        trace, seconds = standings.traces[rank], wait.seconds
        is_same = trace.host == standings.traces[wait.rank].host
        if is_same and trace.at is not None and trace.state in ("", "running", "stopped"):
            seconds = max(min(seconds, trace.at - wait.call.began), 0.0)
        return seconds >= patience

    found: list[Standing] = []
    left = [wait for own in standings.waits.values() for wait in own]
    wanted: set[int] = set()  # ranks that are waited for: any wait of theirs counts
    while left:
        later, count = [], len(found)
        for wait in left:
            absent = tuple(r for r in wait.absent if wait.rank in wanted or is_long(wait, r))
            is_alone = not wait.absent and (wait.seconds is None or wait.seconds >= patience)
            if absent or is_alone:
                found.append(replace(wait, absent=absent))
            else:
                later.append(wait)
        if len(found) == count:
            break
        wanted |= {
            rank for wait in found[count:] for rank in wait.needs
            if not standings.is_unknown(rank) and not is_gone(standings, rank, wait)
        }  # fmt: skip
        left = later
    return found


def is_gone(standings: Standings, rank: int, wait: Standing) -> bool:
    """Whether a rank's process was over, or was killed about when a wait for it began.

    If all were killed at once, none of them was first.
    """
    trace = standings.traces[rank]
    is_near = (trace.at or 0.0) < wait.call.began + _NOTED
    return trace.state == "ended" or (_was_killed(standings, rank) and is_near)


def _was_killed(standings: Standings, rank: int) -> bool:
    """Whether a rank was killed, and not all ranks at once."""
    trace = standings.traces[rank]
    is_early = not trace.over and (trace.at or 0.0) < standings.now - _NOTED
    is_first = is_early or any(other.state != "killed" for other in standings.traces.values())
    return trace.state == "killed" and is_first


def deaths(standings: Standings) -> Iterator[Finding]:
    """Ranks that were killed while they did not hang."""

    def hung(wait: Standing) -> bool:
        known = [each for each in wait.needs if not standings.is_unknown(each)]
        is_long = (wait.seconds or 0.0) > _NOTED
        return bool(wait.needs) and (is_long or any(is_gone(standings, r, wait) for r in known))

    for rank, trace in standings.traces.items():
        if _was_killed(standings, rank) and not any(map(hung, standings.waits[rank])):
            last = standings.last(rank)
            group = last.call.group
            yield Finding(
                "killed", (rank,), group.name, group.ranks, last.call.operation, last.turn,
                (last.call.where,), (), trace.at or 0.0, None,
                f"rank {rank} was killed; {_issued(last, trace.is_whole)}",
            )  # fmt: skip


def ends(standings: Standings, waits: list[Standing], patience: float) -> Iterator[Finding]:
    """Where the waiting ends: at ranks that do not wait, and in circles.

    Args:
        standings: of all ranks.
        waits: as `lasting` returns them.
        patience: seconds for which a rank may come out of a call later than others.
    """
    stuck = for_ever(standings, waits)
    suspects = [] if stuck else for_ever(standings, waits, suspect=True)
    held = held_threads(waits)
    absent: dict[tuple[int, int], list[Standing]] = {}  # by rank and event
    unknown: dict[int, list[Standing]] = {}
    for wait in waits:
        for rank in wait.absent:
            if standings.is_unknown(rank):
                unknown.setdefault(id(wait.event), []).append(wait)
            elif rank not in held or not standings.threads(rank, wait.call.group) <= held[rank]:
                absent.setdefault((rank, id(wait.event)), []).append(wait)
        if not wait.needs and (stopped := _stopped(standings, wait, patience)) is not None:
            yield stopped
    for (rank, _), found in sorted(absent.items(), key=lambda each: each[1][0].call.began):
        yield _absence(standings, waits, rank, found)
    for found in unknown.values():
        yield _cannot_tell(standings, found)
    for circle in circles(stuck or suspects):
        yield deadlock(standings, circle, is_sure=bool(stuck))


def _stopped(standings: Standings, wait: Standing, patience: float) -> Finding | None:
    """A rank that has not come out of a call which all have entered, and others have ended."""
    if wait.event is None or wait.event.is_message:
        return None
    others = {rank: call for rank, call in wait.event.calls.items() if rank != wait.rank}
    done = [
        each for each in wait.event.needs
        if each != wait.rank and (each not in others or others[each].ended is not None)
    ]  # fmt: skip
    last = max((call.ended or call.began for call in others.values()), default=0.0)
    at = standings.traces[wait.rank].at
    if not done or (at is not None and at - last < patience):
        return None  # its record may be older than the end of the call
    text = (
        f"rank {wait.rank} has not come out of {wait} at {wait.call.where}, which all have entered "
        f"and {said(done)} ended: its device or its network has stopped"
    )
    return finding("stopped", (wait.rank,), [wait], (wait.call.where,), text)


def _absence(
    standings: Standings, waits: list[Standing], rank: int, found: list[Standing]
) -> Finding:
    """Explain why a rank that does not wait has not entered a call."""
    wait = min(found, key=lambda each: each.call.began)
    trace = standings.traces[rank]
    others = sorted({each.rank for each in found})
    what = str(wait)
    if wait.call.is_transfer:
        other, way = ("recv", "from") if wait.call.operation == "send" else ("send", "to")
        what = f"{wait.call.group.first} {other} {wait.turn} {way} rank {wait.rank}"
    kind, how = "not entered", f"has not entered {what}"
    if trace.state == "silent":
        unseen = lasted(max(standings.now - (trace.at or 0.0), 0.0))
        kind, how = "silent rank", f"was not seen for {unseen}, and had not entered {what}"
    elif is_gone(standings, rank, wait) and trace.state == "killed":
        kind, how = "killed", f"was killed before {what}"
    elif trace.state == "ended":
        kind, how = "ended early", f"ended without entering {what}"
    text = f"rank {rank} {how}, for which {wait.waited(others)} at "
    last = standings.last(rank)
    text += f"{wait.call.where}{_present(trace.stacks)}; {_issued(last, trace.is_whole)}"
    text += _in_turn(waits, others, rank)
    return finding(kind, (rank,), found, (last.call.where, wait.call.where), text)


def _issued(last: Standing, is_whole: bool) -> str:
    """A rank's last call, in words."""
    if not last.call.operation:
        return "it has issued no call" if is_whole else "no call of it is recorded"
    return f"its last {'' if is_whole else 'recorded '}call was {last} at {last.call.where}"


def _in_turn(waits: list[Standing], others: list[int], rank: int) -> str:
    """A further wait for the waiting ranks, in words."""
    found = [w for w in waits if w.rank not in others and rank not in w.needs
             and not set(others).isdisjoint(w.absent)]  # fmt: skip
    if not found:
        return ""
    wait = min(found, key=lambda each: each.call.began)
    on = [each for each in wait.absent if each in others]
    return f"; rank {wait.rank} waits in turn for {said(on)} in {wait} at {wait.call.where}"


def _cannot_tell(standings: Standings, waits: list[Standing]) -> Finding:
    """Explain waits for ranks without complete records."""
    wait = min(waits, key=lambda each: each.call.began)
    others = sorted({each.rank for each in waits})
    open_ = sorted({r for each in waits for r in each.absent if standings.is_unknown(r)})
    gone = [rank for rank in open_ if rank not in standings.traces]
    lost = [rank for rank in open_ if rank in standings.traces and standings.traces[rank].lost]
    over = [rank for rank in open_ if rank not in (*gone, *lost)]
    why = [without_record(gone, standings.asked)] if gone else []
    why += [f"the record of {said(lost)} is not complete (was a disk full?)"] if lost else []
    why += [f"{said(over)} stopped recording (commgrid.trace.stop)"] if over else []
    text = f"cannot tell: {' and '.join(why)}; {wait.waited(others)} in {wait} at {wait.call.where}"
    return finding("missing rank", tuple(open_), waits, (wait.call.where,), text)


# -- stacks -------------------------------------------------------------------------------

_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')
_LIBRARY = re.compile(
    rf"/lib(64)?/python\d|/(site|dist)-packages/|/torch/(distributed|nn|utils)/|^<|"
    rf"^{re.escape(str(Path(__file__).parents[1]))}/"
)


def _present(stacks: str) -> str:
    """Where a process is now, in words: the innermost frame of the program, of the main thread.

    `faulthandler` writes the main thread last, and each thread's innermost frame first.

    >>> _present('''Thread 0x1 (most recent call first):
    ...   File "/usr/lib/python3.12/threading.py", line 331 in wait
    ... Current thread 0x2 (most recent call first):
    ...   File "/usr/lib/python3.12/socket.py", line 718 in readinto
    ...   File "/home/me/loader.py", line 88 in load
    ...   File "/home/me/train.py", line 12 in <module>
    ... ''')
    '; it is in loader.py:88 load'
    """
    for thread in reversed(threads_of(stacks)):
        for file, line, name in _FRAME.findall(thread):
            if not _LIBRARY.search(file):
                return f"; it is in {file.rpartition('/')[2]}:{line} {name}"
    return ""


def consequences(waits: list[Standing], causes: list[Finding]) -> Iterator[Finding]:
    """Waits for ranks that wait themselves."""
    told = {
        (each.group, each.members, each.turn, rank)
        for each in causes for rank in (*each.ranks, *each.waiting)
    }  # fmt: skip
    circular = {r for each in causes if each.is_circle for r in (*each.ranks, *each.waiting)}
    groups: dict[tuple[Event, tuple[int, ...]], list[Standing]] = {}
    for wait in waits:
        event = wait.event
        if event is None or not wait.needs or wait.rank in circular:
            continue
        if (event.group.name, event.group.ranks, wait.turn, wait.rank) not in told:
            groups.setdefault((event, wait.needs), []).append(wait)
    for (_, on), found in sorted(groups.items(), key=lambda each: each[1][0].call.began):
        ranks = tuple(sorted(wait.rank for wait in found))
        first = min(found, key=lambda each: each.call.began)
        text = (
            f"{said(ranks)} wait{'s' if len(ranks) == 1 else ''} in {first} "
            f"at {first.call.where} for {said(on)}"
            + ("" if first.seconds is None else f", for {lasted(first.seconds)}")
        )
        yield finding("waits", on, found, (first.call.where,), text)
