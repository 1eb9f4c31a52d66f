"""Calls of several ranks side by side: a row for each turn; and how long ranks wait in a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from commgrid.call_analysis.event import Event, match
from commgrid.call_records.call import Call, Group
from commgrid.call_records.table import aligned
from commgrid.call_records.trace import Trace


def _events(traces: Iterable[Trace]) -> list[Event]:
    """The calls of all ranks that belong together, the earliest first."""
    found = match({trace.rank: trace.calls for trace in traces}).events.values()
    return sorted(found, key=lambda event: min(call.began for call in event.calls.values()))


def _pair(event: Event) -> str:
    """Source, target and tag of a message; empty: it is a collective."""
    if not event.is_message:
        return ""
    source, target, tag = event.channel[1:]
    return f"{source}>{target}" + (f" tag {tag}" if tag else "")


@dataclass
class _Row:
    """One turn of communicators with one name and no common rank.

    Args:
        groups: the communicators.
        pair: source, target and tag of a message; empty: it is a collective.
        turn: its place among those of the communicator, or the pair.
        calls: by rank.
    """

    groups: list[Group]
    pair: str
    turn: int
    calls: dict[int, Call]

    @property
    def label(self) -> str:
        """The communicator and turn; the call too if it is the same on all ranks."""
        kinds = {call.said() for call in self.calls.values()}
        of_pair = f" {self.pair}" if self.pair else ""
        alike = f" {kinds.pop()}" if len(kinds) == 1 else ""
        return f"{self.groups[0].short}{of_pair} {self.turn}{alike}"

    def cell(self, trace: Trace) -> str:
        """What one rank did in it; empty if it is no member."""
        call = self.calls.get(trace.rank)
        group = next((each for each in self.groups if trace.rank in each.ranks), None)
        if call is not None:
            what = "" if self.label.endswith(call.said()) else call.said()
            state = "(waits)" if call.waiting else "(no end)" if call.ended is None else ""
            return " ".join(each for each in (what, call.where, state) if each)
        if group is None or self.pair:
            return ""
        return "not entered" if trace.entered.get(group, 0) <= self.turn else "not kept"


def _rows(events: Iterable[Event]) -> list[_Row]:
    rows: dict[tuple[str, str, int], list[_Row]] = {}
    made = []
    for event in events:
        group, pair, turn = event.group, _pair(event), event.turn
        same = rows.setdefault((group.name, pair, turn), [])
        for row in same:
            if not pair and not any({*group.ranks} & {*other.ranks} for other in row.groups):
                row.groups.append(group)
                row.calls.update(event.calls)
                break
        else:
            same.append(_Row([group], pair, turn, event.calls))
            made.append(same[-1])
    return made


def side_by_side(traces: Sequence[Trace], last: int = 20) -> str:
    """A table of the last calls: a row for each turn, a column for each rank.

    Args:
        traces: of the ranks to show.
        last: rows.
    """
    made = _rows(_events(traces))
    if not made:
        return "nothing was recorded"
    rows = [["call", *(f"rank {trace.rank}" for trace in traces)]]
    return aligned([*rows, *([row.label, *map(row.cell, traces)] for row in made[-last:])])


def waited_in_steps(traces: Sequence[Trace]) -> dict[int, dict[int, float]]:
    """Seconds that each rank has waited in each step for the last rank to come, by step and rank.

    Times of one host are compared alone: clocks of two differ.
    """
    found: dict[int, dict[int, float]] = {}
    hosts = {trace.rank: trace.host for trace in traces}
    started = {trace.rank: trace.steps for trace in traces}
    for trace in traces:
        for number, _ in trace.steps:
            found.setdefault(number, {})[trace.rank] = 0.0
    for event in _events(traces):
        calls = event.calls
        for rank, call in calls.items():
            step = _step(started[rank], call)
            if step is None:
                continue
            last = max(each.began for other, each in calls.items() if hosts[other] == hosts[rank])
            until = last if call.ended is None else min(last, call.ended)
            found[step][rank] += max(until - call.began, 0.0)
    return dict(sorted(found.items()))


def _step(started: Sequence[tuple[int, float]], call: Call) -> int | None:
    """The number of the step in which a call began; None: it was before the first."""
    return next((number for number, at in reversed(started) if at <= call.began), None)


def steps_table(waited: Mapping[int, Mapping[int, float]]) -> str:
    """A row for each step, a column for each rank, in seconds that it waited."""
    if not waited:
        return "no steps were recorded; call commgrid.trace.step(number) as each begins"
    ranks = sorted({rank for each in waited.values() for rank in each})
    rows = [["step", *(f"rank {rank}" for rank in ranks)]]
    for number, each in waited.items():
        rows.append([str(number), *(f"{each[r]:.4f}" if r in each else "" for r in ranks)])
    return aligned(rows, right=range(1, len(ranks) + 1))
