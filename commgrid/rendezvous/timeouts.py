"""All durations of the rendezvous, each with the reason for its size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timeouts:
    """Durations in seconds.

    Args:
        answer: a store's answer to one operation, at least, however little time is left. A server
            of 16,384 ranks has a queue of some seconds when all of them ask at once.
        margin: kept back from a deadline, in which one rank reports for all who is absent. Reading
            the bitmaps of 16,384 ranks takes 0.2 s.
        lease: for an elected rank to write its decision, before another rank is elected. Longer
            than `answer`, since the elected rank waits for its operations that long.
        unseen: a wait, before a rank publishes where it waits. Most waits are shorter, and cost no
            operation then.
        leave: for others to read why a start failed, before the process that serves the store goes
            on to raise. They read at once, unless their processes have ended.
        settle: for the last living rank to report after a failure. Closed connections tell it, one
            rank after the other, which takes milliseconds; a busy machine takes longer.
        arrive: for living ranks to report after a connection was lost. All learn of it at once, and
            only a busy rank is late.
        connect: for a further connection to the store, at least. The server may look up the name of
            each client's host, which takes a name server's own timeout of 5 s.
    """

    answer: float = 5.0
    margin: float = 1.0
    lease: float = 10.0
    unseen: float = 1.0
    leave: float = 2.0
    settle: float = 1.0
    arrive: float = 10.0
    connect: float = 10.0

    def margin_of(self, left: float) -> float:
        """Return the margin of a wait: less than `margin` where little time is left."""
        return min(self.margin, left / 4)


TIMEOUTS = Timeouts()
