"""All ranks' calls side by side: which of them belong together, and which rank waits for which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from commgrid.observe.traces import Call, Trace


@dataclass(frozen=True, order=True)
class Channel:
    """A communicator as all its members know it.

    Args:
        group: its names with commas.
        members: global ranks, in the group's order.
    """

    group: str
    members: tuple[int, ...]

    @property
    def name(self) -> str:
        """Its first name."""
        return self.group.split(",")[0]


@dataclass(frozen=True)
class Wait:
    """A call that a rank has not come out of.

    Args:
        rank: whose.
        channel: on which communicator.
        call: which.
        absent: the members that have not entered their part of it.
        behind: members whose device has another call to finish first.
        seconds: for how long; None where the traces do not say when they were written.
    """

    rank: int
    channel: Channel
    call: Call
    absent: tuple[int, ...]
    behind: tuple[int, ...]
    seconds: float | None


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
    turns: dict[Channel, dict[int, dict[int, Call]]] = field(default_factory=dict)
    transfers: dict[tuple[Channel, str, int, int], dict[int, Call]] = field(default_factory=dict)
    _channels: dict[tuple[int, str], Channel] = field(default_factory=dict)
    # Ranks that receive from any rank: their messages cannot be matched.
    _open: set[tuple[Channel, int]] = field(default_factory=set)

    @classmethod
    def of(cls, traces: Iterable[Trace]) -> Ledger:
        held = {trace.rank: _present(trace) for trace in traces}
        ledger = cls(held, max((_end(trace) for trace in held.values()), default=0.0))
        unknown: dict[str, set[int]] = {}
        for trace in held.values():
            for group in {call.group for call in trace.calls}:
                if not trace.members.get(group):
                    unknown.setdefault(group, set()).add(trace.rank)
        for trace in held.values():
            for group in {call.group for call in trace.calls} | trace.members.keys():
                members = trace.members.get(group) or tuple(sorted(unknown.get(group, ())))
                ledger._channels[trace.rank, group] = Channel(group, members)
            ledger._open |= {
                (ledger.channel(trace.rank, call), trace.rank)
                for call in trace.calls if call.operation == "recv" and call.peer is None
            }  # fmt: skip
        for trace in held.values():
            ledger._enter(trace)
        return ledger

    def _enter(self, trace: Trace) -> None:
        counts: dict[tuple[str, str, int | None], int] = {}
        for call in trace.calls:
            channel = self._channels[trace.rank, call.group]
            of = (call.group, call.operation if call.is_transfer else "",
                  call.peer if call.is_transfer else None)  # fmt: skip
            turn = counts.get(of, 0) if call.turn is None else call.turn
            counts[of] = turn + 1
            if not call.is_transfer:
                self.turns.setdefault(channel, {}).setdefault(trace.rank, {})[turn] = call
            elif (way := self.way(trace.rank, call)) is not None:
                self.transfers.setdefault((channel, call.operation, *way), {})[turn] = call

    def channel(self, rank: int, call: Call) -> Channel:
        """The communicator of a rank's call."""
        return self._channels[rank, call.group]

    def channels(self) -> Iterator[Channel]:
        """Every communicator that any rank knows."""
        return iter(sorted(set(self._channels.values())))

    def way(self, rank: int, call: Call) -> tuple[int, int] | None:
        """Source and target of a transfer; None: its receiver takes from any rank."""
        channel = self._channels[rank, call.group]
        if call.peer is None or call.peer >= len(channel.members):
            return None
        peer = channel.members[call.peer]
        source, target = (rank, peer) if call.operation == "send" else (peer, rank)
        return None if (channel, target) in self._open else (source, target)

    def turn(self, rank: int, call: Call) -> int:
        """The place of a rank's call in the order by which calls are matched."""
        if call.turn is not None:
            return call.turn
        channel = self.channel(rank, call)
        way = self.way(rank, call)
        held: Mapping[int, Call] = (
            self.transfers.get((channel, call.operation, *way), {})
            if call.is_transfer and way is not None
            else self.turns.get(channel, {}).get(rank, {})
        )
        return next((turn for turn, each in held.items() if each is call), 0)

    def entered(self, channel: Channel, rank: int) -> int:
        """How many collectives a rank has issued on a communicator."""
        trace = self.traces.get(rank)
        if trace is None:
            return 0
        held = self.turns.get(channel, {}).get(rank, {})
        return max(max(held, default=-1) + 1, trace.entered.get(channel.group, 0))

    def has_ended(self, channel: Channel, rank: int, turn: int) -> bool:
        """Whether a rank is done with its collective of a turn."""
        call = self.turns.get(channel, {}).get(rank, {}).get(turn)
        return turn < self.entered(channel, rank) if call is None else call.ended is not None

    def partners(self, rank: int, call: Call) -> dict[int, Call]:
        """By rank, the calls of others that belong to a rank's, as far as they are kept."""
        channel, turn = self.channel(rank, call), self.turn(rank, call)
        if not call.is_transfer:
            every = self.turns[channel].items()
            return {r: held[turn] for r, held in every if turn in held and r != rank}
        way = self.way(rank, call)
        if way is None:
            return {}
        other = "recv" if call.operation == "send" else "send"
        found = self.transfers.get((channel, other, *way), {}).get(turn)
        return {} if found is None else {way[0] if way[1] == rank else way[1]: found}

    def absent(self, rank: int, call: Call) -> tuple[int, ...]:
        """The members that have not entered their part of a rank's call."""
        channel, turn = self.channel(rank, call), self.turn(rank, call)
        if not call.is_transfer:
            return tuple(m for m in channel.members if self.entered(channel, m) <= turn)
        way = self.way(rank, call)
        if way is None:
            return ()
        peer = way[0] if way[1] == rank else way[1]
        other = "recv" if call.operation == "send" else "send"
        held = self.transfers.get((channel, other, *way), {})
        return () if turn <= max(held, default=-1) else (peer,)

    def waits(self, rank: int) -> list[Wait]:
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
            found.append(Wait(rank, self.channel(rank, call), call, absent, behind, seconds))
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
                if call.issued is None or ((call.group, call.number) in waited and not call.ended)
            ]  # fmt: skip
            if found or trace.over:
                return found
        ended = [call for call in trace.calls if call.ended is None]
        if trace.waits is None:
            return ended
        # On a device a host's wait ends at once: what others have not entered is waited for.
        return [call for call in trace.calls[-_RECENT:] if self.absent(trace.rank, call)][:1]


_RECENT = 2000


def _present(trace: Trace) -> Trace:
    """A trace without the calls on communicators of before that had the same names."""
    if not trace.since:
        return trace
    calls = tuple(call for call in trace.calls if call.began >= trace.since.get(call.group, 0.0))
    return replace(trace, calls=calls)


def _end(trace: Trace) -> float:
    if trace.at is not None:
        return trace.at
    return max((call.ended or call.began for call in trace.calls), default=0.0)
