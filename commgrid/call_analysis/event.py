"""Events: the calls of different ranks that belong together. This is the one matcher.

    rank 0   tp all_reduce 0   tp all_reduce 1   ┐
    rank 1   tp all_reduce 0   tp all_reduce 1   ┘ the collective with turn 1 of tp: one event

An event is the n-th collective of a communicator, or the n-th message of a communicator, a source,
a target and a tag. The n is a call's recorded turn; where none was recorded, it is counted. Two
communicators differ if their keys or ranks do; names decide only where no key was recorded.

Three kinds of calls belong to no event: calls on a communicator without a recorded key and ranks,
messages to a rank that receives from any source there, and messages on a communicator without
recorded ranks, where a place does not tell a rank.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from commgrid.call_records.call import Call, Group

NEVER = 1 << 60  # a step that no program has

Channel = tuple[int, ...]
"""A communicator's number, and of messages source, target and tag: what turns are counted on."""

Part = int | str
"""The rank of a collective's side; `send` or `recv` of a message's."""


@dataclass(slots=True, eq=False)
class QueueEntry:
    """A place in a queue: the queue, what it holds, how much is not over, the next place."""

    queue: Hashable
    sides: list[EventSide] = field(default_factory=list)
    left: int = 0
    behind: QueueEntry | None = None
    is_first: bool = True  # as far as was played
    is_issued: bool = False


@dataclass(slots=True, eq=False)
class EventSide:
    """One rank's part in an event.

    Args:
        rank, call: whose, and what it issues.
        number: how many the rank had issued on the communicator before.
        at: the step of a program that issues it.
        waited: the first step that waits for it; `NEVER`: none does.
        thread: that takes this step.
        entry: its place in a queue, shared by a batch; None: it is in none.
    """

    rank: int
    call: Call
    event: Event
    number: int
    at: int = 0
    waited: int = NEVER
    thread: int = 0
    entry: QueueEntry | None = None


@dataclass(slots=True, eq=False)
class Event:
    """A collective, or a message, of all sides that take part.

    Args:
        group: the communicator, with its ranks.
        channel, turn: its identity.
        needs: the ranks.
        sides: what they issue, in no order; fewer than needs where a call is not recorded.
        begun, is_over: how many of them have begun, and whether it is over, as far as was played.
    """

    group: Group
    channel: Channel
    turn: int
    needs: tuple[int, ...]
    sides: list[EventSide] = field(default_factory=list)
    begun: int = 0
    is_over: bool = False

    @property
    def is_message(self) -> bool:
        """Whether it is between two ranks alone."""
        return len(self.channel) > 1

    @property
    def is_whole(self) -> bool:
        """Whether all sides issue it."""
        return len(self.sides) == len(self.needs)

    @property
    def first_step(self) -> int:
        """The first step of a program that issues a side of it."""
        return min(side.at for side in self.sides)

    @property
    def calls(self) -> dict[int, Call]:
        """By rank, what it issues."""
        return {side.rank: side.call for side in self.sides}


@dataclass
class Matched:
    """The calls of all ranks, with the events they belong to.

    Args:
        events: by identity.
        sides: of each rank, one for each of its calls; None: it belongs to no event.
        issued: by channel and part, how many calls were issued.
        groups: the communicators, by number.
    """

    events: dict[tuple[Channel, int], Event] = field(default_factory=dict)
    sides: dict[int, list[EventSide | None]] = field(default_factory=dict)
    issued: dict[tuple[Channel, Part], int] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    _numbers: dict[object, int | None] = field(default_factory=dict)
    _kept: list[Group] = field(default_factory=list)  # so that no id is used again
    _inferred: set[int] = field(
        default_factory=set
    )  # groups whose callers are taken for their members
    _open: set[tuple[int, int]] = field(default_factory=set)  # where a rank receives from any

    def number(self, group: Group) -> int | None:
        """The number of a communicator; None: neither key nor ranks are known."""
        found = self._numbers.get(id(group), -1)
        if found != -1:
            return found
        identity = group.key or group.name, group.ranks
        found = self._numbers.get(identity, -1)
        if found == -1 and not group.ranks:
            known = [n for n, each in enumerate(self.groups) if group.key and each.key == group.key]
            found = known[0] if len(known) == 1 else None if not group.key else -1
        if found == -1:
            found = len(self.groups)
            self.groups.append(group)
            if not group.ranks:
                self._inferred.add(found)
        self._kept.append(group)
        self._numbers[id(group)] = self._numbers[identity] = found
        return found

    def channel(
        self, group: Group, operation: str, source: int | None, target: int | None, tag: int
    ) -> Channel | None:
        """The channel of a collective, or of a message; None: it is not known."""
        number = self.number(group)
        if number is None or operation not in ("send", "recv"):
            return None if number is None else (number,)
        if number in self._inferred or source is None or target is None:
            return None
        return None if (number, target) in self._open else (number, source, target, tag)

    def note(self, channel: Channel | None, part: Part, count: int) -> None:
        """Note that so many calls were issued, also if none of them is kept."""
        if channel is not None:
            self.issued[channel, part] = max(self.issued.get((channel, part), 0), count)

    def absent(self, event: Event) -> tuple[int, ...]:
        """The ranks that have not entered an event."""
        parts: Iterable[Part] = ("send", "recv") if event.is_message else event.needs
        return tuple(
            rank for rank, part in zip(event.needs, parts, strict=True)
            if self.issued.get((event.channel, part), 0) <= event.turn
        )  # fmt: skip

    def _meet(self, calls: Mapping[int, Iterable[Call]], known: Iterable[Group]) -> None:
        """Know the communicators, those with ranks first, and who receives from any source."""
        met = {id(call.group): call.group for own in calls.values() for call in own}
        met |= {id(group): group for group in known}
        for group in sorted(met.values(), key=lambda each: not each.ranks):
            self.number(group)
        callers: dict[int, set[int]] = {}
        for rank, own in calls.items():
            for call in own:
                number = self._numbers[id(call.group)]
                if number in self._inferred:
                    callers.setdefault(number, set()).add(rank)
                if call.operation == "recv" and call.peer is None and number is not None:
                    self._open.add((number, rank))
        for number, ranks in callers.items():
            self.groups[number] = replace(self.groups[number], ranks=tuple(sorted(ranks)))

    def _enter(self, rank: int, call: Call, counts: dict[object, int], by_tag: bool) -> None:
        source, target = (rank, call.peer) if call.operation == "send" else (call.peer, rank)
        tag = call.tag if by_tag else 0
        channel = self.channel(call.group, call.operation, source, target, tag)
        group = self._numbers[id(call.group)]
        number = counts[group] = counts.get(group, -1) + 1
        if channel is None:
            self.sides[rank].append(None)
            return
        part: Part = call.operation if call.is_transfer else rank
        turn = counts.get((channel, part), 0)
        # A recorded turn counts messages of one tag.
        if call.turn is not None and (by_tag or not call.is_transfer):
            turn = call.turn
        counts[channel, part] = turn + 1
        self.note(channel, part, turn + 1)
        event = self.events.get((channel, turn))
        if event is None:
            ranks = self.groups[channel[0]].ranks if len(channel) == 1 else channel[1:3]
            event = Event(self.groups[channel[0]], channel, turn, ranks)
            self.events[channel, turn] = event
        side = EventSide(rank, call, event, number if call.number is None else call.number)
        event.sides.append(side)
        self.sides[rank].append(side)


def match(
    calls: Mapping[int, Iterable[Call]], known: Iterable[Group] = (), by_tag: bool = True
) -> Matched:
    """Find the events that calls belong to.

    Args:
        calls: of each rank, in the order in which it issues them.
        known: communicators that ranks are members of; of one without recorded ranks that no other
            record has ranks of, the ranks that call there are taken for its members.
        by_tag: whether messages meet by tag, as on gloo; else by order alone.

    Example:
        >>> tp = Group("tp", (0, 1))
        >>> found = match({0: [Call(tp, "send", 1)], 1: [Call(tp, "recv", 0), Call(tp, "barrier")]})
        >>> [(event.needs, found.absent(event)) for event in found.events.values()]
        [((0, 1), ()), ((0, 1), (0,))]
    """
    kept = {rank: list(own) for rank, own in calls.items()}
    found = Matched()
    found._meet(kept, known)
    for rank, own in kept.items():
        found.sides[rank] = []
        counts: dict[object, int] = {}
        for call in own:
            found._enter(rank, call, counts, by_tag)
    return found
