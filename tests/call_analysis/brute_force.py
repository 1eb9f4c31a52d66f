"""Programs of ranks taken through every interleaving, one small step after another.

Written from the rules alone, without what `commgrid.call_analysis.rules` makes of them: it knows
nothing of circles, looks at no queue but by scanning what was issued, and tries every order in
which calls can be issued and end.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from commgrid.call_analysis.program import Batch, Programs, Step, Wait
from commgrid.call_records.call import Call

Id = tuple[int, int, int]
"""Rank, step, and place in the step."""

State = tuple[tuple[int, ...], frozenset[frozenset[Id]]]
"""How many steps each rank has begun, and which calls are over."""


class World:
    """Programs under rules: what can happen next."""

    def __init__(self, programs: Programs, rules: str) -> None:
        self.programs, self.rules = programs, rules
        self.ranks = sorted(programs)
        self.calls: dict[Id, Call] = {
            (rank, at, i): call
            for rank in self.ranks
            for at, step in enumerate(programs[rank])
            for i, call in enumerate(inside(step))
        }
        self.meetings = list(self._meetings())

    def _meetings(self) -> Iterator[frozenset[Id] | None]:
        """Calls that end together; None if they never can."""
        counted: dict[tuple[object, ...], int] = {}
        met: dict[tuple[object, ...], list[Id]] = {}
        for (rank, at, i), call in sorted(self.calls.items()):
            tag = call.tag if self.rules == "gloo" else None
            if call.operation == "send":
                who, what = (rank, call.peer), ("message", call.group, rank, call.peer, tag)
            elif call.operation == "recv":
                who, what = (rank, call.peer), ("message", call.group, call.peer, rank, tag)
            else:
                who, what = (rank, None), ("all", call.group)
            key = (*what, call.operation == "recv", *who)
            counted[key] = counted.get(key, 0) + 1
            met.setdefault((*what, counted[key]), []).append((rank, at, i))
        for (kind, *_), ids in met.items():
            calls = [self.calls[each] for each in ids]
            wanted = 2 if kind == "message" else len(calls[0].group.ranks)
            same = {(c.operation, c.root) if kind == "all" else kind for c in calls}
            sizes = {(c.shape, c.dtype) for c in calls}
            whole = len(ids) == wanted and len(same) == 1 and len(sizes) == 1
            yield frozenset(ids) if whole else None

    def queue(self, each: Id) -> object:
        rank, at, _ = each
        call = self.calls[each]
        if self.rules == "strict":
            return rank
        single = not isinstance(self.programs[rank][at], Batch)
        if call.operation in ("send", "recv") and single:
            return rank, call.group, call.peer
        return rank, call.group

    def begins(self, each: Id, over: set[Id]) -> bool:
        """Whether nothing issued before it is in its way; others of its batch are not."""
        if self.rules == "gloo":
            return True
        return not any(
            other[0] == each[0] and other[1] < each[1] and other not in over
            and self.queue(other) == self.queue(each)
            for other in self.calls
        )  # fmt: skip

    def passes(self, rank: int, at: int, over: set[Id]) -> bool:
        """Whether a rank may go beyond a step that it has begun."""
        step = self.programs[rank][at]
        if not isinstance(step, Wait):
            wanted = [(rank, at, i) for i, c in enumerate(inside(step)) if handle(step, c) is None]
        else:
            wanted = [
                (rank, before, i)
                for before in range(at)
                for i, call in enumerate(inside(self.programs[rank][before]))
                if not step.handles or handle(self.programs[rank][before], call) in step.handles
            ]
        if self.rules != "gloo":  # a batch ends as a whole
            wanted += [
                (rank, before, i)
                for _, before, _ in list(wanted)
                for i in range(len(inside(self.programs[rank][before])))
            ]
        return all(each in over for each in wanted)

    def moves(self, state: State) -> Iterator[State]:
        begun, ended = state
        over = {each for meeting in ended for each in meeting}
        for k, rank in enumerate(self.ranks):
            if begun[k] < len(self.programs[rank]) and (
                begun[k] == 0 or self.passes(rank, begun[k] - 1, over)
            ):
                yield (*begun[:k], begun[k] + 1, *begun[k + 1 :]), ended
        issued = dict(zip(self.ranks, begun, strict=True))
        for meeting in self.meetings:
            if meeting is None or meeting in ended:
                continue
            if all(at < issued[rank] for rank, at, _ in meeting) and all(
                self.begins(each, over) for each in meeting
            ):
                yield begun, ended | {meeting}

    def ends(self) -> set[State]:
        """Every state from which nothing more happens, by all ways."""
        start: State = ((0,) * len(self.ranks), frozenset())
        seen, open_, found = {start}, [start], set()
        while open_:
            state = open_.pop()
            following = list(self.moves(state))
            if not following:
                found.add(state)
            for each in following:
                if each not in seen:
                    seen.add(each)
                    open_.append(each)
        return found

    def one_end(self) -> State:
        """Where one way ends."""
        state: State = ((0,) * len(self.ranks), frozenset())
        while (following := next(self.moves(state), None)) is not None:
            state = following
        return state

    def is_finished(self, state: State) -> bool:
        """Whether no rank waits and no call is left."""
        begun, ended = state
        over = {each for meeting in ended for each in meeting}
        return over == set(self.calls) and all(
            begun[k] == len(self.programs[rank])
            and (not begun[k] or self.passes(rank, begun[k] - 1, over))
            for k, rank in enumerate(self.ranks)
        )


def inside(step: Step) -> tuple[Call, ...]:
    if isinstance(step, Wait):
        return ()
    return step.calls if isinstance(step, Batch) else (step,)


def handle(step: Step, call: Call) -> object:
    assert not isinstance(step, Wait)
    return call.handle if step.handle is None else step.handle


def fewest(programs: Programs, rules: str) -> int:
    """Of how many collectives and messages the smallest part consists that cannot end."""
    world = World(programs, rules)
    events: dict[tuple[object, ...], list[Id]] = {}
    counted: dict[tuple[object, ...], int] = {}
    for each, call in sorted(world.calls.items()):
        tag = call.tag if rules == "gloo" else 0
        pair: tuple[object, ...] = ()
        if call.operation in ("send", "recv"):
            ends = (each[0], call.peer)
            pair = (*(ends if call.operation == "send" else ends[::-1]), tag)
        key = (call.group, pair, call.operation == "recv", each[0])
        counted[key] = counted.get(key, 0) + 1
        events.setdefault((call.group, pair, counted[key]), []).append(each)
    for count in range(1, len(events) + 1):
        for chosen in combinations(events.values(), count):
            kept = {each for event in chosen for each in event}
            part = World(only(programs, kept), rules)
            if not part.is_finished(part.one_end()):
                return count
    raise AssertionError("it can end")


def only(programs: Programs, kept: set[Id]) -> dict[int, list[Step]]:
    """Programs of some calls; the waits for others are gone."""
    found: dict[int, list[Step]] = {}
    for rank, steps in programs.items():
        held: set[object] = set()
        found[rank] = []
        for at, step in enumerate(steps):
            if isinstance(step, Wait):
                handles = tuple(h for h in step.handles if h in held)
                if handles or not step.handles:
                    found[rank].append(Wait(handles))
                continue
            calls = tuple(c for i, c in enumerate(inside(step)) if (rank, at, i) in kept)
            held |= {handle(step, call) for call in calls}
            if calls:
                found[rank].append(Batch(calls, step.handle) if isinstance(step, Batch) else step)
    return found
