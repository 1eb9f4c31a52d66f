"""Counts of a rank's calls on each communicator, from which a call has its turn."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class CallCount:
    """How many calls of one kind a rank has issued on a communicator.

    Args:
        entry: of the ring, which holds the count too.
    """

    entry: int
    count: int = 0


@dataclass(slots=True, eq=False)
class ChannelCounts(CallCount):
    """Counts of a communicator: of its collectives, of all calls, and of messages by pair."""

    calls: int = 0  # of all kinds
    pairs: dict[tuple[str, int | None, int], CallCount] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Begun:
    """A call that is being issued.

    Args:
        row: of the ring; -1: it is not recorded.
        channel: its communicator.
        turns: what it is counted by.
        turn: its number among these.
        is_refused: whether torch has refused it, so that no rank can wait in it.
    """

    row: int
    channel: ChannelCounts
    turns: CallCount
    turn: int
    is_refused: bool = False
