"""Two grids find each other by a name, though most ranks know one of them only.

The first rank of each grid looks at a board. The first one to come leaves its card there and waits;
the second one takes that card, and sends its own. A card is taken by one compare-and-set, so no two
ranks take the same one, and the n-th source of a name meets the n-th target:

    first of source   leaves its card ─ waits ──────────────────────────► reads the target's card
    first of target                     takes the source's card ─ sends its own

A grid whose first rank is stopped is matched as well; that rank reads the result later. If it has
ended, the next round, in which all ranks of both grids meet, names it.

The other ranks of a grid wait for their first one to tell what it has found. It counts the
beginnings and ends of its calls, so that a rank that comes late to a call waits for the next one.

Of two worlds there is one source and one target under a name, at a store that outlives both. The
last card of a side stands, so that a side which was killed and started again replaces its own:

    first of source   writes its card ─ reads the target's ─ agrees ─► reads that the target agrees
    first of target   writes its card ─ reads the source's ─ agrees ─► reads that the source agrees

A card that is left of a killed process agrees with nothing, and what two cards agree on is a name
that no other two have.

Keys: `commgrid/match/board`, and at the counter of a grid's calls `<counter>/<number>`. Between
worlds `<room>/<side>` and `<room>/<token of the source>+<token of the target>/<side>`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TypeVar

from commgrid.rendezvous.op import Add, Cas, Drop, Get, Now, Protocol, Put, WaitKey
from commgrid.rendezvous.round import forget, tidy
from commgrid.rendezvous.timeouts import timeouts

_BOARD = "commgrid/match/board"
_FIRST_LOOK = 1.0  # and each look at a call lasts twice as long as the one before

Found = TypeVar("Found")


@dataclass(frozen=True)
class Candidate:
    """A grid that looks for another one.

    Args:
        about: the name under which both come, and what for.
        side: `source` or `target`.
        identity: of the grid.
        wants: the other grid's identity; None: any.
        at: key at which the other one's words are awaited; no other card has it.
        words: for the other one.
    """

    about: str
    side: str
    identity: str
    wants: str | None
    at: str
    words: str

    def fits(self, other: Candidate) -> bool:
        """Whether two cards are for each other."""
        return (
            self.about == other.about
            and self.side != other.side
            and self.wants in (None, other.identity)
            and other.wants in (None, self.identity)
        )

    def is_for(self, other: Candidate) -> bool:
        """Whether two cards are of one grid and for the same purpose."""
        mine, its = ((each.about, each.side, each.identity) for each in (self, other))
        return mine == its


def match(mine: Candidate, until: float) -> Protocol[str | None]:
    """Exchange words with a grid that fits; return the other grid's, or None if none has come."""

    def take(waiting: list[Candidate]) -> Candidate | None:
        waiting[:] = [card for card in waiting if not card.is_for(mine)]  # of a call that failed
        found = next((card for card in waiting if card.fits(mine)), None)
        if found is None:
            waiting.append(mine)
        else:
            waiting.remove(found)
        return found

    found = yield from _change(mine.at, take)
    if found is not None:
        yield Put(found.at, mine.words.encode())
        return found.words
    words: bytes | None = yield WaitKey(mine.at, until)
    if words is None and not (yield from withdraw(mine, f"{mine.at}/withdrawn")):
        words = yield WaitKey(mine.at, (yield Now()) + timeouts().lease)  # it was taken just now
    if words is None:
        yield Put(mine.at, b"")  # ends the wait at the store, which has no other end
    yield from forget(mine.at)
    return None if words is None else words.decode()


def withdraw(mine: Candidate, by: str) -> Protocol[bool]:
    """Take the cards of a grid off the board, after a failure; return whether there was one.

    Args:
        mine: any card of the grid for the same purpose.
        by: name of this change of the board; no other one has it.
    """

    def leave(waiting: list[Candidate]) -> bool:
        before = len(waiting)
        waiting[:] = [card for card in waiting if not card.is_for(mine)]
        return len(waiting) < before

    if (yield Get((_BOARD,)))[0] is None:
        return False
    return (yield from _change(by, leave))


@dataclass(frozen=True)
class Met:
    """Two worlds that have met.

    Args:
        name: of this meeting, which no other one has.
        words: of the other side.
    """

    name: str
    words: str


@dataclass(frozen=True)
class NotMet:
    """The reason why no other world was met.

    Args:
        replaced: whether another process has come as this side.
        silent: whether there is a card of the other side, with which nothing agrees.
    """

    replaced: bool = False
    silent: bool = False


def meet_world(
    room: str, side: str, other: str, token: str, words: str, until: float
) -> Protocol[Met | NotMet]:
    """Exchange words with the other side, which is in another world.

    Args:
        room: what the keys begin with.
        side, other: their names.
        token: of this call; no other one has it.
        words: for the other side.
        until: time at which to give up.
    """
    mine = json.dumps({"token": token, "words": words}).encode()
    at, theirs, name, seen = f"{room}/{side}", f"{room}/{other}", "", b""
    yield Put(at, mine)
    while (now := (yield Now())) < until:
        look = min(now + timeouts().beat, until)
        card: bytes | None = (yield Get((theirs,)))[0] if name else (yield WaitKey(theirs, look))
        if card is not None and card != seen:
            if name:  # of a card that was replaced
                yield Drop((f"{room}/{name}/{side}",))
            seen, its = card, json.loads(card)["token"]
            name = "+".join((token, its) if side < other else (its, token))
            yield Put(f"{room}/{name}/{side}", b"agreed")
        if name and (yield WaitKey(f"{room}/{name}/{other}", look)) is not None:
            yield from forget(f"{room}/{name}/{other}")
            yield from tidy(_take_back(at, mine))
            return Met(name, json.loads(seen)["words"])
        standing = (yield Get((at,)))[0]
        if standing is None:
            yield Put(at, mine)
        elif standing != mine:
            yield from forget(f"{room}/{name}/{side}")
            return NotMet(replaced=True)
    yield from tidy(_take_back(at, mine))
    yield from forget(f"{room}/{name}/{side}")
    return NotMet(silent=bool(seen))


def _take_back(at: str, card: bytes) -> Protocol[None]:
    """Delete a card, unless another one stands there."""
    if (yield Get((at,)))[0] == card:
        yield Drop((at,))


def _change(by: str, action: Callable[[list[Candidate]], Found]) -> Protocol[Found]:
    """Change the list of cards, as no other rank does meanwhile; return the action's result."""
    attempt = 0
    while True:
        attempt += 1
        before = (yield Get((_BOARD,)))[0] or b""
        waiting = [Candidate(**card) for card in json.loads(before)["waiting"]] if before else []
        result = action(waiting)
        # No two changes are written alike, so that a rank that reads its own has made it.
        after = {"waiting": [asdict(card) for card in waiting], "by": f"{by}/{attempt}"}
        text = json.dumps(after).encode()
        if (yield Cas(_BOARD, before, text)) == text:
            return result


@dataclass(frozen=True)
class Heard:
    """The result of `Calls.hear`.

    Args:
        number: of the call.
        words: None: nothing, and the time is up.
        is_open: whether the call is open.
    """

    number: int
    words: str | None
    is_open: bool = True


class Calls:
    """The calls of one grid, of which its first rank tells the others. Its methods are protocols.

    Args:
        counter: key; odd while a call is open.
    """

    def __init__(self, counter: str) -> None:
        self.counter = counter

    def begin(self) -> Protocol[int]:
        """Open a call, on the first rank; return its number."""
        number: int = yield Add(self.counter, 1)
        if number % 2 == 0:  # a call before it was not ended, as if the store did not answer
            number = yield Add(self.counter, 1)
        yield Drop((f"{self.counter}/{number - 2}",))
        return number

    def tell(self, number: int, words: str) -> Protocol[None]:
        """Tell the other ranks, on the first one."""
        yield Put(f"{self.counter}/{number}", words.encode())

    def hear(self, after: int, until: float) -> Protocol[Heard]:
        """Return what the first rank tells of the call that is open, or of the next one.

        Args:
            after: the last failed call that this rank has heard of, which may still be open.
            until: time at which to give up.
        """
        look = _FIRST_LOOK
        while True:
            number = max((yield Add(self.counter, 0)), after + 1)
            number += 1 - number % 2
            now = yield Now()
            words = yield WaitKey(f"{self.counter}/{number}", min(now + look, until))
            if words is not None:
                return Heard(number, words.decode())
            if now + look >= until:
                return Heard(number, None, (yield Add(self.counter, 0)) % 2 == 1)
            look *= 2  # the call may have ended meanwhile, and another one be open

    def fail(self, number: int, words: str) -> Protocol[None]:
        """End a call with an error, on the first rank.

        Ranks that have the other grid's card fail in the round with it. Ranks that wait get the
        error. Ranks that come later wait for the next call.
        """
        key = f"{self.counter}/{number}"
        if (yield Get((key,)))[0] is not None:
            yield Drop((key,))
        else:
            yield Put(key, words.encode())
        yield Add(self.counter, 1)

    def end(self, number: int) -> Protocol[None]:
        """Delete the keys of a call that all ranks have heard of, on the first rank."""
        yield Drop((f"{self.counter}/{number}", self.counter))
