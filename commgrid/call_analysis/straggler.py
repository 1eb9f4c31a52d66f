"""Ranks that come last time and again, where nothing hangs."""

from __future__ import annotations

from collections.abc import Iterator

from commgrid.call_analysis.event import Ledger
from commgrid.call_analysis.finding import Finding, lasted
from commgrid.call_records.call import Call, Group

_SLOW_SHARE = 0.25  # of the time that was recorded, and
_SLOW_SECONDS = 0.5  # at least, others have waited for one rank: it is slow


def slow_ranks(ledger: Ledger) -> Iterator[Finding]:
    """Ranks that others have waited for, for much of the time, where nothing hangs."""
    late: dict[tuple[int, Group], list[tuple[float, Call, int]]] = {}
    starts, ends = [], []
    for group, held in ledger.turns.items():
        for turn in sorted({turn for calls in held.values() for turn in calls}):
            calls = {rank: each[turn] for rank, each in held.items() if turn in each}
            starts += [call.began for call in calls.values()]
            ends += [call.ended for call in calls.values() if call.ended is not None]
            if len(calls) < len(group.ranks) or len(calls) < 2:
                continue
            order = sorted(calls, key=lambda rank: calls[rank].began)
            lost = calls[order[-1]].began - calls[order[-2]].began
            late.setdefault((order[-1], group), []).append((lost, calls[order[-1]], turn))
    whole = max(ends, default=0.0) - min(starts, default=0.0)
    for (rank, group), found in late.items():
        total = sum(lost for lost, *_ in found)
        if total < max(_SLOW_SECONDS, _SLOW_SHARE * whole):
            continue
        worst, call, turn = max(found, key=lambda each: each[0])
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
