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
    strict   one for each thread of a rank              communicator, ranks, order

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
from collections.abc import Hashable, Iterator, Sequence

from commgrid.call_analysis.event import NEVER, Event, EventSide, QueueEntry, match
from commgrid.call_analysis.mismatch import parties
from commgrid.call_analysis.program import Batch, Programs, Step, Wait, calls_of, thread_of
from commgrid.call_analysis.wait_cycle import circle_through
from commgrid.call_records.call import Call, Handle

RULES = ("nccl", "gloo", "strict")

Thread = tuple[int, int]
"""A rank, and the number of one of its threads."""


Sides = dict[int, list[EventSide]]
"""By rank, the calls that it issues."""


def lay_out(programs: Programs, rules: str) -> Sides:
    """Finds for each call its queue, its wait and its event."""
    calls = {
        rank: [call for step in steps for call in calls_of(step)]
        for rank, steps in programs.items()
    }
    matched = match(calls, by_tag=rules == "gloo")
    laid: Sides = {}
    for rank, steps in programs.items():
        own = laid[rank] = []
        lasts: dict[Hashable, QueueEntry] = {}
        waits = _waits(steps, rules)
        ahead = iter(matched.sides[rank])
        for at, step in enumerate(steps):
            entries: dict[Hashable, QueueEntry] = {}
            for i, call in enumerate(calls_of(step)):
                side = next(ahead)
                assert side is not None  # `check_sides` refuses what belongs to no event
                side.at, side.waited = at, waits.get((at, i), NEVER)
                side.thread = thread_of(step if side.waited == NEVER else steps[side.waited])
                own.append(side)
                queue = _queue(rules, call, side.event.channel[0], isinstance(step, Batch))
                if queue is None:
                    continue
                entry = entries.get(queue)
                if entry is None:
                    entry = entries[queue] = QueueEntry((rank, queue))
                    if queue in lasts:
                        lasts[queue].behind, entry.is_first = entry, False
                    lasts[queue] = entry
                side.entry = entry
                entry.sides.append(side)
                entry.left += 1
    return laid


def _waits(steps: Sequence[Step], rules: str) -> dict[tuple[int, int], int]:
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


def _queue(rules: str, call: Call, group: int, is_batch: bool) -> Hashable | None:
    if rules == "gloo":
        return None
    if rules == "strict":
        return "thread", call.thread
    if call.is_transfer and not is_batch:
        return group, call.peer
    return group


def run(programs: Programs, laid: Sides) -> list[Event]:
    """Does what can be done until nothing can; what is left, none where all ranks finish."""
    own_steps: dict[Thread, list[int]] = {}
    for rank, steps in programs.items():
        for at, step in enumerate(steps):
            own_steps.setdefault((rank, thread_of(step)), []).append(at)
    ahead = {thread: iter(own) for thread, own in own_steps.items()}
    stands: dict[tuple[int, int], Thread] = {}  # by rank and step, the thread that waits there
    pending: dict[tuple[int, int], int] = {}  # of a rank's step that waits: calls not over
    issued: dict[tuple[int, int], list[EventSide]] = {}  # by rank and step
    for rank, own in laid.items():
        for side in own:
            place = (rank, side.waited)
            pending[place] = pending.get(place, 0) + 1
            issued.setdefault((rank, side.at), []).append(side)
    moving = deque(ahead)
    over: deque[Event] = deque()

    def begins(side: EventSide) -> None:
        event = side.event
        event.begun += 1
        if event.begun == len(event.needs) and is_alike(event):
            event.is_over = True
            over.append(event)

    def ends(side: EventSide) -> None:
        place, entry = (side.rank, side.waited), side.entry
        pending[place] -= 1
        if pending[place] == 0 and place in stands:
            moving.append(stands.pop(place))
        if entry is None:
            return
        entry.left -= 1
        if entry.left == 0 and entry.behind is not None:
            entry.behind.is_first = True
            for other in entry.behind.sides if entry.behind.is_issued else ():
                begins(other)

    def issue(side: EventSide) -> None:
        if side.entry is not None:
            side.entry.is_issued = True
        if side.entry is None or side.entry.is_first:
            begins(side)

    while moving:
        thread = moving.popleft()
        rank = thread[0]
        for at in ahead[thread]:
            for side in issued.get((rank, at), ()):
                issue(side)
            while over:
                for side in over.popleft().sides:
                    ends(side)
            if pending.get((rank, at), 0):
                stands[rank, at] = thread
                break
    events = dict.fromkeys(side.event for own in laid.values() for side in own)
    return [event for event in events if not event.is_over]


def is_alike(event: Event) -> bool:
    """Whether all sides agree."""
    return len({side.call.alike for side in event.sides}) == 1 or len(parties(event.calls)) == 1


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
    orders: dict[Hashable, list[EventSide]] = {}  # of threads and queues, the first step first
    for event in stuck:
        for side in event.sides:
            orders.setdefault(("thread", side.rank, side.call.thread), []).append(side)
            if side.entry is not None:
                orders.setdefault(side.entry.queue, []).append(side)
    for sides in orders.values():
        sides.sort(key=_step)
    best: list[tuple[Event, EventSide]] = []
    ordered = sorted(stuck, key=lambda event: event.first_step)
    looked_at = 0

    def following(event: Event) -> Iterator[tuple[EventSide, Event]]:
        nonlocal looked_at
        for each in _after(event, orders, seen_from):
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
    event: Event, orders: dict[Hashable, list[EventSide]], seen_from: dict[Hashable, int]
) -> Iterator[tuple[EventSide, Event]]:
    """The events that have to wait for one, each with the side that keeps it waiting."""
    for side in event.sides:
        held_up: list[tuple[Hashable, int]] = [(("thread", side.rank, side.thread), side.waited)]
        if side.entry is not None:
            held_up.append((side.entry.queue, side.at))
        for key, step in held_up:
            order = orders.get(key, [])
            start, stop = bisect_right(order, step, key=_step), seen_from.get(key, len(order))
            for other in order[start:stop]:
                yield side, other.event
            seen_from[key] = min(start, stop)


def _step(side: EventSide) -> int:
    return side.at
