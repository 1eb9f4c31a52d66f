"""All ranks' calls side by side: which of them belong together, and which rank waits for which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from commgrid.call_records.call import Call, Group
from commgrid.call_records.trace import Trace


@dataclass(frozen=True)
class PendingCall:
    """A call that a rank has not come out of.

    Args:
        rank: whose.
        call: which.
        turn: its place in the order by which calls are matched.
        absent: the members that have not entered their part of it.
        behind: members whose device has another call to finish first.
        seconds: for how long; None where the traces do not say when they were written.
    """

    rank: int
    call: Call
    turn: int
    absent: tuple[int, ...]
    behind: tuple[int, ...]
    seconds: float | None

    def __str__(self) -> str:
        """The call by its group and turn: `tp all_reduce 3`."""
        return f"{self.call.group.first} {self.call.operation} {self.turn}"


@dataclass
class Ledger:
    """Every rank's trace, by communicator.

    Args:
        traces: by rank.
        now: when the last of them was written, in seconds of the wall clock.
        turns: of each communicator and rank, its collectives by turn.
        transfers: of each communicator, `send` or `recv`, and ranks from and to, calls by turn.
    """

    traces: dict[int, Trace]
    now: float
    turns: dict[Group, dict[int, dict[int, Call]]] = field(default_factory=dict)
    transfers: dict[tuple[Group, str, int, int], dict[int, Call]] = field(default_factory=dict)
    # Ranks that receive from any rank: their messages cannot be matched.
    _open: set[tuple[Group, int]] = field(default_factory=set)
    # Groups without recorded ranks: the place of a peer does not tell its rank.
    _inferred: set[Group] = field(default_factory=set)

    @classmethod
    def of(cls, traces: Iterable[Trace]) -> Ledger:
        held, inferred = _with_ranks({trace.rank: _present(trace) for trace in traces})
        ledger = cls(held, max((_end(trace) for trace in held.values()), default=0.0))
        ledger._inferred = inferred
        for trace in held.values():
            ledger._open |= {
                (call.group, trace.rank) for call in trace.calls
                if call.operation == "recv" and call.peer is None
            }  # fmt: skip
        for trace in held.values():
            ledger._enter(trace)
        return ledger

    def _enter(self, trace: Trace) -> None:
        counts: dict[tuple[str, str, int | None], int] = {}
        for call in trace.calls:
            of = (call.group.name, call.operation if call.is_transfer else "", call.peer)
            turn = counts.get(of, 0) if call.turn is None else call.turn
            counts[of] = turn + 1
            if not call.is_transfer:
                self.turns.setdefault(call.group, {}).setdefault(trace.rank, {})[turn] = call
            elif (way := self.way(trace.rank, call)) is not None:
                self.transfers.setdefault((call.group, call.operation, *way), {})[turn] = call

    def ranks(self) -> set[int]:
        """Every rank that a trace knows of."""
        found = set(self.traces)
        for trace in self.traces.values():
            found.update(*trace.members.values(), *(group.ranks for group in _groups(trace)))
        return found

    def way(self, rank: int, call: Call) -> tuple[int, int] | None:
        """Source and target of a transfer; None: its receiver takes from any rank."""
        if call.peer is None or call.group in self._inferred:
            return None
        source, target = (rank, call.peer) if call.operation == "send" else (call.peer, rank)
        return None if (call.group, target) in self._open else (source, target)

    def turn(self, rank: int, call: Call) -> int:
        """The place of a rank's call in the order by which calls are matched."""
        if call.turn is not None:
            return call.turn
        way = self.way(rank, call)
        held: Mapping[int, Call] = (
            self.transfers.get((call.group, call.operation, *way), {})
            if call.is_transfer and way is not None
            else self.turns.get(call.group, {}).get(rank, {})
        )
        return next((turn for turn, each in held.items() if each is call), 0)

    def entered(self, group: Group, rank: int) -> int:
        """How many collectives a rank has issued on a communicator."""
        trace = self.traces.get(rank)
        if trace is None:
            return 0
        held = self.turns.get(group, {}).get(rank, {})
        return max(max(held, default=-1) + 1, trace.entered.get(group.name, 0))

    def has_ended(self, group: Group, rank: int, turn: int) -> bool:
        """Whether a rank is done with its collective of a turn."""
        call = self.turns.get(group, {}).get(rank, {}).get(turn)
        return turn < self.entered(group, rank) if call is None else call.ended is not None

    def partners(self, rank: int, call: Call) -> dict[int, Call]:
        """By rank, the calls of others that belong to a rank's, as far as they are kept."""
        group, turn = call.group, self.turn(rank, call)
        if not call.is_transfer:
            every = self.turns[group].items()
            return {r: held[turn] for r, held in every if turn in held and r != rank}
        way = self.way(rank, call)
        if way is None:
            return {}
        other = "recv" if call.operation == "send" else "send"
        found = self.transfers.get((group, other, *way), {}).get(turn)
        return {} if found is None else {way[0] if way[1] == rank else way[1]: found}

    def absent(self, rank: int, call: Call) -> tuple[int, ...]:
        """The members that have not entered their part of a rank's call."""
        group, turn = call.group, self.turn(rank, call)
        if not call.is_transfer:
            return tuple(m for m in group.ranks if self.entered(group, m) <= turn)
        way = self.way(rank, call)
        if way is None:
            return ()
        peer = way[0] if way[1] == rank else way[1]
        other = "recv" if call.operation == "send" else "send"
        held = self.transfers.get((group, other, *way), {})
        return () if turn <= max(held, default=-1) else (peer,)

    def waits(self, rank: int) -> list[PendingCall]:
        """The unfinished calls of a rank, the first one first."""
        found = []
        for call in self._under_way(self.traces[rank]):
            absent = self.absent(rank, call)
            behind: tuple[int, ...] = ()
            if self.traces[rank].on_device:
                behind = tuple(
                    each for each, theirs in self.partners(rank, call).items()
                    if theirs.ended is None and self._first(each) is not theirs
                )  # fmt: skip
            timed = self.traces[rank].at is not None
            seconds = max(self.now - call.began, 0.0) if timed else None
            found.append(PendingCall(rank, call, self.turn(rank, call), absent, behind, seconds))
        return found

    def _first(self, rank: int) -> Call | None:
        """The call that a device has to finish first."""
        return next((call for call in self.traces[rank].calls if call.ended is None), None)

    def _under_way(self, trace: Trace) -> list[Call]:
        if trace.on_device:
            first = self._first(trace.rank)
            return [] if first is None else [first]
        if trace.waits is not None:
            waited = set(trace.waits)
            found = [
                call for call in trace.calls
                if call.issued is None
                or ((call.group.name, call.number) in waited and not call.ended)
            ]  # fmt: skip
            if found or trace.over:
                return found
        if trace.waits is None:
            return [call for call in trace.calls if call.ended is None]
        # On a device a host's wait ends at once: what others have not entered is waited for.
        return [call for call in trace.calls[-_RECENT:] if self.absent(trace.rank, call)][:1]


_RECENT = 2000


def _present(trace: Trace) -> Trace:
    """A trace without the calls on communicators of before that had the same names."""
    if not trace.since:
        return trace
    calls = tuple(
        call for call in trace.calls if call.began >= trace.since.get(call.group.name, 0.0)
    )
    return replace(trace, calls=calls)


def _groups(trace: Trace) -> set[Group]:
    return {call.group for call in trace.calls}


def _with_ranks(traces: dict[int, Trace]) -> tuple[dict[int, Trace], set[Group]]:
    """Take the ranks that issue calls on a group for its members, if these were not recorded.

    Returns:
        The traces, and the groups whose members are taken so.
    """
    found: dict[str, set[int]] = {}
    for trace in traces.values():
        for group in _groups(trace):
            if not group.ranks:
                found.setdefault(group.name, set()).add(trace.rank)
    groups = {name: Group(name, tuple(sorted(ranks))) for name, ranks in found.items()}
    if not groups:
        return traces, set()

    def known(call: Call) -> Call:
        return call if call.group.ranks else replace(call, group=groups[call.group.name])

    found_here = {
        rank: replace(trace, calls=tuple(known(call) for call in trace.calls))
        for rank, trace in traces.items()
    }
    return found_here, set(groups.values())


def _end(trace: Trace) -> float:
    if trace.at is not None:
        return trace.at
    return max((call.ended or call.began for call in trace.calls), default=0.0)
