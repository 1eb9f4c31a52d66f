"""Membership after a failure: the remaining ranks agree on the ranks that go on.

Calls have numbers, one after the other for all grids of a world. A rank that needs one opens it;
ranks without a part in a grid wait for the next call and come too. When the time for others to come
is over, an elected rank looks which have, and decides for all.

    rank 0   opens call 1 ─ arrives ─ 3 s later: 0 1 2 4 are here ──► decides: the grid over 0 1 2 4
    rank 4   arrives ──────────────────────── waits ────────────────► reads it
    rank 5   (spare) waits for call 1 ─ arrives ─ waits ────────────► reads it: has no part

A rank that has seen another process end marks that one as ended. So the ranks that are here decide
at once if no other can come.

The keys of call n lie at `commgrid/rebuild/<n>`. Each rank makes a fixed number of operations, and
one for each rank that it has seen end. The deciding rank makes one more for 30 ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from commgrid.errors import (
    CommGridError,
    GridMismatchError,
    PeerFailedError,
    PeerTimeoutError,
    SpecError,
)
from commgrid.layout.rank_text import describe_ranks, pack, unpack
from commgrid.rendezvous.arrival_bitmap import Arrival, arrive, arrived, counters
from commgrid.rendezvous.op import Add, Cas, Drop, Get, Now, Protocol, Put, WaitKey
from commgrid.rendezvous.round import forget, said, tidy
from commgrid.rendezvous.timeouts import timeouts

_BASE = "commgrid/rebuild"
_MOST_PAST = 64
OVER = b'{"over": true}'
"""Written instead of a call when the job ends."""
_LOOK_SECONDS = 60.0  # that a spare rank waits before it looks whether calls have passed it by
_KINDS: dict[str, type[CommGridError]] = {
    "absent": PeerTimeoutError, "mismatch": GridMismatchError, "few": PeerFailedError,
    "unfit": SpecError,
}  # fmt: skip
"""Error classes of refusals, by the name that `conclude` gives."""


class LateError(PeerTimeoutError):
    """Others have gone on without this rank."""


@dataclass(frozen=True)
class Subject:
    """The subject of a call.

    Args:
        name: of the grid.
        after: the identity of the grid that failed.
        ranks: exactly these come; None: any rank may.
        seconds: until its caller decides, at most; ranks of other grids wait that long for it.
    """

    name: str
    after: str
    ranks: tuple[int, ...] | None = None
    seconds: float = 0.0

    def to_bytes(self) -> bytes:
        ranks = None if self.ranks is None else pack(self.ranks)
        return json.dumps({**vars(self), "ranks": ranks}).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> Subject:
        given = json.loads(text)
        ranks = None if given["ranks"] is None else tuple(unpack(given["ranks"]))
        return cls(**{**given, "ranks": ranks})


Conclude = Callable[[list[int], list[str]], dict[str, Any]]
"""Makes the decision from the ranks that are here and the words of each."""


class Membership:
    """One rank's part in calls at one store. Its methods are protocols.

    Args:
        me: this process's rank.
        world: ranks that may come.
        ended: ranks whose processes this one has seen end, or was told so.
    """

    def __init__(self, me: int, world: Sequence[int], ended: Collection[int] = ()) -> None:
        self._me, self._world, self._ended = me, world, ended

    def answer(
        self, call: Subject, words: str, conclude: Conclude, grace: float, until: float
    ) -> Protocol[Mapping[str, Any]]:
        """Open a call, or join the open one; on a rank that was in the grid.

        Args:
            call: what it is about.
            words: of this rank, for the deciding rank.
            conclude: makes the decision.
            grace: seconds for others to come after this rank.
            until: time at which to give up.

        Raises:
            PeerTimeoutError: others have gone on without this rank; or not all of `call.ranks`
                have come, and which.
            PeerFailedError: `conclude` has refused.
            GridMismatchError: ranks call for different things.
        """
        past = yield from self._past((yield from self._next()))
        if call.after in past and self._me not in unpack(past[call.after]):
            raise _late(call, self._me)
        while True:
            left = until - (yield Now())
            call = replace(call, seconds=max(left if call.ranks is not None else grace, 0.0))
            number, open_call = yield from self._open(call)
            past = yield from self._past(number)
            if call.after in past and self._me not in unpack(past[call.after]):
                # They have gone on since this rank looked: it was held up meanwhile.
                nobody = json.dumps({"here": "", "past": past}).encode()
                yield Cas(f"{_BASE}/{number}/verdict", b"", nobody)
                raise _late(call, self._me)
            if (open_call.name, open_call.after) != (call.name, call.after):
                yield from self._wait_for_other(number, open_call, until)
                continue
            yield from self._check_same(number, call, open_call)
            decision = yield from self._take_part(number, call, words, conclude, grace, until)
            if self._me in unpack(decision["here"]):
                return decision
            if decision["here"] or (yield Now()) >= until:
                raise _late(call, self._me)
            # Ranks of another grid have closed this call, whose caller they took for ended.

    def wait(self, name: str, words: str) -> Protocol[Mapping[str, Any] | None]:
        """Wait for a call for a grid of this name; on a rank that has no part in one.

        Returns:
            The decision; None: the job is over. With `aside` other ranks have decided it, and have
            moved to another store: go there and wait again.
        """
        if move := (yield from self.last_move()):
            return {**move, "aside": True}
        number = yield from self._next()
        while True:
            base = f"{_BASE}/{number}"
            text: bytes | None = yield WaitKey(f"{base}/call", (yield Now()) + _LOOK_SECONDS)
            if text is None:  # it may have been held up, and the call be over and deleted
                number = yield from self._next()
                continue
            if text == OVER:
                return None
            call = Subject.from_bytes(text)
            mine = call.name == name and (call.ranks is None or self._me in call.ranks)
            if mine:
                yield Put(f"{base}/said/{self._me}", words.encode())
                expected = call.ranks or self._world
                if (yield from arrive(f"{base}/here", self._me, expected)) is Arrival.LAST:
                    yield Put(f"{base}/complete", b"")
            decision = yield from self._decided(number)
            if mine and "refused" not in decision and self._me in unpack(decision["here"]):
                return decision
            if decision.get("store") is not None:
                return {**decision, "aside": True}
            number = max(number + 1, (yield from self._next()))

    def _decided(self, number: int) -> Protocol[dict[str, Any]]:
        """Wait for a call's decision. A deleted one counts as a decision without this rank."""
        key = f"{_BASE}/{number}/verdict"
        while (yield WaitKey(key, (yield Now()) + _LOOK_SECONDS)) is None:
            if (yield from self._next()) > number:
                break
        return (yield from self._decision(number)) or {"here": ""}

    def last_move(self) -> Protocol[Mapping[str, Any]]:
        """Return the decision by which ranks have gone to another store, of the last two, or {}."""
        last = (yield from self._next()) - 1
        for number in (last, last - 1):
            decision = yield from self._decision(number)
            if decision.get("store") is not None:
                return decision
        return {}

    def tell_over(self) -> Protocol[None]:
        """Tell ranks that wait for a call that there will be none."""
        yield Cas(f"{_BASE}/{(yield from self._next())}/call", b"", OVER)

    # -- one call -----------------------------------------------------------------------

    def _decision(self, number: int) -> Protocol[dict[str, Any]]:
        found = None if number < 1 else (yield Get((f"{_BASE}/{number}/verdict",)))[0]
        return {} if found is None else dict(json.loads(found))

    def _next(self) -> Protocol[int]:
        """Return the number of the first call without a decision."""
        number = (yield from self._count()) + 1
        while (yield Get((f"{_BASE}/{number}/verdict",)))[0] is not None:
            number += 1
        return number

    def _count(self) -> Protocol[int]:
        """Return the number of the last call that was counted as decided."""
        return int((yield Get((f"{_BASE}/count",)))[0] or 0)

    def _open(self, call: Subject) -> Protocol[tuple[int, Subject]]:
        """Open the next call unless another rank has; return its number and what it is about."""
        number, mine = (yield from self._next()), call.to_bytes()
        found = yield Cas(f"{_BASE}/{number}/call", b"", mine)
        if found == OVER:  # by ranks that did not know yet
            found = yield Cas(f"{_BASE}/{number}/call", found, mine)
        return number, Subject.from_bytes(found)

    def _wait_for_other(self, number: int, call: Subject, until: float) -> Protocol[None]:
        """Wait for the decision of another grid's call; close it if its caller must have ended."""
        key, now = f"{_BASE}/{number}/verdict", (yield Now())
        limit = now + call.seconds + 2 * timeouts().lease
        if (yield WaitKey(key, min(until, limit))) is None and limit <= until:
            nobody = {"here": "", "past": (yield from self._past(number))}
            yield Cas(key, b"", json.dumps(nobody).encode())

    def _check_same(self, number: int, call: Subject, open_call: Subject) -> Protocol[None]:
        if open_call.ranks != call.ranks:
            one, other = (
                "none" if each.ranks is None else describe_ranks(each.ranks)
                for each in (call, open_call)
            )
            told = (
                f"rebuild of grid {call.name!r}: rank {self._me} gave ranks={one}, and who came "
                f"first ranks={other}; give the same on all"
            )
            yield from self._conclude(
                number, {"refused": told, "error": "mismatch", "here": ""}, call
            )
            raise _KINDS["mismatch"](told)

    def _take_part(
        self, number: int, call: Subject, words: str, conclude: Conclude, grace: float, until: float
    ) -> Protocol[dict[str, Any]]:
        base = f"{_BASE}/{number}"
        expected = call.ranks or self._world
        if self._me in expected:
            yield Put(f"{base}/said/{self._me}", words.encode())
        complete = (yield from arrive(f"{base}/here", self._me, expected)) is Arrival.LAST
        for rank in self._ended:  # the first rank that has seen it marks it
            if rank in expected and (yield Add(f"{base}/ended/{rank}", 1)) == 1:
                last = (yield from arrive(f"{base}/here", rank, expected)) is Arrival.LAST
                complete = complete or last
        if complete:
            yield Put(f"{base}/complete", b"")
        else:
            patience = until if call.ranks is not None else (yield Now()) + grace
            yield WaitKey(f"{base}/complete", min(patience, until))
        turn = 0
        while True:
            count = yield from self._count()
            if decision := (yield from self._decision(number)):
                break
            if count >= number:  # it is over, and its keys are deleted
                raise _late(call, self._me)
            turn += 1
            if (yield Add(f"{base}/examiner/{turn}", 1)) == 1:
                yield from self._examine(number, call, conclude)
            else:
                yield WaitKey(f"{base}/verdict", (yield Now()) + timeouts().lease / 2)
        if "refused" in decision:
            raise _KINDS[decision["error"]](decision["refused"])
        return decision

    def _examine(self, number: int, call: Subject, conclude: Conclude) -> Protocol[None]:
        """Look which ranks are here, and decide for all of them."""
        base = f"{_BASE}/{number}"
        came = yield from arrived(f"{base}/here", call.ranks or self._world)
        words = yield from said(base, came)
        here = [rank for rank in came if rank in words]
        ended = set(came) - set(here)  # others have marked them
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
            found = conclude(here, [words[rank].decode() for rank in here])
        yield from self._conclude(number, {**found, "here": pack(here), "ended": pack(ended)}, call)
        yield from forget(*(f"{base}/said/{rank}" for rank in here))

    def _conclude(self, number: int, found: Mapping[str, Any], call: Subject) -> Protocol[None]:
        past = yield from self._past(number)
        if "refused" not in found:
            past = {**past, call.after: found["here"]}
        recent = dict(list(past.items())[-_MOST_PAST:])
        mine = json.dumps({**found, "past": recent}).encode()
        if (yield Cas(f"{_BASE}/{number}/verdict", b"", mine)) == mine:
            count = yield from self._count()
            if (
                count >= number
            ):  # others have decided it, and later ones, while this rank stood still
                yield Drop((f"{_BASE}/{number}/verdict",))
                raise _late(call, self._me)
            yield Cas(f"{_BASE}/count", str(count or "").encode(), str(number).encode())
            yield from tidy(self._clean_up(number))

    def _past(self, number: int) -> Protocol[dict[str, str]]:
        """Return which ranks have gone on from which grids so far, by the grids' identities."""
        return dict((yield from self._decision(number - 1)).get("past", {}))

    def _clean_up(self, number: int) -> Protocol[None]:
        """Delete the keys of earlier calls that are over."""
        base = f"{_BASE}/{number - 1}"
        ended = unpack((yield from self._decision(number - 1)).get("ended", ""))
        yield Drop((
            *(f"{base}/{key}" for key in ("call", "complete", "examiner/1", "examiner/2")),
            *(f"{base}/ended/{rank}" for rank in ended),
            *counters(f"{base}/here", self._world),
            f"{_BASE}/{number - 2}/verdict",
        ))  # fmt: skip


def _late(call: Subject, rank: int) -> LateError:
    return LateError(
        f"rebuild of grid {call.name!r}: rank {rank} came too late, others have gone on without "
        "it; give a longer grace=, or call rebuild again, in which it now waits for a place"
    )
