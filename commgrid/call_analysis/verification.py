"""Whether every rank can finish what ranks are about to issue, and if not, the shortest reason why.

    programs = commgrid.verify.programs("runs/trace")      what COMMGRID_TRACE recorded
    verdict = commgrid.verify.check(programs, "nccl")
    print(verdict)

A program can be written by hand:

    >>> tp, dp = Group("tp", (0, 1)), Group("dp", (0, 1))
    >>> found = check({
    ...     0: [Call(tp, "all_reduce", where="a.py:12"), Call(dp, "all_reduce", where="a.py:15")],
    ...     1: [Call(dp, "all_reduce", where="b.py:40"), Call(tp, "all_reduce", where="b.py:44")],
    ... })
    >>> print(found)
    cannot finish under nccl's rules: 2 calls wait in a circle
      rank 0 waits in tp all_reduce 0 (a.py:12) for rank 1, which comes to it at b.py:44, after dp \
all_reduce 0
      rank 1 waits in dp all_reduce 0 (b.py:40) for rank 0, which comes to it at a.py:15, after tp \
all_reduce 0

The rules, and why one look at the programs decides it, are in `commgrid.call_analysis.rules`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from commgrid.call_analysis.event import Event, EventSide
from commgrid.call_analysis.mismatch import both, parties
from commgrid.call_analysis.program import (
    Batch,
    Programs,
    Step,
    Wait,
    calls_of,
    check_sides,
    from_traces,
)
from commgrid.call_analysis.rules import RULES, Sides, circle, is_alike, lay_out, run
from commgrid.call_records import files as trace_files
from commgrid.call_records.call import Call, Group, Handle
from commgrid.layout.axis_names import check_word

__all__ = ["Batch", "Call", "Group", "Place", "Verdict", "Wait", "check", "programs"]


@dataclass(frozen=True)
class Place:
    """A call of a counterexample, and why it is never over.

    Args:
        rank: where it stands.
        call: such as `tp all_reduce 3`.
        where: its place in the program.
        why: in words.
    """

    rank: int
    call: str
    where: str
    why: str


@dataclass(frozen=True)
class Verdict:
    """The result of a check.

    Args:
        rules: nccl, gloo or strict.
        ranks, calls: how many were looked at.
        kind: what keeps ranks from finishing: `circle`, `never issued` or `differs`; None: nothing.
        places: the shortest reason.
        programs: the smallest part of the given programs that cannot finish either.
        is_shortest: False: there were too many calls to rule out a shorter one.
    """

    rules: str
    ranks: int
    calls: int
    kind: str | None = None
    places: tuple[Place, ...] = ()
    programs: dict[int, list[Step]] = field(default_factory=dict)
    is_shortest: bool = True

    @property
    def finishes(self) -> bool:
        """Whether every rank comes to its end."""
        return self.kind is None

    def __str__(self) -> str:
        whose = "strict" if self.rules == "strict" else f"{self.rules}'s"
        if self.finishes:
            return f"{self.ranks:,} ranks, {self.calls:,} calls: all finish under {whose} rules"
        what = {
            "circle": f"{len(self.places)} call{'s' * (len(self.places) > 1)} wait in a circle",
            "never issued": "a call that not all of its ranks issue",
            "differs": "a call that its ranks give differently",
        }[str(self.kind)]
        lines = [f"cannot finish under {whose} rules: {what}"]
        lines += [f"  {place.why}" for place in self.places]
        if not self.is_shortest:
            lines.append("  there may be a shorter circle: there were too many to look at all")
        return "\n".join(lines)

    def draw(self) -> str:
        """A line per rank of the smallest part; brackets mark the call where a rank stands.

        >>> pp = Group("pp", (0, 1))
        >>> sends = {r: [Call(pp, "send", 1 - r), Call(pp, "recv", 1 - r)] for r in range(2)}
        >>> print(check(sends).draw())
        rank 0  [pp send 0 to rank 1]  pp recv 1 from rank 1
        rank 1  [pp send 0 to rank 0]  pp recv 1 from rank 0
        """
        laid = lay_out(self.programs, self.rules)
        run(self.programs, laid)
        width = len(f"rank {max(self.programs, default=0)}")
        lines = []
        for rank, own in laid.items():
            stands = next((side for side in own if not side.event.is_over), None)
            told = [f"[{said(side)}]" if side is stands else said(side) for side in own]
            if told:
                lines.append(f"{f'rank {rank}':{width}}  {'  '.join(told)}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "rules": self.rules, "finishes": self.finishes, "ranks": self.ranks,
            "calls": self.calls, "kind": self.kind, "is_shortest": self.is_shortest,
            "places": [asdict(place) for place in self.places],
        }  # fmt: skip


def programs(folder: str | Path) -> dict[int, list[Step]]:
    """Return the programs of all ranks from the traces in a folder.

    Args:
        folder: what COMMGRID_TRACE or `commgrid.trace.save` was given.

    Raises:
        SpecError: no traces, or some from which it cannot be told.
    """
    return from_traces(trace_files.read(Path(folder)))


def check(programs: Programs, rules: str = "nccl") -> Verdict:
    """Decides whether every rank can finish.

    Args:
        programs: by rank, what it issues.
        rules: nccl, gloo, or strict: as if each call were waited for where it stands.

    Raises:
        SpecError: other rules, or programs that no ranks could issue.
    """
    check_word("rules=", rules, RULES)
    check_sides(programs)
    laid = lay_out(programs, rules)
    stuck = run(programs, laid)
    calls = sum(map(len, laid.values()))
    if not stuck:
        return Verdict(rules, len(programs), calls)
    wrong = [event for event in stuck if not event.is_whole or not is_alike(event)]
    if wrong:
        first = min(wrong, key=lambda event: (event.begun != len(event.sides), event.first_step))
        kind = "differs" if first.is_whole else "never issued"
        places = _differing(first) if first.is_whole else (_missing(first, laid),)
        return Verdict(rules, len(programs), calls, kind, places, _part(programs, [first]))
    found, is_shortest = circle(stuck)
    kept = _part(programs, [event for event, _ in found])
    return Verdict(rules, len(programs), calls, "circle", _waiting(found), kept, is_shortest)


# -- in words ---------------------------------------------------------------------------


def said(side: EventSide, *, with_place: bool = False) -> str:
    """A call by names, such as `tp all_reduce 3 (a.py:12)`."""
    call = side.call
    peer = ""
    if call.is_transfer:
        peer = f" {'to' if call.operation == 'send' else 'from'} rank {call.peer}"
    where = f" ({call.where})" if with_place and call.where else ""
    return f"{call.group.short} {call.operation} {side.number}{peer}{where}"


def _place(side: EventSide, why: str) -> Place:
    return Place(side.rank, said(side), side.call.where, why)


def _waiting(found: list[tuple[Event, EventSide]]) -> tuple[Place, ...]:
    """Each call of a circle waits for the rank that stands in the one before."""
    places = []
    for i, (event, side) in enumerate(found):
        before = found[i - 1][1]
        late = next(s for s in event.sides if s.rank == before.rank and s is not before)
        follower = found[(i + 1) % len(found)][0]
        next_here = next(s for s in follower.sides if s.rank == side.rank and s is not side)
        told = said(side, with_place=True)
        how = f"rank {side.rank} waits in {told} for"
        if next_here.at <= side.waited:
            how = f"rank {side.rank}'s queue stands at {told} for"
        at = f" at {late.call.where}," if late.call.where else ""
        whom = f"rank {before.rank}, which comes"
        if before.rank == side.rank:
            whom = "itself, which comes"
        order = "after" if late.at > before.waited else "behind"
        places.append(_place(side, f"{how} {whom} to it{at} {order} {said(before)}"))
    turn = min(range(len(places)), key=lambda i: places[i].rank)
    return tuple(places[turn:] + places[:turn])


def _differing(event: Event) -> tuple[Place, ...]:
    """The calls that differ, each by the first of the ranks that issue it."""
    sides = {side.rank: side for side in event.sides}
    places = []
    for ranks, _ in sorted(parties(event.calls), key=lambda party: party.ranks[0]):
        side = sides[ranks[0]]
        told = both([(ranks, side.call.said(), side.call.where)])
        places.append(_place(side, f"{said(side)}: {told}"))
    return tuple(places)


def _missing(event: Event, laid: Sides) -> Place:
    """Who never comes, and where its calls on the communicator begin to be other ones."""
    side = event.sides[0]
    here = {each.rank for each in event.sides}
    absent = [rank for rank in event.needs if rank not in here]
    issues = f"rank {side.rank} issues {said(side, with_place=True)}"
    if side.call.is_transfer:
        other = "receives" if side.call.operation == "send" else "sends"
        why = f"{issues}, which that rank never {other}"
    else:
        whom = "rank" if len(absent) == 1 else "ranks"
        listed = ", ".join(map(str, absent[:8])) + (", …" if len(absent) > 8 else "")
        why = (
            f"{issues}, which {whom} {listed} never "
            f"{'do' if len(absent) > 1 else 'does'}{_parting(event, side, absent[0], laid)}"
        )
    return _place(side, why)


def _parting(event: Event, side: EventSide, absent: int, laid: Sides) -> str:
    """The first collective of two ranks that comes from other places of the program."""
    ours, theirs = (
        [s for s in laid[rank]
         if s.call.group == side.call.group and not s.call.is_transfer]
        for rank in (side.rank, absent)
    )  # fmt: skip
    for one, other in zip(ours, theirs, strict=False):
        if one.call.where != other.call.where:
            return (
                f"; the first that come from other places are {said(one, with_place=True)} and, on "
                f"rank {absent}, {said(other, with_place=True)}"
            )
    return f"; it issues {len(theirs)} there, rank {side.rank} {len(ours)}"


# -- the smallest part ------------------------------------------------------------------


def _part(programs: Programs, events: Sequence[Event]) -> dict[int, list[Step]]:
    """Of the programs only some events, and the waits for them."""
    ranks = {rank for event in events for rank in event.sides[0].call.group.ranks}
    numbers = {
        (side.rank, side.at, id(side.call)): side.number
        for event in events for side in event.sides
    }  # fmt: skip
    part: dict[int, list[Step]] = {rank: [] for rank in programs if rank in ranks}
    for rank, kept in part.items():
        under_way: set[Handle] = set()
        for at, step in enumerate(programs[rank]):
            if isinstance(step, Wait):
                waited = tuple(handle for handle in step.handles if handle in under_way)
                if waited or (under_way and not step.handles):
                    kept.append(Wait(waited, step.thread))
                under_way -= set(waited) if step.handles else under_way.copy()
                continue
            calls = tuple(
                replace(call, number=numbers[rank, at, id(call)])
                for call in calls_of(step) if (rank, at, id(call)) in numbers
            )  # fmt: skip
            if not calls:
                continue
            handles = {call.handle if step.handle is None else step.handle for call in calls}
            under_way |= {handle for handle in handles if handle is not None}
            kept.append(Batch(calls, step.handle) if isinstance(step, Batch) else calls[0])
    return part
