"""Ranks that make one thing together: they compare documents, then pass the same barriers.

    compare    every rank shows its document, the first one is the reference
    created    a barrier, as many as the caller has phases
    ready      the last barrier; after it every rank leaves, and the last to leave deletes all keys

Each phase is a round (`commgrid.rendezvous.round`), so that ranks that differ, fail or never come
are the same error on every other rank, by the deadline at the latest.

The n-th agreement in a room has the keys `ROOM/<n>/…`, and `ROOM/over` is the last n that is over.
Ranks that call for the first time and ranks that try again after a failure meet at the next n.

A rank that has waited for a second publishes at `waits/<rank>` where it waits. So the others can
say where an absent rank is instead, and compare its document if it waits for the same thing there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from commgrid.errors import CommGridError, PeerTimeoutError
from commgrid.layout.rank_text import describe_ranks, unpack
from commgrid.rendezvous.arrival_bitmap import Arrival, arrive, arrived
from commgrid.rendezvous.documents import (
    MOST_PHASES,
    drop_agreement,
    holders_of,
    merged,
    show,
    shown,
)
from commgrid.rendezvous.op import Add, Cas, Drop, Get, Now, Protocol, Put, WaitKey
from commgrid.rendezvous.round import (
    Decision,
    conclude,
    decision_of,
    decoded,
    forget,
    is_good,
    round_,
    said,
    tidy,
)
from commgrid.rendezvous.start_decision import (
    absent,
    error_of,
    failed,
    held_up,
    mismatch,
    no_decision,
    ranks_entry,
    ranks_of,
)
from commgrid.rendezvous.timeouts import timeouts
from commgrid.rendezvous.wait_notes import elsewhere, hosts_of, publish, withdraw

CALL, LIMIT = "initialize with this name and these ranks", "startup_timeout"
"""The call that starts a grid, and its time limit's argument, for messages."""
PHASES = ("created", "ready")
"""Phases of a grid's start after comparing, at most."""

Tell = Callable[[dict[int, bytes]], Mapping[str, Any]]
"""Turns the words of the speakers into entries of the decision."""


class Agreement:
    """One rank's part in an agreement. Its methods are protocols.

    Args:
        name: what the ranks agree on; part of the keys.
        me: this process's rank.
        members: ranks that are expected, the same on all of them.
        document: plain values, the same on all of them.
        began, until: the time now, and the deadline.
        phases: names of the phases after comparing.
        about: subject of messages; None: `grid 'NAME'`.
        call, limit: what every rank calls, and the argument that limits it, for messages.
        server: rank that serves the store, whose process may not end before others have read why
            a start failed.
        where: returns this process's host and the ranks that the launcher has started there.
    """

    def __init__(
        self,
        *,
        name: str,
        me: int,
        members: Sequence[int],
        document: Mapping[str, Any],
        began: float,
        until: float,
        phases: Sequence[str] = PHASES,
        about: str | None = None,
        call: str = CALL,
        limit: str = LIMIT,
        server: int | None = None,
        where: Callable[[], tuple[str, Sequence[int]]] = lambda: ("", ()),
    ) -> None:
        self.about = about or f"grid {name!r}"
        self._name, self._me, self._members, self._until = name, me, members, until
        self._call, self._limit, self._server = call, limit, server
        self._where = where
        self._text = json.dumps({**document, "ranks": ranks_entry(members)})
        self.margin = timeouts().margin_of(until - began)
        # Grids of disjoint ranks may share a name: their lowest ranks differ.
        self._first = members[0] if isinstance(members, range) else min(members)
        # 0: of a world, whose epoch is never joined again, and whose ranks wait nowhere else.
        self._room, self._number, self._over = f"{name}@{self._first}", 0, b""
        self.counter = f"{self._room}/over"
        """Key that stays at the store for the next agreement in this room."""
        self._base = ""
        assert len(phases) < MOST_PHASES
        self._phases, self._phase = ("compare", *phases), 0
        self._came = self._left = self._published = self.doubled = False
        self.loss: Decision | None = None
        """The decision that a connection was lost, if it is to be followed by `report`."""

    @property
    def incarnation(self) -> str:
        """Name of this agreement, which no other at the store has."""
        return f"{self._first}.{self._number}"

    # -- comparing ----------------------------------------------------------------------

    def compare(self) -> Protocol[None]:
        """Arrive with the document, and go on if all members have the same.

        Raises:
            GridMismatchError: ranks have other documents.
            PeerTimeoutError: a rank did not arrive; it is named.
            PeerFailedError: a rank has failed meanwhile.
        """
        over = (yield Get((self.counter,)))[0]
        self._over = over or b""
        self._number = int(over or 0) + 1
        while not (yield from self._compare_at(f"{self._room}/{self._number}")):
            self._number += 1
        self._phase = 1

    def _compare_at(self, base: str) -> Protocol[bool]:
        """Compare in one place; False if the keys there are of an attempt that is over."""
        self._base = base
        if (yield Now()) >= self._until:  # the others may have given up and left
            raise held_up(self.about, self._me, self._limit)
        reference, kind = yield from show(base, self._me, self._text)
        members = ranks_of(reference) if kind else self._members
        arrival = yield from arrive(f"{base}/phase 0", self._me, members)
        if arrival is Arrival.TWICE:  # this rank was here in an attempt that it has given up
            self.doubled = True
            return False
        self._came = True
        decision = yield from self._decision(arrival is Arrival.LAST, members)
        if decision["kind"] == "moved":
            self._came = False
            return False
        if is_good(decision) and kind:  # the members of a smaller grid agreed without this rank
            held = [(reference, list(members)), (self._text, [self._me])]
            decision = mismatch(held)
            raise error_of(decision, self.about, self._me)
        yield from self._obey(decision)
        return True

    def _decision(self, is_last: bool, members: Sequence[int]) -> Protocol[Decision]:
        """Return the decision about documents; the last rank to arrive makes it."""
        at = f"{self._base}/phase 0"
        if is_last:
            return (yield from conclude(at, (yield from self._judge((), False))))
        return (yield from decision_of(at, self._me, members, self._until, self._judge, self._wait))

    def _judge(self, missing: Sequence[int], time_is_up: bool) -> Protocol[Mapping[str, Any]]:
        """Decide about the documents, when all have arrived or time is up."""
        documents = yield from shown(self._base)
        if not documents:  # the others have gone on, and deleted them
            raise held_up(self.about, self._me, self._limit)
        if not time_is_up and len(documents) == 1:
            return {"kind": "agreed"}
        everyone = sorted({self._me}.union(*(ranks_of(text) for text in documents)))
        at = f"{self._base}/phase 0"
        here = yield from arrived(at, everyone)
        until = (yield Now()) + (0.0 if time_is_up else self.margin)
        while len(here) < len(everyone) and (now := (yield Now())) < min(until, self._until):
            # Documents differ, and one names further ranks: a moment for these to arrive.
            yield WaitKey(f"{at}/decision", now + self.margin / 10)
            here = yield from arrived(at, everyone)
        missing = [rank for rank in everyone if rank not in here]
        holders = yield from holders_of(self._base, documents, here)
        rooms, also = [self._base], ""
        for rank, place in (yield from elsewhere(missing if self._number else (), self._base)):
            if place["name"] == self._name and place["document"]:
                holders.append((place["document"], [rank]))
                rooms.append(place["at"])
            else:
                also += f"rank {rank} waits in {place['about']}; "
        holders = merged(holders)
        if len(holders) > 1:
            found = {**mismatch(holders), "rooms": list(dict.fromkeys(rooms))}
            for other in found["rooms"][1:]:
                yield from conclude(f"{other}/phase 0", found)
        elif missing:
            also += yield from hosts_of(missing, here)
            found = self._absent(missing, here, "arrive", also)
        else:
            who = "the last of them" if self._number else f"rank {self._first}"
            found = no_decision(who, here, self._limit)
        yield from self._end()
        return found

    # -- the phases after it ------------------------------------------------------------

    def meet(
        self,
        tell: Tell | None = None,
        say: bytes | None = None,
        speakers: Sequence[int] = (),
    ) -> Protocol[Decision]:
        """Pass the next barrier: three operations.

        Args:
            tell: makes further entries of the decision from the words of the speakers.
            say: of this rank, if it is one of the speakers.
            speakers: ranks that say something.

        Raises:
            PeerTimeoutError: a rank did not get here; it is named.
            PeerFailedError: a rank has failed before.
        """
        phase, at = self._phases[self._phase], self._place(self._phase)
        last = self._phase == len(self._phases) - 1

        def decide(missing: Sequence[int], time_is_up: bool) -> Protocol[Mapping[str, Any]]:
            if last or time_is_up:  # the next agreement gets the next number
                yield from self._end()
            if time_is_up:
                gave_up = yield from arrived(f"{at}/gave up", missing)
                missing = [rank for rank in missing if rank not in gave_up]
                here = [rank for rank in self._members if rank not in {*missing}]
                if not missing:
                    return no_decision("the last of them", here, self._limit)
                return self._absent(missing, here, f"get as far as {phase!r}")
            if tell is None:
                return {"kind": "agreed"}
            texts = yield from said(at, speakers)
            if len(texts) < len(speakers):  # there is a decision, and they have deleted their words
                return {"kind": "agreed"}
            return {**tell(texts), "kind": "agreed"}

        decision = yield from round_(
            at, self._me, self._members, self._until, decide, say=say,
            sweep=[self._place(self._phase - 1)],
            await_decision=self._wait,
        )  # fmt: skip
        if say is not None:
            yield from forget(f"{at}/said/{self._me}")
        yield from self._obey(decision)
        self._phase += 1
        if last:
            yield from tidy(self._leave_for_good())
        return decision

    def _leave_for_good(self) -> Protocol[None]:
        """Leave when all is well; the last rank to leave deletes what is left at the store."""
        yield from self._unpublish()
        ready = self._place(len(self._phases) - 1)
        left = yield from arrive(f"{self._base}/left", self._me, self._members, [ready])
        if left is Arrival.LAST:
            yield from drop_agreement(self._base, self._members, everything=False)
            yield from self._drop_failed()

    def _drop_failed(self) -> Protocol[None]:
        """Delete what failed agreements before this one have left for late ranks."""
        number = self._number - 1
        while number >= 0 and (yield Get((f"{self._room}/{number}/phase 0/decision",)))[0]:
            yield from drop_agreement(f"{self._room}/{number}", self._members)
            number -= 1

    def _place(self, phase: int) -> str:
        """Key of a phase's round. Phases have numbers there, since other agreements in this room
        may have other phases."""
        return f"{self._base}/phase {phase}"

    # -- failures -----------------------------------------------------------------------

    def give_up(self, error: BaseException, lost: bool = False) -> Protocol[BaseException]:
        """Tell the others why this rank does not come to the next phase, and leave.

        Args:
            error: this rank's.
            lost: whether it is a lost connection, of which another rank's end may be the cause.

        Returns:
            The error that says best what happened: another rank's failure or absence, of which this
            rank's own timeout is a consequence; or `error` itself. If `loss` is set, `report`
            returns it.
        """
        if self._left or not self._came or self._phase == len(self._phases):
            return error
        decision = yield from self._blame(error, lost)
        if is_good(decision) or decision["kind"] == "moved":
            return error
        if decision["kind"] == "lost":
            self.loss = decision
            return error
        decision = yield from self._leave(decision)
        consequence = isinstance(error, PeerTimeoutError) and decision.get("rank") != self._me
        return error_of(decision, self.about, self._me) if consequence else error

    def report(self) -> Protocol[CommGridError]:
        """Report after a lost connection, and return the error that all ranks raise.

        Before it the caller closes its own connections, since others may wait on these.
        """
        assert self.loss is not None
        decision = yield from self._leave(self.loss)
        return error_of(decision, self.about, self._me)

    def tell(self, error: BaseException, lost: bool = False) -> Protocol[None]:
        """Tell the others why this rank does not come, before it closes its connections: others
        fail by these, and would be taken for the cause. Not after the deadline, when all fail."""
        if self._came and self._phase < len(self._phases) and not (yield from self._is_late()):
            yield from self._blame(error, lost)

    def interrupt(self, why: str, late: bool) -> Protocol[None]:
        """End the phase that the members wait in, and the next ones.

        Args:
            why: which rank does not come, and what is known of it.
            late: whether it may be alive.
        """
        kind = {"kind": "absent", "absent": "", "late": why} if late else {"kind": "failed"}
        decision = {**kind, "message": why, "present": len(self._members) - 1}
        yield from self._end()
        for phase in range(self._phase, len(self._phases)):
            if not is_good((yield from conclude(self._place(phase), decision))):
                break

    def _blame(self, error: BaseException, lost: bool) -> Protocol[Decision]:
        """Decide that the next phase fails because of this rank, unless there is a decision."""
        decision: Decision = {"kind": "agreed"}
        for phase in range(self._phase, len(self._phases)):
            at = self._place(phase)
            stands = (yield Get((f"{at}/decision",)))[0]
            if stands is None:
                blame = yield from self._cause(phase, error, lost)
                yield from self._end()
                decision = yield from conclude(at, blame)
            else:
                decision = decoded(stands)
            if not is_good(decision):  # else the others have gone on to the next phase
                break
        return decision

    def _cause(self, phase: int, error: BaseException, lost: bool) -> Protocol[Decision]:
        """Return the decision about this rank; or about absent ranks that kept it waiting."""
        late = yield from self._is_late()
        # Only a deadline says something about absent ranks; a connection may break sooner.
        if isinstance(error, PeerTimeoutError) and late:
            at = self._place(phase)
            # Not in the round itself, which it must not complete.
            yield from arrive(f"{at}/gave up", self._me, ())
            # The others were kept waiting as long, and arrive now.
            yield WaitKey(f"{at}/decision", (yield Now()) + self.margin / 2)
            here = yield from arrived(at, self._members)
            here += yield from arrived(f"{at}/gave up", {*self._members} - {*here})
            missing = [rank for rank in self._members if rank not in here]
            if missing:
                did_not = f"get as far as {self._phases[phase]!r}" if phase else "arrive"
                return self._absent(missing, here, did_not)
        decision = failed(self._me, error, len(self._members))
        if lost and not late:
            decision["kind"] = "lost"
        return decision

    def _absent(
        self, missing: Sequence[int], here: Sequence[int], did_not: str, also: str = ""
    ) -> Decision:
        return absent(missing, here, did_not, self._limit, self._call, also)

    def _obey(self, decision: Decision) -> Protocol[None]:
        """Raise the error that a bad decision is on this rank, after leaving."""
        if not is_good(decision):
            decision = yield from self._leave(decision)
            raise error_of(decision, self.about, self._me)

    def _leave(self, decision: Decision) -> Protocol[Decision]:
        """Leave after a failure, and return the decision about its cause.

        The last present rank deletes the keys but for the decisions. The rank that serves the store
        waits a moment for that, since its process may end next.
        """
        if self._left:
            return decision
        self._left = True
        if decision["kind"] == "lost":
            decision = yield from self._after_a_loss(decision)
        yield from tidy(self._clean_up(decision))
        return decision

    def _clean_up(self, decision: Decision) -> Protocol[None]:
        """Leave, and if all present ranks have, delete the keys."""
        yield from self._unpublish()
        rooms = decision.get("rooms", [self._base])
        released = f"{rooms[0]}/released"
        if (yield Add(f"{rooms[0]}/gone", 1)) >= decision["present"]:
            for base in rooms:
                yield from drop_agreement(base, self._members, decisions=False)
            absentees = unpack(decision.get("absent", ""))
            if self._server in self._members and self._server not in {self._me, *absentees}:
                yield Put(released, b"")
        elif self._server == self._me:
            yield WaitKey(released, (yield Now()) + timeouts().leave)
            yield Drop((released,))

    def _after_a_loss(self, decision: Decision) -> Protocol[Decision]:
        """Find out which ranks do not report after a connection was lost.

        gloo takes any process that connects to a port for the rank that it waits for there, so that
        a connection may be lost though both ranks live.
        """
        why, now = decision["message"], (yield Now())
        within = min(timeouts().arrive, max(self._until - now - self.margin, self.margin))

        def decide(missing: Sequence[int], _: bool) -> Protocol[Mapping[str, Any]]:
            if missing:
                told = (
                    f"{describe_ranks(missing)} did not report within {within:.3g} s after {why}; "
                    "either ended, or still waiting for a rank that has"
                )
            else:
                told = f"{why}; all ranks have reported since, so call it again"
            kept = {"kind": "failed", "present": len(self._members) - len(missing)}
            yield from ()
            return {**kept, "message": told}

        at = f"{self._base}/lost"
        return (yield from round_(at, self._me, self._members, now + within, decide))

    # -- time ---------------------------------------------------------------------------

    def _is_late(self) -> Protocol[bool]:
        now: float = yield Now()
        return self._until - now <= self.margin + 0.5

    def _end(self) -> Protocol[None]:
        """Mark this agreement as over: the next one gets the next number."""
        if self._number:
            yield Cas(self.counter, self._over, str(self._number).encode())

    def _wait(self, key: str, until: float) -> Protocol[bytes | None]:
        """Wait for a key; after a while publish where."""
        soon = min(until, (yield Now()) + timeouts().unseen) if self._number else until
        found: bytes | None = yield WaitKey(key, soon)
        if found is None and soon < until and (yield Now()) < until:
            place = {"name": self._name, "about": self.about, "at": self._base,
                     "document": "" if self._phase else self._text}  # fmt: skip
            self._published = True
            yield from publish(self._me, place, self._where())
            found = yield WaitKey(key, until)
        return found

    def _unpublish(self) -> Protocol[None]:
        if self._published:
            self._published = False
            yield from withdraw(self._me)
