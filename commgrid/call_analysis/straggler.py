"""Ranks that come last time and again, where nothing hangs.

Clocks agree within a host. Between two hosts they are bounded: a collective that needs all ranks
ends on each after the last one has entered it, so that the clock of one host is ahead by at most
the time from the entry on the other to the end here. That bound is subtracted from a rank's delay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from commgrid.call_analysis.event import Event
from commgrid.call_analysis.finding import Finding, lasted
from commgrid.call_analysis.standing import ENDS_TOGETHER, Standings, is_on_device
from commgrid.call_records.call import Call, Group
from commgrid.call_records.trace import Trace

_SLOW_SHARE = 0.25  # of the time that was recorded, and
_SLOW_SECONDS = 0.5  # at least, others have waited for one rank beside its worst call: it is slow


def slow_ranks(standings: Standings) -> Iterator[Finding]:
    """Ranks that others have waited for, for much of the time, where nothing hangs."""
    late: dict[tuple[int, Group], list[tuple[float, Call, int]]] = {}
    hosts = {rank: trace.host or f"rank {rank}" for rank, trace in standings.traces.items()}
    events = [each for each in standings.matched.events.values() if not each.is_message]
    ahead = _ahead(events, hosts)
    for event in events:
        calls = event.calls
        if len(calls) < len(event.needs) or len(calls) < 2:
            continue
        lost, rank = _last(calls, hosts, ahead)
        late.setdefault((rank, event.group), []).append((lost, calls[rank], event.turn))
    whole = max((_length(trace) for trace in standings.traces.values()), default=0.0)
    for (rank, group), found in late.items():
        total = sum(lost for lost, *_ in found)
        worst, call, turn = max(found, key=lambda each: each[0])
        # Late once, as at a start, is not slow.
        if total - worst < max(_SLOW_SECONDS, _SLOW_SHARE * whole):
            continue
        text = (
            f"rank {rank} is slow: the others of {group.first} have waited {lasted(total)} of "
            f"{lasted(whole)} for it in {len(found)} calls, {lasted(worst)} of it in "
            f"{call.operation} {turn} at {call.where}"
        )
        others = tuple(each for each in group.ranks if each != rank)
        yield Finding(
            "slow rank", (rank,), group.name, group.ranks, call.operation, turn,
            (call.where,), others, call.began, total, text,
        )  # fmt: skip


def _length(trace: Trace) -> float:
    """Seconds from a rank's first call to the end of its last, by its own clock."""
    ends = (call.ended for call in trace.calls if call.ended is not None)
    return max(ends, default=0.0) - min((call.began for call in trace.calls), default=0.0)


def _ahead(events: list[Event], hosts: Mapping[int, str]) -> dict[tuple[str, str], float]:
    """By two hosts, the seconds that the first one's clock is ahead of the other's at most."""
    found: dict[tuple[str, str], float] = {}
    for event in events:
        entry, end = dict[str, float](), dict[str, float]()
        for rank, call in event.calls.items():
            host = hosts[rank]
            entry[host] = max(call.began, entry.get(host, -math.inf))
            if call.ended and call.operation in ENDS_TOGETHER and not is_on_device(call):
                end[host] = min(call.ended, end.get(host, math.inf))
        for host, ended in end.items():
            for other, began in entry.items():
                if host != other:
                    pair = host, other
                    found[pair] = min(ended - began, found.get(pair, math.inf))
    return found


def _last(
    calls: Mapping[int, Call], hosts: Mapping[int, str], ahead: Mapping[tuple[str, str], float]
) -> tuple[float, int]:
    """Seconds that all others have surely waited for one rank alone, and the rank."""
    by_host: dict[str, list[int]] = {}
    for rank in sorted(calls, key=lambda rank: calls[rank].began):
        by_host.setdefault(hosts[rank], []).append(rank)
    found = []
    for host, ranks in by_host.items():
        others = [calls[rank].began for rank in ranks[-2:-1]]
        others += [
            calls[theirs[-1]].began + ahead.get((host, other), math.inf)
            for other, theirs in by_host.items() if other != host
        ]  # fmt: skip
        found.append((max(calls[ranks[-1]].began - max(others), 0.0), ranks[-1]))
    return max(found)
