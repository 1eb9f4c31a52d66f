"""Whether ranks that issue given calls all come to an end, and if not, the shortest reason.

**What a call needs.** A rank issues its steps in order and stops at a wait until what it waits for
is over. A call *begins* on a rank when it is issued and nothing is before it in its queue, where it
stays until it is over. The n-th collective of a communicator is over on all members when it has
begun on all of them; the n-th send from one rank to another together with the n-th receive.

    rules    queues                                     messages meet by
    nccl     one for each communicator, in which a      communicator, ranks, order
             batch is one entry; one for each pair of
             ranks with single messages
    gloo     none: what was issued runs                 communicator, ranks, tag, order
    strict   one for each rank                          communicator, ranks, order

Sources: NCCL's user guide, "Point-to-point communication" (calls within a group progress
independently, a send blocks until its receive) and "Using multiple NCCL communicators
concurrently"; torch's ProcessGroupNCCL (a stream for each communicator; `pointToPoint` takes one
for the two ranks where a message is not batched; `wait` holds up the stream that computes, and with
it what is issued next) and ProcessGroupGloo; gloo's `transport/tcp/pair.cc` (a send starts when its
receive is known). Nothing is buffered: what comes to an end here does so with any buffers. `strict`
is what NCCL's guide asks for, as kernels of two communicators might not run at once: as if each
call were waited for where it stands.

**Why one look is enough.** Each call begins once certain others are over: earlier calls that its
rank waits for, and the calls before it in its queue. The programs alone
say which, since each call meets exactly one other, by count; speed does not matter. A call that is
over stays so, and none takes the place of another. So the same calls end in any order, and ending
all that can end decides it. The calls that remain wait for a call that a rank never issues, for a
call whose arguments differ between ranks, or in a circle; and a circle of calls stays one without
all others. A shortest circle is thus a smallest part of the programs that cannot end.

A receive from any rank breaks this, and is refused.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from commgrid.call_analysis.program import Batch, Programs, Step, Wait, calls_of
from commgrid.call_analysis.wait_cycle import circle_through
from commgrid.call_records.call import Call, Group, Handle

RULES = ("nccl", "gloo", "strict")

NEVER = 1 << 60  # a step that no program has


@dataclass(slots=True, eq=False)
class EventSide:
    """One rank's part in an event.

    Args:
        rank, call: whose, and what it issues.
        at: the step that issues it.
        waited: the first step that waits for it; `NEVER`: none does.
        number: how many the rank had issued on the communicator before.
        entry: its place in a queue, shared by a batch; None: it is in none.
    """

    rank: int
    call: Call
    at: int
    waited: int
    number: int
    entry: QueueEntry | None
    event: Event


@dataclass(slots=True, eq=False)
class QueueEntry:
    """A place in a queue: the queue, its number there, what it holds, how much is not over."""

    queue: Hashable
    place: int
    sides: list[EventSide] = field(default_factory=list)
    left: int = 0


@dataclass(slots=True, eq=False)
class Event:
    """A collective, or a message, of all sides that take part.

    Args:
        needs: the ranks.
        sides: what they issue, in no order; fewer than needs where one never does.
        begun, is_over: how many of them have begun, and whether it is over, as far as was found.
    """

    needs: tuple[int, ...]
    sides: list[EventSide] = field(default_factory=list)
    begun: int = 0
    is_over: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether all sides issue it."""
        return len(self.sides) == len(self.needs)

    @property
    def is_alike(self) -> bool:
        """Whether all sides give the same."""
        first = self.sides[0].call.alike
        return all(side.call.alike == first for side in self.sides)


@dataclass(slots=True)
class Laid:
    """Programs with each call at its place.

    Args:
        steps: of each rank.
        sides: of each rank, by step, the calls that it issues.
        events: all of them.
    """

    steps: dict[int, list[Step]]
    sides: dict[int, dict[int, list[EventSide]]]
    events: list[Event]


def lay_out(programs: Programs, rules: str) -> Laid:
    """Finds for each call its queue, its wait and its event."""
    events: dict[Hashable, Event] = {}
    groups: dict[int, int] = {}
    same: dict[Group, int] = {}
    laid = Laid({}, {}, [])
    for rank, steps in programs.items():
        laid.steps[rank] = list(steps)
        own: dict[int, list[EventSide]] = {}
        laid.sides[rank] = own
        counts: dict[Hashable, int] = {}
        lengths: dict[Hashable, int] = {}
        waits = _waits(laid.steps[rank], rules)
        for at, step in enumerate(laid.steps[rank]):
            entries: dict[Hashable, QueueEntry] = {}
            for i, call in enumerate(calls_of(step)):
                group = groups.get(id(call.group))
                if group is None:
                    group = groups[id(call.group)] = same.setdefault(call.group, len(same))
                number = counts[group] = counts.get(group, -1) + 1
                queue = _queue(rules, rank, call, group, isinstance(step, Batch))
                entry = None
                if queue is not None:
                    entry = entries.get(queue)
                    if entry is None:
                        lengths[queue] = lengths.get(queue, -1) + 1
                        entry = entries[queue] = QueueEntry((rank, queue), lengths[queue])
                key, needs = _meeting(rules, rank, call, group)
                nth = counts[key] = counts.get(key, -1) + 1
                # Sends and receives are counted apart, and meet afterwards.
                met = (key[1:] if call.is_transfer else key, nth)
                event = events.get(met)
                if event is None:
                    event = events[met] = Event(needs)
                side = EventSide(
                    rank, call, at, waits.get((at, i), NEVER),
                    number if call.number is None else call.number, entry, event,
                )  # fmt: skip
                event.sides.append(side)
                own.setdefault(at, []).append(side)
                if entry is not None:
                    entry.sides.append(side)
                    entry.left += 1
    laid.events = list(events.values())
    return laid


def _waits(steps: list[Step], rules: str) -> dict[tuple[int, int], int]:
    """By step and call in it, the first step that waits for it, itself where it has no handle."""
    found: dict[tuple[int, int], int] = {}
    under_way: dict[Handle, list[tuple[int, int]]] = {}
    for at, step in enumerate(steps):
        if isinstance(step, Wait):
            for handle in step.handles or tuple(under_way):
                for issued in under_way.pop(handle, ()):
                    found[issued] = at
            continue
        for i, call in enumerate(calls_of(step)):
            named = call.handle if step.handle is None else step.handle
            if named is None:
                found[at, i] = at
            else:
                under_way.setdefault(named, []).append((at, i))
    if rules != "gloo":  # a batch is over as a whole
        for at, step in enumerate(steps):
            if isinstance(step, Batch) and step.calls:
                earliest = min(found.get((at, i), NEVER) for i in range(len(step.calls)))
                found.update({(at, i): earliest for i in range(len(step.calls))})
    return found


def _queue(rules: str, rank: int, call: Call, group: int, is_batch: bool) -> Hashable | None:
    if rules == "gloo":
        return None
    if rules == "strict":
        return "rank"
    if call.is_transfer and not is_batch:
        return group, call.peer
    return group


def _meeting(
    rules: str, rank: int, call: Call, group: int
) -> tuple[tuple[Hashable, ...], tuple[int, ...]]:
    """The key that all sides of a call share, and their ranks."""
    if not call.is_transfer:
        return ("all", group), call.group.ranks
    assert call.peer is not None
    pair = (rank, call.peer) if call.operation == "send" else (call.peer, rank)
    return (call.operation, group, *pair, call.tag if rules == "gloo" else 0), pair


def run(laid: Laid) -> list[Event]:
    """Does what can be done until nothing can; what is left, none where all ranks finish."""
    at = dict.fromkeys(laid.steps, 0)
    issued = dict.fromkeys(laid.steps, 0)
    heads: dict[Hashable, int] = {}
    behind: dict[tuple[Hashable, int], QueueEntry] = {}
    pending: dict[tuple[int, int], int] = {}  # of a rank's step that waits: calls not over
    for rank, own in laid.sides.items():
        for side in (side for sides in own.values() for side in sides):
            place = (rank, side.waited)
            pending[place] = pending.get(place, 0) + 1
    moving = deque(laid.steps)
    over: deque[Event] = deque()

    def begins(side: EventSide) -> None:
        event = side.event
        event.begun += 1
        if event.begun == len(event.needs) and event.is_alike:
            event.is_over = True
            over.append(event)

    def ends(side: EventSide) -> None:
        place, entry = (side.rank, side.waited), side.entry
        pending[place] -= 1
        if pending[place] == 0 and at[side.rank] == side.waited:
            moving.append(side.rank)
        if entry is None:
            return
        entry.left -= 1
        if entry.left == 0:
            heads[entry.queue] = entry.place + 1
            following = behind.pop((entry.queue, entry.place + 1), None)
            for other in following.sides if following is not None else ():
                begins(other)

    while moving:
        rank = moving.popleft()
        steps, sides, here = laid.steps[rank], laid.sides[rank], at[rank]
        while here < len(steps):
            at[rank] = here
            if issued[rank] == here:
                issued[rank] += 1
                for side in sides.get(here, ()):
                    entry = side.entry
                    if entry is None or heads.get(entry.queue, 0) == entry.place:
                        begins(side)
                    else:
                        behind[entry.queue, entry.place] = entry
            while over:
                for side in over.popleft().sides:
                    ends(side)
            if pending.get((rank, here), 0):
                break
            here += 1
        at[rank] = here
    return [event for event in laid.events if not event.is_over]


# -- why not ----------------------------------------------------------------------------


def circle(
    stuck: list[Event], effort: int = 20_000_000
) -> tuple[list[tuple[Event, EventSide]], bool]:
    """A shortest circle of events, each of which must be over before the next can begin.

    Args:
        stuck: what is left, as `run` gives it; all of it whole and alike.
        effort: calls to look at, at most.

    Returns:
        The events, each with its side on the rank where it holds up the next; and whether a
        shorter circle was ruled out within the effort.
    """
    by_step: dict[int, list[EventSide]] = {}
    by_queue: dict[Hashable, list[EventSide]] = {}
    for event in stuck:
        for side in event.sides:
            by_step.setdefault(side.rank, []).append(side)
            if side.entry is not None:
                by_queue.setdefault(side.entry.queue, []).append(side)
    for sides in by_step.values():
        sides.sort(key=lambda side: side.at)
    for sides in by_queue.values():
        sides.sort(key=lambda side: side.entry.place if side.entry is not None else 0)
    best: list[tuple[Event, EventSide]] = []
    ordered = sorted(stuck, key=lambda event: min(side.at for side in event.sides))
    looked_at = 0

    def following(event: Event) -> Iterator[tuple[EventSide, Event]]:
        nonlocal looked_at
        for each in _after(event, by_step, by_queue, seen_from):
            if looked_at >= effort:
                return
            looked_at += 1
            yield each

    for first in ordered:
        seen_from: dict[Hashable, int] = {}
        best = circle_through(first, following, len(best)) or best
        if looked_at >= effort:
            return best, False
        if len(best) == 1 or (len(best) == 2 and not _any_alone(stuck)):
            break
    return best, True


def _any_alone(stuck: list[Event]) -> bool:
    """Whether an event could wait for itself: one rank has two sides of it."""
    return any(len({side.rank for side in event.sides}) < len(event.sides) for event in stuck)


def _after(
    event: Event,
    by_step: dict[int, list[EventSide]],
    by_queue: dict[Hashable, list[EventSide]],
    seen_from: dict[Hashable, int],
) -> Iterator[tuple[EventSide, Event]]:
    """The events that have to wait for one, each with the side that keeps it waiting."""
    for side in event.sides:
        held = by_step[side.rank]
        start = bisect_right(held, side.waited, key=lambda other: other.at)
        yield from _new(side, held, start, ("step", side.rank), seen_from)
        if side.entry is not None:
            queue = by_queue[side.entry.queue]
            start = bisect_right(queue, side.entry.place, key=_place)
            yield from _new(side, queue, start, ("queue", side.entry.queue), seen_from)


def _new(
    side: EventSide,
    held: list[EventSide],
    start: int,
    key: Hashable,
    seen_from: dict[Hashable, int],
) -> Iterator[tuple[EventSide, Event]]:
    until = seen_from.get(key, len(held))
    for other in held[start:until]:
        yield side, other.event
    seen_from[key] = min(start, until)


def _place(side: EventSide) -> int:
    assert side.entry is not None
    return side.entry.place
