"""Counts of a rank's calls on each communicator, from which a call has its turn."""

from __future__ import annotations

from dataclasses import dataclass


class CallCount:
    """How many calls of one kind a rank has issued on a communicator.

    Args:
        entry: of the ring, which holds the count too.
    """

    __slots__ = ("count", "entry")

    def __init__(self, entry: int) -> None:
        self.entry, self.count = entry, 0


class ChannelCounts(CallCount):
    """Counts of a communicator: of its collectives, of all calls, and of messages by pair.

    Args:
        entry: of the ring.
    """

    __slots__ = ("calls", "pairs")

    def __init__(self, entry: int) -> None:
        super().__init__(entry)
        self.calls = 0  # of all kinds
        self.pairs: dict[tuple[str, int | None, int], CallCount] = {}


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
