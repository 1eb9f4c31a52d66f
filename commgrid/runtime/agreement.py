"""Every rank holds the same description, or every rank says who differs or is missing.

Ranks that want to make one thing together meet at the store. The lowest of them opens the meeting
under a number that the store hands out, with its document; the others compare theirs with it and
mark themselves on a roll; the last one to come tells the first, which writes the verdict that all
of them read. Later phases need no first one: the last to come concludes. In the good case a rank
makes a fixed number of store calls however many ranks there are. When something is wrong one rank
reads the rolls, one call for 30 ranks, and the others read what it found. At the deadline a few
ranks ask to be that one, and the rest only where none of these is left: a store that all of them
ask at once would hold up the one that finds out.

A store may outlive the processes that met at it, as a launcher's does across restarts, and nothing
that the launcher counts tells these apart. Here only a meeting that its opener concludes is good,
and an opener always opens a new one: who came to the meeting of an opener that is gone is told to
move on when the next one opens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

import torch

from commgrid.errors import CommGridError, PeerTimeoutError
from commgrid.runtime import torch_world
from commgrid.runtime.diagnosis import (
    CALL,
    LIMIT,
    MOST_DOCUMENTS,
    Examiner,
    latest,
    ranks_entry,
    ranks_of,
)
from commgrid.runtime.patient import PatientStore
from commgrid.runtime.roll import Coming, Line, Roll, Store, seconds_until

_MOVED = json.dumps({"kind": "moved"})
_LINGER_SECONDS = 2.0
_LOBBY_SECONDS = 1.0
_LEASE_SECONDS = 10.0
_ANSWER_SECONDS = 5.0  # that the store gets to answer in, however little time is left
AGAIN_SECONDS = 10.0
"""In which all come to a second try; where less than twice that is left, there is none."""
PHASES = ("created", "ready")
"""What a grid meets for after comparing, at most."""
HOSTS = "hosts"
"""What a grid whose ranks must know where they run meets for before these."""
_EXAMINERS = 16  # about so many ranks look at once who is missing, the others if these do not


class Meeting:
    """The ranks of one grid at the store, from comparing documents to being ready.

    Made on every rank at once. Used with `with`: what is raised within it is told to the ranks that
    wait, and becomes the error that says best what happened.

    Args:
        store: shared by all ranks of the world.
        name: what they meet for, the grid's name.
        rank: this process's global rank.
        ranks: the ranks that should come.
        document: plain values, equal on all of them.
        deadline: `time.monotonic()` until which to wait.
        phases: what it meets for after comparing; the last one ends it.
        line: over the same store, to wait on; None: one of its own.
        call: what ranks do to come here, for messages.
        limit: what the user sets the deadline with, for messages.
        again: whether it is a second try, to which all come within AGAIN_SECONDS.
        about: what messages speak of; None: the grid of this name.
        beforehand: leaves something of this rank's at the store before it comes.

    Raises:
        GridMismatchError: ranks hold other documents.
        PeerTimeoutError: a rank did not come; it is named.
        PeerFailedError: a rank said so by `give_up`.
    """

    def __init__(
        self,
        store: Store,
        *,
        name: str,
        rank: int,
        ranks: Sequence[int],
        document: Mapping[str, Any],
        deadline: float,
        phases: Sequence[str] = PHASES,
        line: Line | None = None,
        call: str = CALL,
        limit: str = LIMIT,
        again: bool = False,
        about: str | None = None,
        beforehand: Callable[[], None] | None = None,
    ) -> None:
        self._about = about or f"grid {name!r}"
        self._rank, self._ranks = rank, ranks
        # Read late: it is set below, and a stopped server must not hold anybody for longer.
        asked = PatientStore(store, lambda: max(seconds_until(self._deadline), _ANSWER_SECONDS))
        self._store, self._line = asked, line or Line(store, len(ranks))
        self._phases, self._phase = ("compare", *phases), 0
        self._deadline = min(deadline, time.monotonic() + AGAIN_SECONDS) if again else deadline
        if seconds_until(deadline) == 0:
            raise PeerTimeoutError(
                f"{self._about}: {limit} was over before rank {rank} came to meet the "
                "others: its own start took the time (importing modules, starting CUDA, a stopped "
                f"process), no peer did; find out what did on this rank, or raise {limit}"
            )
        # What is kept back from waiting on a peer, to find out afterwards whom it was about.
        self._margin = min(1.0, seconds_until(self._deadline) / 4)
        every = max(len(ranks) // _EXAMINERS, 1)
        place = ranks.index(rank) if rank in ranks else 0
        self._grace = 0.0 if place % every == 0 else self._margin
        self._document = json.dumps({**document, "ranks": ranks_entry(ranks)})
        within = f"{seconds_until(self._deadline):.3g} s" if again else limit
        self._examiner = Examiner(asked, name, rank, self._document, self._about, call, within)
        # Grids on separate ranks may share a name: they have different lowest ranks.
        self._first = ranks[0] if isinstance(ranks, range) else min(ranks)
        self._room, self._number, self._base, self._left = f"{name}@{self._first}", 0, "", False
        self._came = self._doubled = False
        self._told: Mapping[str, Any] = {}
        self.may_try_again = False
        """Whether a connection was lost, for which no rank need have ended, and there is time for a
        second try; known at the end, and the same on all ranks."""
        try:
            if beforehand is not None:
                self._guarded(beforehand)
            self._guarded(self._lead if rank == self._first else self._follow)
        except BaseException as error:
            if not isinstance(error, CommGridError):
                self.give_up(error)  # Ctrl-C: counted as present, this rank must say it is not
            self._line.close()
            raise
        self._phase, self._deadline, self._examiner.limit = 1, deadline, limit

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            cause = error and self.give_up(error)
        finally:
            self._line.close()
        if cause is not error:
            assert cause is not None
            raise cause from error

    @property
    def _before(self) -> str:
        """Where the meeting before this one was."""
        return f"{self._room}/{self._number - 1}"

    @property
    def incarnation(self) -> str:
        """What no other meeting at this store is called."""
        return f"{self._first}.{self._number}"

    # -- comparing ----------------------------------------------------------------------

    def _lead(self) -> None:
        """The lowest rank: opens a meeting and concludes it when all have come."""
        first, taken = latest(self._store, self._room)
        self._number = first
        mine = json.dumps({"document": self._document, "by": uuid4().hex})
        while True:
            self._number += taken
            self._base = f"{self._room}/{self._number}"
            opening = self._store.compare_set(f"{self._base}/opening", "", mine)
            if opening.decode() == mine:
                break
            taken = True  # by a process that is gone, or by others who have given up on it
        if self._number == 1:
            self._examiner.open_room(self._room)
        for number in range(first, self._number):  # whoever came to one of these comes here
            self._store.compare_set(f"{self._room}/{number}/compare/verdict", "", _MOVED)
        self._store.set(f"{self._room}/latest", str(self._number))
        coming = Roll(self._store, f"{self._base}/compare", self._ranks).come(self._rank)
        self._came = True
        complete = f"{self._base}/complete"
        if coming is Coming.LAST or self._line.within(complete, self._left_to_wait()):
            if not self._store.check([f"{self._base}/differing"]):
                found: Mapping[str, Any] = {"kind": "agreed"}
            else:
                self._await_stragglers()
                found = self._examiner.mismatch(self._room, self._number, self._document)
            self._obey(self._conclude("compare", found))
        else:
            self._await_verdict("compare", self._document)

    def _await_stragglers(self) -> None:
        """Documents differ, and some may speak of further ranks: a moment for these to come."""
        until = min(time.monotonic() + self._margin, self._deadline)
        while time.monotonic() < until:
            if self._examiner.everyone_is_here(self._base, self._document):
                return
            time.sleep(0.02)

    def _follow(self) -> None:
        """The others: find the meeting that is open, and take part."""
        self._number, may_be_over = latest(self._store, self._room)
        while True:
            self._base = f"{self._room}/{self._number}"
            opening = self._await_opening()
            if opening and self._take_part(opening, may_be_over):
                return
            self._number, may_be_over = self._number + 1, True

    def _await_opening(self) -> str:
        """The document that the meeting was opened with; empty if others gave up on it long ago."""
        key, waited = f"{self._base}/opening", False
        if not self._line.within(key, min(_LOBBY_SECONDS, self._left_to_wait())):
            waited = True
            self._examiner.enter_lobby(self._room, self._number)
            if not self._line.within(key, self._left_to_wait() + self._grace):
                self._examine(f"{self._base}/lobby", key, self._give_up_the_lobby)
        opening = json.loads(self._store.get(key))
        if waited and "verdict" in opening:
            self._leave(opening["verdict"])
            error = self._examiner.error(opening["verdict"])
            raise type(error)(f"{error}{self._twin()}")
        return str(opening.get("document", ""))

    def _take_part(self, opening: str, may_be_over: bool) -> bool:
        """Whether this meeting was for us; it is not if it was of processes that are gone."""
        if may_be_over and self._store.check([f"{self._base}/compare/verdict"]):
            return False
        differs = opening != self._document
        if differs:
            self._examiner.differs(self._base)
        coming = Roll(self._store, f"{self._base}/compare", ranks_of(opening)).come(self._rank)
        if coming is Coming.AGAIN:
            self._doubled = True
            return False
        if differs and not self._store.check([f"{self._base}/opening"]):
            raise self._examiner.error(self._examiner.disagreement(opening))  # it is over meanwhile
        self._came = True
        if coming is Coming.LAST:
            self._store.set(f"{self._base}/complete", "")
        if self._await_verdict("compare", opening)["kind"] == "moved":
            self._came = False
            return False
        if differs:  # ranks of a smaller grid agreed before this one was counted
            raise self._examiner.error(self._examiner.disagreement(opening))
        return True

    # -- the phases after it ------------------------------------------------------------

    def meet(self, tell: Callable[[], Mapping[str, Any]] | None = None) -> Mapping[str, Any]:
        """Returns when every rank has come to the next phase; three store calls.

        Args:
            tell: what the last rank to come adds to what all of them read.

        Returns:
            What that rank has added.

        Raises:
            PeerTimeoutError: a rank did not; it is named.
            PeerFailedError: a rank failed before it.
        """
        self._guarded(lambda: self._meet(tell))
        self._phase += 1
        return self._told

    def gather(
        self, said: str, tell: Callable[[dict[int, str]], Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        """Meets for the next phase, of which one rank tells all what it makes of what each has
        said; five store calls, and for the one that does, one more.

        Args:
            said: a short text, of this rank.
            tell: makes of every rank's text what all of them get.

        Raises:
            PeerTimeoutError, PeerFailedError: as `meet`.
        """
        key = f"{self._base}/said"

        def tell_of_all() -> Mapping[str, Any]:
            texts = self._store.multi_get([f"{key}/{rank}" for rank in self._ranks])
            return tell({r: t.decode() for r, t in zip(self._ranks, texts, strict=True)})

        self._guarded(lambda: self._store.set(f"{key}/{self._rank}", said))
        told = self.meet(tell_of_all)
        self._guarded(lambda: self._delete(f"{key}/{self._rank}"))
        return told

    def _delete(self, key: str) -> None:
        self._store.delete_key(key)

    def _meet(self, tell: Callable[[], Mapping[str, Any]] | None) -> None:
        phase = self._phases[self._phase]
        last = phase == self._phases[-1]
        roll = Roll(self._store, f"{self._base}/{phase}", self._ranks)
        if roll.come(self._rank, self._rolls_over() if last else ()) is not Coming.LAST:
            self._told = self._await_verdict(phase, self._document)
            return
        if last:
            # Who meets again must find this one over before anyone learns that it is.
            self._store.set(f"{self._room}/latest", f"{self._number} over")
        found = {} if tell is None else tell()
        self._told = self._conclude(phase, {**found, "kind": "agreed"})
        self._obey(self._told)
        if last:
            self._clean_up()

    def _rolls_over(self) -> list[str]:
        """Rolls that nobody reads any more once ranks come to the last phase."""
        mine = [f"{self._base}/{roll}" for roll in ("lobby", *self._phases[:-1])]
        return [*mine, f"{self._before}/{self._phases[-1]}"]

    def _clean_up(self) -> None:
        """Takes from the store what this meeting has left, but for the verdict and the roll of its
        last phase, which others still read; these go with the next meeting."""
        keys = ["opening", "complete", "lobby/document", "lobby/blocks"]
        keys += [f"{each}/{what}" for each in self._phases[:-1] for what in ("verdict", "blocks")]
        for key in keys:
            self._store.delete_key(f"{self._base}/{key}")
        self._store.delete_key(f"{self._before}/{self._phases[-1]}/verdict")
        self._store.delete_key(f"{self._before}/{self._phases[-1]}/blocks")
        number = self._number - 1
        while self._store.check([f"{self._room}/{number}/opening"]):  # failed or abandoned
            self._clean_up_failed(f"{self._room}/{number}", keys)
            number -= 1
        if number < self._number - 1:  # the last good one, whose last verdict has stayed
            last = f"{self._room}/{number}/{self._phases[-1]}"
            self._store.delete_key(f"{last}/verdict")
            Roll(self._store, last, self._ranks).delete()

    def _clean_up_failed(self, base: str, keys: Sequence[str]) -> None:
        if self._store.check([f"{base}/{HOSTS}/verdict"]):
            for rank in self._ranks:
                self._store.delete_key(f"{base}/said/{rank}")
        phases = dict.fromkeys((*self._phases, HOSTS, *PHASES, "lobby"))  # it may have had others
        kinds = range(1, MOST_DOCUMENTS + 2)
        for roll in (*phases, *(f"holders/{kind}" for kind in kinds)):
            Roll(self._store, f"{base}/{roll}", self._ranks).delete()
        more = ["differing", "left", f"{self._phases[-1]}/verdict"]
        more += [f"{phase}/{what}" for phase in phases for what in ("examiner/1", "verdict")]
        for key in (*keys, *more, *(f"document/{kind}" for kind in kinds)):
            self._store.delete_key(f"{base}/{key}")

    # -- when something is wrong --------------------------------------------------------

    def tell(self, error: BaseException) -> None:
        """Tells the ranks that wait in the next phase why this one will not come, before it leaves.

        What it closes then makes others fail, who would be taken for the cause. Not where time is
        up: they mark themselves once they fail.
        """
        if self._came and self._phase < len(self._phases) and not self._is_late():
            with suppress(RuntimeError):  # the store is gone
                self._verdict_on(error)

    def give_up(self, error: BaseException) -> BaseException:
        """Tells the ranks that wait in the next phase why this one will not come.

        Returns:
            The error that says best what happened: another rank's failure or absence
            where this rank's own timeout is a consequence of it, else `error` itself.
        """
        if self._left or not self._came or self._phase == len(self._phases):
            return error
        try:
            verdict = self._verdict_on(error)
            if verdict["kind"] in ("agreed", "moved"):
                return error
            self._leave(verdict)
        except RuntimeError:
            return error  # the store is gone, and with it everybody who could be told
        consequence = isinstance(error, PeerTimeoutError) and verdict.get("rank") != self._rank
        return self._examiner.error(verdict) if consequence else error

    def _verdict_on(self, error: BaseException) -> dict[str, Any]:
        """What is said of this phase, or a later one: why this rank failed, or what stood there."""
        verdict: dict[str, Any] = {}
        for phase in self._phases[self._phase :]:
            key = f"{self._base}/{phase}/verdict"
            if not self._store.check([key]):
                self._conclude(phase, self._blame(phase, error))
            verdict = json.loads(self._store.get(key))
            if verdict["kind"] != "agreed":  # else the others have gone on to the next
                break
        return verdict

    def interrupt(self, why: str, late: bool) -> None:
        """Tells who waits in this phase, or comes to it, that a rank will not; by another thread.

        Args:
            why: who, and what is known of it.
            late: whether it may be alive and does not answer.
        """
        kind = {"kind": "absent", "missing": "", "late": why} if late else {"kind": "failed"}
        verdict = {**kind, "message": why, "present": len(self._ranks) - 1}
        with suppress(RuntimeError):  # the store is gone
            for phase in self._phases[self._phase :]:
                if self._conclude(phase, verdict)["kind"] != "agreed":
                    break

    def _blame(self, phase: str, error: BaseException) -> dict[str, Any]:
        """A verdict about this rank; where it was kept waiting, about those who kept it."""
        # Only time that is up says something about who has not come; a connection may break sooner.
        if isinstance(error, PeerTimeoutError) and self._is_late():
            Roll(self._store, f"{self._base}/{phase}", ()).come(self._rank)
            time.sleep(self._margin / 2)  # the others were kept as long, and mark themselves now
            verdict = self._examiner.absence(self._room, self._number, phase, self._document)
            if verdict.get("missing"):
                return verdict
        return {
            "kind": "failed",
            "rank": self._rank,
            "message": f"rank {self._rank} failed: {type(error).__name__}: {error}",
            "present": len(self._ranks),
            "again": torch_world.lost_by_gloo(error) and self._left_to_wait() > 2 * AGAIN_SECONDS,
        }

    def _await_verdict(self, phase: str, opened: str) -> dict[str, Any]:
        key = f"{self._base}/{phase}/verdict"
        if not self._line.within(key, self._left_to_wait() + self._grace):

            def conclude() -> None:
                found = self._examiner.absence(self._room, self._number, phase, opened)
                self._conclude(phase, found)

            self._examine(f"{self._base}/{phase}", key, conclude)
        verdict: dict[str, Any] = json.loads(self._store.get(key))
        self._obey(verdict)
        return verdict

    def _obey(self, verdict: Mapping[str, Any]) -> None:
        """Raises what a bad verdict is on this rank."""
        if verdict["kind"] == "moved" and self._rank == self._first:
            raise PeerTimeoutError(
                f"{self._about}: another process has come as rank {self._rank} after this "
                "one; is it running twice?"
            )
        if verdict["kind"] not in ("agreed", "moved"):
            self._leave(verdict)
            raise self._examiner.error(verdict)

    def _examine(self, base: str, awaited: str, conclude: Callable[[], None]) -> None:
        """One rank finds out who is missing; if it does not get done, another one after a while."""
        turn = 0
        while not self._store.check([awaited]):
            turn += 1
            if self._store.add(f"{base}/examiner/{turn}", 1) == 1:
                conclude()
            elif self._line.within(awaited, _LEASE_SECONDS):
                return

    def _give_up_the_lobby(self) -> None:
        found = self._examiner.absence(self._room, self._number, "lobby", self._document)
        opening = json.dumps({"verdict": found})
        if self._store.compare_set(f"{self._base}/opening", "", opening).decode() == opening:
            self._tell_elsewhere(found)

    def _conclude(self, phase: str, verdict: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the verdict of a phase, unless another rank has; returns the one that stands."""
        key = f"{self._base}/{phase}/verdict"
        mine = json.dumps(verdict)
        stands = self._store.compare_set(key, "", mine).decode()
        if stands == mine:
            self._tell_elsewhere(verdict)
        return dict(json.loads(stands))

    def _tell_elsewhere(self, verdict: Mapping[str, Any]) -> None:
        """Those who wait in other meetings by mistake learn it too."""
        for base in verdict.get("meetings", ()):
            if base != self._base:
                opening = json.dumps({"verdict": verdict})
                self._store.compare_set(f"{base}/opening", "", opening)
                self._store.compare_set(f"{base}/compare/verdict", "", json.dumps(verdict))

    def _leave(self, verdict: Mapping[str, Any]) -> None:
        """Lets everyone read a bad verdict before rank 0, whose process often serves the store,
        raises and takes the store away."""
        if self._left:
            return
        self._left, self.may_try_again = True, verdict.get("again") is True
        with suppress(RuntimeError):  # the store is gone; the verdict stands
            self._linger(verdict)

    def _linger(self, verdict: Mapping[str, Any]) -> None:
        if self._rank == self._first:
            self._store.set(f"{self._base}/complete", "")  # ends its own wait for it
        left = self._store.add(f"{self._base}/left", 1)  # the last call that most ranks make
        until = time.monotonic() + _LINGER_SECONDS
        while self._rank == 0 and left < verdict["present"] and time.monotonic() < until:
            time.sleep(0.02)
            left = self._store.add(f"{self._base}/left", 0)

    # -- time and the store -------------------------------------------------------------

    def patience(self) -> float:
        """Seconds to wait for peers outside a meeting; leaves time to name who did not come."""
        return max(seconds_until(self._deadline) - self._margin, 0.01)

    def _is_late(self) -> bool:
        return seconds_until(self._deadline) <= self._margin + 0.5

    def _left_to_wait(self) -> float:
        return max(seconds_until(self._deadline), 0.01)

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except (CommGridError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:  # torch's DistNetworkError and DistStoreError among them
            raise PeerTimeoutError(
                f"{self._about}: the store of torch.distributed stopped answering "
                f"({str(error).splitlines()[0]}); has the process that serves it, usually rank 0 "
                f"or the launcher, ended?{self._twin()}"
            ) from error

    def _twin(self) -> str:
        return f" Another process has come as rank {self._rank} too." if self._doubled else ""
