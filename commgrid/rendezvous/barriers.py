"""A sequence of named barriers that the same ranks pass.

Each is a round: all ranks pass it, or all have the same reason why not. A rank that fails decides
so, and every rank that waits there, or comes later, reads its reason. A rank whose connection was
closed may have been closed by a rank that only waited too long for a third one. So such ranks
arrive in the barrier's `failed` place, and wait there for a rank that knows the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from commgrid.layout.rank_text import describe_ranks, pack
from commgrid.rendezvous.arrival_bitmap import Arrival, arrive, arrived, counters
from commgrid.rendezvous.op import Drop, Now, Protocol, WaitKey
from commgrid.rendezvous.round import Decision, conclude, drop, round_
from commgrid.rendezvous.timeouts import timeouts


class Barriers:
    """One rank's part in a sequence of barriers. Its methods are protocols.

    Args:
        key: what their keys begin with; nothing else at the store does.
        me: this process's rank.
        ranks: the ranks that pass them.
    """

    def __init__(self, key: str, me: int, ranks: Sequence[int]) -> None:
        self._key, self._me, self.ranks = key, me, ranks
        self._used: set[str] = set()
        self._at = ""
        self.lost: Decision | None = None
        """The decision that a rank is lost, so that no later barrier opens either."""

    def come(
        self,
        name: str,
        until: float,
        did_not: str,
        also: Callable[[Sequence[int]], str] = lambda absent: "",
    ) -> Protocol[Decision]:
        """Arrive at a barrier, and return its decision.

        Args:
            name: of the barrier, which every rank passes once.
            until: time at which the absent ranks are named.
            did_not: what they did not do, for the message.
            also: returns what is known of absent ranks, which is appended to the message; called
                on the rank that decides.
        """
        began = yield Now()

        def decide(absent: Sequence[int], time_is_up: bool) -> Protocol[Mapping[str, Any]]:
            if not time_is_up:
                yield from self._forget(but=name)  # all ranks have left the earlier ones
                return {"kind": "agreed"}
            limit = f"within {round(until - began, 1):.3g} s"
            said = f"{describe_ranks(absent)} {did_not} {limit}"
            if not absent:
                said = f"all ranks have come, and the last of them did not say so {limit}"
            elif known := also(absent):
                said = f"{said}; {known}"
            return {"kind": "absent", "absent": pack(absent), "message": said}

        self._at = name
        if self.lost is not None:
            decision = yield from conclude(self._place(name), self.lost)
        else:
            decision = yield from round_(self._place(name), self._me, self.ranks, until, decide)
        self._at = ""
        self._heed(decision)
        self._used.add(name)
        return decision

    def fail(self, name: str, kind: str, message: str) -> Protocol[Decision]:
        """Decide that a barrier fails, unless there is a decision; return the standing one."""
        self._used.add(name)
        decision = yield from conclude(self._place(name), {"kind": kind, "message": message})
        self._heed(decision)
        return decision

    def interrupt(self, why: str, late: bool) -> Protocol[None]:
        """End the barrier that this rank waits at, and all later ones.

        Args:
            why: which rank is lost.
            late: whether it may be alive.
        """
        self.lost = {"kind": "absent" if late else "gone", "message": why, "lost": True}
        if self._at:
            yield from conclude(self._place(self._at), self.lost)

    def absent_after_failure(self, name: str, waited_for: int | None) -> Protocol[set[int]]:
        """Wait for the cause of a failure of which this rank has only seen a consequence.

        Args:
            name: of the next barrier; the cause is decided there.
            waited_for: the rank that seems gone; None if that is not known.

        Returns:
            Ranks that have not arrived after a failure; of use if there is no decision.
        """
        self._used.add(name)
        at, key = f"{self._place(name)}/failed", f"{self._place(name)}/decision"
        yield from arrive(at, self._me, self.ranks)
        if (yield WaitKey(key, (yield Now()) + timeouts().leave)) is not None:
            return set(self.ranks) - {self._me}
        missing = {*self.ranks} - {*(yield from arrived(at, self.ranks)), self._me}
        if waited_for is not None and waited_for not in missing:
            # It lives, waits for a third rank, and is about to decide so.
            yield WaitKey(key, (yield Now()) + timeouts().answer)
        return missing

    def close(self, *more: str, before: str = "", why: str = "") -> Protocol[None]:
        """Leave; the last rank to leave deletes all keys.

        Args:
            *more: other keys, which no rank needs after that.
            before: the barrier that this rank would pass next, which does not open any more; "":
                others do not wait for it.
            why: told to a rank that waits there.
        """
        if before:
            self._used.add(before)  # where another rank may have said the same
        if before and self.lost is None:
            yield from conclude(self._place(before), {"kind": "gone", "message": why, "lost": True})
        at = f"{self._key}/left"
        if (yield from arrive(at, self._me, self.ranks)) is Arrival.LAST:
            yield from self._forget()
            yield Drop((*counters(at, self.ranks), *more))

    def _forget(self, but: str = "") -> Protocol[None]:
        """Delete the keys of the barriers that this rank has used."""
        for name in sorted(self._used - {but}):
            yield from drop(self._place(name), self.ranks)
            yield Drop(tuple(counters(f"{self._place(name)}/failed", self.ranks)))
        self._used &= {but}

    def _heed(self, decision: Decision) -> None:
        if decision.get("lost"):
            self.lost = decision

    def _place(self, name: str) -> str:
        return f"{self._key}/{name}"
