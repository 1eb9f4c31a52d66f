"""Who is left: ranks that have lost others call each other at the store, and agree on one answer.

Calls have numbers, one after the other for all grids of a world. Who needs one opens it; ranks
without a part in a grid wait for the next one and come too. Whoever has waited long enough looks
who is here and concludes, for all of them: what the others find written is so.

    rank 0   opens call 1 ─ comes ─ 3 s later: 0 1 2 4 are here ──► verdict: the grid over 0 1 2 4
    rank 4   comes ──────────────────────────── waits ────────────► reads it
    rank 5   (spare) waits for call 1 ─ comes ─ waits ────────────► reads it: has no part

For a rank whose process has ended, another one comes that has seen it. So who is here concludes at
once when nobody else can come.

Each rank makes a fixed number of store calls, and one for each rank that it has seen end; the one
that concludes one more for 30 ranks, and one that reads what the ranks have said.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

from commgrid.errors import (
    CommGridError,
    GridMismatchError,
    PeerFailedError,
    PeerTimeoutError,
    SpecError,
)
from commgrid.planning.rank_lists import describe_ranks, pack, unpack
from commgrid.runtime.patient import PatientStore
from commgrid.runtime.roll import Coming, Line, Roll, Store, seconds_until

_BASE = "commgrid/rebuild"
_LEASE_SECONDS = 5.0
_PATIENCE_SECONDS = 5.0
_MOST_PAST = 64
OVER = {"over": True}
_KINDS: dict[str, type[CommGridError]] = {
    "absent": PeerTimeoutError, "mismatch": GridMismatchError, "few": PeerFailedError,
    "unfit": SpecError,
}  # fmt: skip
"""Error classes of refusals, by the name that `conclude` gives."""


class LateError(PeerTimeoutError):
    """Others have gone on without this rank."""


@dataclass(frozen=True)
class Call:
    """The subject of a call.

    Args:
        name: of the grid.
        after: the identity of the one that failed.
        ranks: exactly these come; None: any rank may.
    """

    name: str
    after: str
    ranks: tuple[int, ...] | None = None

    def to_text(self) -> str:
        ranks = None if self.ranks is None else pack(self.ranks)
        return json.dumps({"name": self.name, "after": self.after, "ranks": ranks})

    @classmethod
    def from_text(cls, text: str) -> Call:
        said = json.loads(text)
        ranks = None if said["ranks"] is None else tuple(unpack(said["ranks"]))
        return cls(said["name"], said["after"], ranks)


Conclude = Callable[[list[int], list[str]], dict[str, Any]]
"""Of the ranks that are here, and what each has said, what all of them are told."""


class RollCall:
    """This rank's part in calls at one store.

    Args:
        store: shared by all ranks of the world.
        rank: this process's.
        world: which ranks may come.
        ended: those whose processes this one has seen end, or was told so.
    """

    def __init__(
        self, store: Store, rank: int, world: Sequence[int], ended: Collection[int] = ()
    ) -> None:
        # A server that is stopped must not hold whoever looks for another one.
        self._store: Store = PatientStore(store, lambda: _PATIENCE_SECONDS)
        self._rank, self._world, self._ended = rank, world, ended

    def answer(
        self, call: Call, said: str, conclude: Conclude, grace: float, deadline: float
    ) -> Mapping[str, Any]:
        """Calls the others, or comes where they have called; on a rank that was in the grid.

        Args:
            call: what it is about.
            said: by this rank, to whoever concludes.
            conclude: what that one does.
            grace: seconds for others to come after this rank.
            deadline: `time.monotonic()`.

        Raises:
            PeerTimeoutError: others have gone on without this rank; or not all of `call.ranks`
                have come, and which.
            PeerFailedError: what `conclude` has refused.
            GridMismatchError: ranks call for different things.
        """
        past = self._last().get("past", {})
        if call.after in past and self._rank not in unpack(past[call.after]):
            raise _late(call, self._rank)
        with closing(Line(self._store, len(self._world))) as line:
            while True:
                number, open_call = self._open(call.to_text())
                if open_call is not None and (open_call.name, open_call.after) == (
                    call.name, call.after
                ):  # fmt: skip
                    break
                self._see_out(line, number, deadline)
            self._check_same(number, call, open_call)
            verdict = self._take_part(line, number, call, said, conclude, grace, deadline)
        if self._rank not in unpack(verdict["here"]):
            raise _late(call, self._rank)
        return verdict

    def wait(self, name: str, said: str) -> Mapping[str, Any] | None:
        """Waits until a call for a grid of this name comes; on a rank that has no part in one.

        Returns:
            The verdict; None: the job is over. With `aside` it is of others, who meet at another
            store from now on, where this rank waits further.

        Raises:
            RuntimeError: the store is gone.
        """
        if move := self.last_move():
            return {**move, "aside": True}
        with closing(Line(self._store, len(self._world))) as line:
            number = self._next()
            while True:
                key = f"{_BASE}/{number}/call"
                while not line.within(key, 3600.0):
                    pass
                text = self._store.get(key).decode()
                if json.loads(text) == OVER:
                    return None
                call = Call.from_text(text)
                mine = call.name == name and (call.ranks is None or self._rank in call.ranks)
                if mine:
                    base = f"{_BASE}/{number}"
                    self._store.set(f"{base}/said/{self._rank}", said)
                    roll = Roll(self._store, f"{base}/here", call.ranks or self._world)
                    if roll.come(self._rank) is Coming.LAST:
                        self._store.set(f"{base}/complete", "")
                while not line.within(f"{_BASE}/{number}/verdict", 3600.0):
                    pass
                verdict = self._verdict(number)
                if mine and "refused" not in verdict and self._rank in unpack(verdict["here"]):
                    return verdict
                if verdict.get("store") is not None:
                    return {**verdict, "aside": True}
                number += 1

    def last_move(self) -> Mapping[str, Any]:
        """The verdict by which ranks have gone to another store, of the last two; {}: they have
        not."""
        last = self._next() - 1
        verdicts = (self._verdict(number) for number in (last, last - 1))
        return next((each for each in verdicts if each.get("store") is not None), {})

    def tell_over(self) -> None:
        """Lets ranks that wait for a call know that there will be none."""
        self._store.compare_set(f"{_BASE}/{self._next()}/call", "", json.dumps(OVER))

    # -- one call -----------------------------------------------------------------------

    def _last(self) -> dict[str, Any]:
        """The verdict of the last call that was concluded."""
        return self._verdict(self._next() - 1)

    def _verdict(self, number: int) -> dict[str, Any]:
        key = f"{_BASE}/{number}/verdict"
        if number < 1 or not self._store.check([key]):
            return {}
        return dict(json.loads(self._store.get(key)))

    def _next(self) -> int:
        """The number of the first call that is not concluded."""
        key = f"{_BASE}/count"
        number = int(self._store.get(key)) + 1 if self._store.check([key]) else 1
        while self._store.check([f"{_BASE}/{number}/verdict"]):
            number += 1
        return number

    def _open(self, text: str) -> tuple[int, Call | None]:
        """Opens the next call unless somebody has; its number and what it is about."""
        number = self._next()
        found = self._store.compare_set(f"{_BASE}/{number}/call", "", text).decode()
        if json.loads(found) == OVER:  # by ranks that did not know yet
            self._store.compare_set(f"{_BASE}/{number}/call", found, text)
            return number, Call.from_text(text)
        return number, Call.from_text(found)

    def _see_out(self, line: Line, number: int, deadline: float) -> None:
        """Waits for the end of another grid's call."""
        key = f"{_BASE}/{number}/verdict"
        if not line.within(key, min(seconds_until(deadline), 4 * _LEASE_SECONDS)):
            nobody = json.dumps({"here": "", "past": self._past(number)})
            self._store.compare_set(key, "", nobody)

    def _check_same(self, number: int, call: Call, open_call: Call | None) -> None:
        if open_call is not None and open_call.ranks != call.ranks:
            one, other = (
                "none" if each.ranks is None else describe_ranks(each.ranks)
                for each in (call, open_call)
            )
            told = (
                f"rebuild of grid {call.name!r}: rank {self._rank} gave ranks={one}, and who came "
                f"first ranks={other}; give the same on all"
            )
            self._conclude(number, {"refused": told, "error": "mismatch", "here": ""}, call)
            raise _KINDS["mismatch"](told)

    def _take_part(
        self,
        line: Line,
        number: int,
        call: Call,
        said: str,
        conclude: Conclude,
        grace: float,
        deadline: float,
    ) -> dict[str, Any]:
        base = f"{_BASE}/{number}"
        expected = call.ranks or self._world
        roll = Roll(self._store, f"{base}/here", expected)
        if self._rank in expected:
            self._store.set(f"{base}/said/{self._rank}", said)
        complete = roll.come(self._rank) is Coming.LAST
        for rank in self._ended:  # one of those who have seen it comes for it
            if rank in expected and self._store.add(f"{base}/ended/{rank}", 1) == 1:
                complete = roll.come(rank) is Coming.LAST or complete
        if complete:
            self._store.set(f"{base}/complete", "")
        patience = seconds_until(deadline) if call.ranks is not None else grace
        if not complete:
            complete = line.within(f"{base}/complete", min(patience, seconds_until(deadline)))
        turn = 0
        while not self._store.check([f"{base}/verdict"]):
            turn += 1
            if self._store.add(f"{base}/examiner/{turn}", 1) == 1:
                self._examine(number, call, roll, conclude)
            elif line.within(f"{base}/verdict", _LEASE_SECONDS):
                break
        verdict = self._verdict(number)
        if "refused" in verdict:
            raise _KINDS[verdict["error"]](verdict["refused"])
        return verdict

    def _examine(self, number: int, call: Call, roll: Roll, conclude: Conclude) -> None:
        """Looks who is here, and concludes for all of them."""
        came = roll.here(call.ranks or self._world)
        keys = {rank: f"{_BASE}/{number}/said/{rank}" for rank in came}
        all_said = self._store.check(list(keys.values()))
        here = came if all_said else [each for each in came if self._store.check([keys[each]])]
        ended = set(came) - set(here)  # others came for them
        missing = set(call.ranks or ()) - set(here)
        if missing:
            late = missing - ended
            why = [f"the process of {describe_ranks(missing & ended)} has ended"] * (late < missing)
            why += [f"{describe_ranks(late)} did not come within timeout"] * bool(late)
            told = (
                f"rebuild of grid {call.name!r}: {', '.join(why)} ({describe_ranks(here)} came); "
                "leave ranks= out to go on with whoever does"
            )
            found: Mapping[str, Any] = {"refused": told, "error": "absent"}
        else:
            said = self._store.multi_get([keys[rank] for rank in here])
            found = conclude(here, [text.decode() for text in said])
        self._conclude(number, {**found, "here": pack(here), "ended": pack(ended)}, call)
        for rank in here:
            self._store.delete_key(keys[rank])

    def _conclude(self, number: int, found: Mapping[str, Any], call: Call) -> None:
        past = self._past(number)
        if "refused" not in found:
            past = {**past, call.after: found["here"]}
        verdict = json.dumps({**found, "past": dict(list(past.items())[-_MOST_PAST:])})
        key = f"{_BASE}/{number}/verdict"
        if self._store.compare_set(key, "", verdict).decode() == verdict:
            self._store.set(f"{_BASE}/count", str(number))
            self._clean_up(number)

    def _past(self, number: int) -> dict[str, str]:
        """Who has gone on from which grids so far, by their identity."""
        return dict(self._verdict(number - 1).get("past", {}))

    def _clean_up(self, number: int) -> None:
        """Takes from the store what nobody reads any more: this call, and the one before last."""
        base = f"{_BASE}/{number - 1}"
        ended = (f"ended/{rank}" for rank in unpack(self._verdict(number - 1).get("ended", "")))
        for key in ("call", "complete", "examiner/1", "examiner/2", *ended):
            self._store.delete_key(f"{base}/{key}")
        Roll(self._store, f"{base}/here", self._world).delete()
        self._store.delete_key(f"{_BASE}/{number - 2}/verdict")


def tell_over(store: Store) -> None:
    """Lets ranks that wait for a call know that there will be none."""
    with suppress(RuntimeError):  # the store is gone, and with it who waits there
        RollCall(store, -1, ()).tell_over()


def _late(call: Call, rank: int) -> LateError:
    return LateError(
        f"rebuild of grid {call.name!r}: rank {rank} came too late, others have gone on without "
        "it; give a longer grace=, or call rebuild again, in which it now waits for a place"
    )
