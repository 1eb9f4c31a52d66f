"""Standing: the unfinished call of each thread of each rank, from records.

A thread stands in a call if the call has not ended and the thread waits in it, or has not returned
from it. No thread stands in a call that ended, or in an asynchronous call before the wait for it.

On a device a host's wait ends at once and says nothing of the device. There, a thread without a
wait of its host stands in its first call that others have not entered and that needs them to end; a
broadcast on its root needs none. Torch's flight recorder holds ends on the device in place of
waits: there, a thread stands in the first call without an end. Without a device it may stand in any
call without an end, unless stacks show that no thread is in torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from commgrid.call_analysis.event import Event, EventSide, Matched, match
from commgrid.call_analysis.finding import Finding, lasted
from commgrid.call_records.call import Call, Group
from commgrid.call_records.trace import Trace
from commgrid.layout.rank_text import describe_ranks

_DEVICES = ("nccl", "xccl", "hccl", "cncl", "mccl")
# The last one is where functional collectives wait, those of DTensor and of compiled code.
_WAITS = re.compile(r"/torch/(distributed|autograd|nn/parallel)/|/torch/_ops\.py.* in redispatch")
_RECENT = 2000  # calls of a rank that are looked at
_FROM_ROOT, _TO_ROOT = ("broadcast", "scatter"), ("reduce", "gather")

ENDS_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives that end on no rank before all have entered them."""


@dataclass(frozen=True)
class Standing:
    """A thread in a call that is not over.

    Args:
        rank, call: whose, and which.
        event: what the call belongs to; None: it is not known.
        absent: the ranks that have not entered their part of it.
        behind: ranks whose device has another call to finish first.
        seconds: for how long; None where the records do not say when they were written.
    """

    rank: int
    call: Call
    event: Event | None
    absent: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    seconds: float | None = None

    @property
    def turn(self) -> int:
        """The call's place among those it is matched with."""
        return (self.call.turn or 0) if self.event is None else self.event.turn

    @property
    def needs(self) -> tuple[int, ...]:
        """The ranks that have to move first."""
        return (*self.absent, *self.behind)

    def __str__(self) -> str:
        """The call by its group and turn: `tp all_reduce 3`."""
        return f"{self.call.group.first} {self.call.operation} {self.turn}"

    def waited(self, ranks: Sequence[int]) -> str:
        """Which ranks wait in it, and how long: `ranks 0, 2 have waited 3.1 s`."""
        is_one, said = len(ranks) == 1, describe_ranks(ranks)
        if self.seconds is None:
            return f"{said} {'waits' if is_one else 'wait'}"
        return f"{said} {'has' if is_one else 'have'} waited {lasted(self.seconds)}"


class Standings:
    """Where all ranks stand: their traces, `matched`, and the `waits` of each.

    Args:
        found: the record of each rank.
        asked: seconds in which ranks could have answered; None: their records are in a folder.
    """

    def __init__(self, found: Iterable[Trace], asked: float | None = None) -> None:
        self.traces = {trace.rank: trace for trace in found}
        self.asked = asked
        self.now = max((trace.at or 0.0 for trace in self.traces.values()), default=0.0)
        """When the last trace was written, in seconds of the wall clock."""
        self.matched = _matched(self.traces)
        self.absent = cache(self.matched.absent)
        """The ranks that have not entered an event."""
        self._threads: dict[int, dict[int | None, set[int]]] = {}  # by rank and group
        self.waits = {rank: [*self._of_rank(rank)] for rank in self.traces}

    def missing(self) -> tuple[int, ...]:
        """The ranks that have no record, as far as groups of the others tell."""
        known = {rank for group in self.matched.groups for rank in group.ranks}
        return tuple(sorted(known - self.traces.keys()))

    def last(self, rank: int) -> Standing:
        """The last call of a rank; one without an operation: there is none."""
        calls, sides = self.traces[rank].calls, self.matched.sides[rank]
        if not calls:
            return Standing(rank, Call(Group("", ()), "", where="?"), None)
        return Standing(rank, calls[-1], sides[-1].event if sides[-1] is not None else None)

    def is_unknown(self, rank: int) -> bool:
        """Whether it is not known what a rank has issued last."""
        return rank not in self.traces or not self.traces[rank].is_whole

    def incomplete(self) -> tuple[int, ...]:
        """The ranks with a record that ends before calls which others have issued."""
        ended = {rank for rank, trace in self.traces.items() if not trace.is_whole}
        events = self.matched.events.values() if ended else ()
        return tuple(sorted({rank for each in events for rank in self.absent(each)} & ended))

    def threads(self, rank: int, group: Group | None = None) -> set[int]:
        """The threads of a rank that issue calls.

        Args:
            rank: whose.
            group: only threads with a call on it, if there are any.
        """
        if rank not in self._threads:
            found = self._threads[rank] = {None: set()}
            for call in self.traces[rank].calls:
                for key in (None, self.matched.number(call.group)):
                    found.setdefault(key, set()).add(call.thread)
        threads = self._threads[rank]
        return threads.get(self.matched.number(group) if group else None, threads[None])

    def _of_rank(self, rank: int) -> Iterator[Standing]:
        trace, sides = self.traces[rank], self.matched.sides[rank]
        if not trace.is_whole:
            return
        if not trace.knows_waits:
            yield from self._unfinished(trace)
            return
        threads = set()
        for call, side in zip(trace.calls, sides, strict=True):
            if call.ended is None and (call.waiting or call.issued is None):
                threads.add(call.thread)
                event = None if side is None else side.event
                yield self._standing(trace, call, event)
        for side in sides[-_RECENT:] if trace.state != "ended" else ():
            if side is None or side.call.thread in threads or side.call.ended is None:
                continue
            absent = self.absent(side.event) if is_on_device(side.call) else ()
            if needed := tuple(each for each in absent if each in _needed(side)):
                threads.add(side.call.thread)
                yield replace(self._standing(trace, side.call, side.event), absent=needed)

    def _unfinished(self, trace: Trace) -> Iterator[Standing]:
        """The calls that have not ended; on a device the first one."""
        first = _first_on_device(trace)
        may_wait = not trace.stacks or any(
            _WAITS.search(each.strip().partition("\n")[0]) for each in threads_of(trace.stacks)
        )
        for call, side in zip(trace.calls, self.matched.sides[trace.rank], strict=True):
            if call.ended is not None or not (call is first if is_on_device(call) else may_wait):
                continue
            event = None if side is None else side.event
            behind = tuple(
                other.rank for other in (event.sides if event and call is first else ())
                if other.call.ended is None and other is not side
                and _first_on_device(self.traces[other.rank]) is not other.call
            )  # fmt: skip
            yield replace(self._standing(trace, call, event), behind=behind)

    def _standing(self, trace: Trace, call: Call, event: Event | None) -> Standing:
        absent = () if event is None else self.absent(event)
        seconds = None if trace.at is None else max(trace.at - call.began, 0.0)
        return Standing(trace.rank, call, event, absent, seconds=seconds)


def _matched(traces: Mapping[int, Trace]) -> Matched:
    """The calls of all ranks, with the counts of those that were not kept."""
    calls = {rank: trace.calls for rank, trace in traces.items()}
    found = match(calls, [group for trace in traces.values() for group in trace.groups])
    for rank, trace in traces.items():
        for group, count in trace.entered.items():
            found.note(found.channel(group, "", None, None, 0), rank, count)
        for (group, operation, source, target, tag), count in trace.sent.items():
            found.note(found.channel(group, operation, source, target, tag), operation, count)
    return found


def threads_of(stacks: str) -> list[str]:
    """The frames of each thread, the innermost first, as `faulthandler` writes stacks."""
    return stacks.split("(most recent call first):")[1:]


def is_on_device(call: Call) -> bool:
    """Whether a call's communicator is a device's, whose host does not wait for it."""
    return any(name in call.group.backend for name in _DEVICES)


def _first_on_device(trace: Trace) -> Call | None:
    """The call that a device has to finish first."""
    return next((c for c in trace.calls if c.ended is None and is_on_device(c)), None)


def _needed(side: EventSide) -> Sequence[int]:
    """The ranks without which a rank's part of a call cannot end."""
    call = side.call
    if call.operation in _FROM_ROOT and call.root not in (None, side.rank):
        return [each for each in side.event.needs if each == call.root]
    needs_all = (*ENDS_TOGETHER, "recv", *(_TO_ROOT if call.root == side.rank else ()))
    return side.event.needs if call.operation in needs_all else ()


def finding(
    kind: str,
    ranks: tuple[int, ...],
    waits: Sequence[Standing],
    where: tuple[str, ...],
    text: str,
) -> Finding:
    """Return a finding about waits, named after the call of the first one."""
    first = min(waits, key=lambda each: each.call.began)
    group = first.call.group if first.event is None else first.event.group
    return Finding(
        kind, ranks, group.name, group.ranks, first.call.operation, first.turn, where,
        tuple(sorted({each.rank for each in waits} - set(ranks))), first.call.began,
        max((each.seconds for each in waits if each.seconds is not None), default=None), text,
    )  # fmt: skip
