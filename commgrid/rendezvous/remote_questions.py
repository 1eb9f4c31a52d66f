"""Questions that any rank may ask, and that a thread of every other rank answers.

    rank 1   asks question 3 ─ waits ─────────────────────► reads the answers, and deletes them
    rank 0   waits for question 3 ─ answers ─ arrives
    rank 2   waits for question 3 ─ answers ─ arrives last: rank 1 need not wait any longer

Answering costs a rank five operations; waiting for a question costs none.

The keys of question n at `commgrid/questions/<n>`:

    asked/<block>   the rank that asks, while it is open   said/<rank>   answers
    <block>         arrivals of ranks that have answered   all           set by the last one

A block is 30 ranks that wait for one key. At the end of a job all ranks end their waits, and ending
one wakes all waits for its key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from commgrid.rendezvous.arrival_bitmap import BLOCK, Arrival, arrive, arrived, counters
from commgrid.rendezvous.op import Add, Drop, Get, Now, Protocol, Put, WaitKey
from commgrid.rendezvous.round import forget, said
from commgrid.rendezvous.timeouts import timeouts

_BASE = "commgrid/questions"


class Questions:
    """One rank's part in questions. Its methods are protocols.

    Args:
        me: this process's rank.
        world: all ranks, each of which asks or answers.
    """

    def __init__(self, me: int, world: Sequence[int]) -> None:
        self._me, self._world = me, world
        self._heard = 0
        # Questions that were over when this rank had answered: their keys, and the time.
        self._late: list[tuple[str, float]] = []

    def ask(self, seconds: float) -> Protocol[dict[int, bytes]]:
        """Ask all other ranks; return the answers that come within so many seconds, by rank."""
        at = f"{_BASE}/{(yield Add(f'{_BASE}/count', 1))}"
        asked = tuple(f"{at}/asked/{block}" for block in sorted({r // BLOCK for r in self._world}))
        for key in asked:
            yield Put(key, str(self._me).encode())
        if (yield from arrive(at, self._me, self._world)) is Arrival.LAST:
            yield Put(f"{at}/all", b"")
        yield WaitKey(f"{at}/all", (yield Now()) + seconds)
        yield Drop(asked)  # first: a rank that answers later deletes its own keys
        others = [rank for rank in (yield from arrived(at, self._world)) if rank != self._me]
        answers = yield from said(at, others)
        words = (f"{at}/said/{rank}" for rank in others)
        yield from forget(*words, f"{at}/all", *counters(at, self._world))
        return answers

    def begin(self) -> Protocol[None]:
        """Answer questions that are asked from now on."""
        self._heard = yield Add(f"{_BASE}/count", 0)

    @property
    def next_key(self) -> str:
        """The key of the next question, to be waited for.

        A question may be over before this rank sees it.
        """
        return self._asked(self._heard + 1)

    def answer(self, make: Callable[[], bytes]) -> Protocol[None]:
        """Answer all new questions that are open; to be called every now and then.

        Args:
            make: makes the answer.
        """
        while self._late and self._late[0][1] < (yield Now()) - timeouts().lease:
            at, _ = self._late.pop(0)
            # Not read by then.
            yield from forget(f"{at}/said/{self._me}", f"{at}/all")
        first, self._heard = self._heard + 1, (yield Add(f"{_BASE}/count", 0))
        soon = (yield Now()) + timeouts().unseen
        for number in range(first, self._heard + 1):
            at, asked = f"{_BASE}/{number}", self._asked(number)
            # The count rises just before the key is written. A question that is over has no key.
            if (yield WaitKey(asked, soon)) not in (None, str(self._me).encode()):
                yield Put(f"{at}/said/{self._me}", make())
                if (yield from arrive(at, self._me, self._world)) is Arrival.LAST:
                    yield Put(f"{at}/all", b"")
                if (yield Get((asked,))) == (None,):
                    self._late.append((at, (yield Now())))

    def _asked(self, number: int) -> str:
        """Return the key that tells this rank of a question."""
        return f"{_BASE}/{number}/asked/{self._me // BLOCK}"


def first(at: str) -> Protocol[bool]:
    """Return whether this rank is the first one at a place."""
    return bool((yield Add(f"{at}/first", 1)) == 1)


def tell(at: str, text: str) -> Protocol[None]:
    """Tell what the first rank at a place has found out."""
    yield Put(f"{at}/told", text.encode())


def hear(at: str, soon: float, seconds: float) -> Protocol[str]:
    """Return what the first rank at a place has found out.

    Args:
        soon: seconds to wait for a first rank.
        seconds: within which it tells.

    Returns:
        Empty if none comes, or tells nothing in time.
    """
    if (yield WaitKey(f"{at}/first", (yield Now()) + soon)) is None:
        return ""
    told: bytes | None = yield WaitKey(f"{at}/told", (yield Now()) + seconds)
    return (told or b"").decode()
