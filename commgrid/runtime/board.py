"""Two who do not know each other meet at a store: on a board, where the first to come waits.

Who comes and finds one of the other side there takes it off the board and asks it; who is asked
answers, and the two have each other's cards. So the first of one side meets the first of the
other, the second the second, and nobody asks the store again and again.

    first to come     written on the board ──── waits ────► asked ── answers ──►
    second            takes it off the board, asks ─────────►     waits ────────► answered

A store keeps what processes have written that are gone. Who does not answer within a moment is
taken for one of these, and the next is asked; if it was only slow, it finds out when it answers
that this is no longer awaited, and comes anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from uuid import uuid4

from commgrid.runtime.roll import Line, Store, seconds_until

BOARD = "commgrid/board"
_ANSWER_SECONDS = 1.0
_WITHDRAWN = "withdrawn"

Found = TypeVar("Found")
Entry = list[str | None]
"""What `Caller.entry` makes."""


@dataclass(frozen=True)
class Caller:
    """Who looks for somebody.

    Args:
        what: they meet for; who comes for something else is not seen.
        side: this one's.
        other: who is looked for.
        identity: what no other caller is called.
        wants: the other's identity; None: whoever comes.
        card: what the other is told.
    """

    what: str
    side: str
    other: str
    identity: str
    wants: str | None
    card: str

    def entry(self, key: str) -> Entry:
        """What stands on the board; who takes it off asks at the key."""
        return [key, self.what, self.side, self.identity, self.wants]

    def fits(self, entry: Entry) -> bool:
        """Whether that is one of those it looks for, and one that looks for it."""
        _, what, side, identity, wants = entry
        return (
            (what, side) == (self.what, self.other)
            and self.wants in (None, identity)
            and wants in (None, self.identity)
        )


def find(store: Store, line: Line, caller: Caller, deadline: float) -> str | None:
    """The other's card, once it has this one's.

    Args:
        store: shared by all.
        line: over the same store.
        caller: who looks, and for whom.
        deadline: `time.monotonic()` until which to wait.

    Returns:
        None where nobody has come until then.
    """
    while True:
        key = f"{BOARD}/{uuid4().hex}"
        asked = _change(store, partial(_take, caller, key))
        found = (
            _ask(store, line, caller, asked, key, deadline)
            if asked is not None
            else _wait(store, line, caller, key, deadline)
        )
        if found is not None or seconds_until(deadline) == 0:
            return found


def _take(caller: Caller, key: str, waiting: list[Entry]) -> str | None:
    """Takes the first that fits off the board, or writes the caller on it."""
    for entry in waiting:
        if caller.fits(entry):
            waiting.remove(entry)
            return entry[0]
    waiting.append(caller.entry(key))
    return None


def _ask(
    store: Store, line: Line, caller: Caller, asked: str, key: str, deadline: float
) -> str | None:
    """What who was on the board answers; None: it is gone, or slow."""
    store.set(asked, json.dumps({"card": caller.card, "answer": key}))
    if not line.within(key, min(_ANSWER_SECONDS, seconds_until(deadline))):
        stands = store.compare_set(key, "", _WITHDRAWN).decode()
        if stands == _WITHDRAWN:
            return None
    answer = store.get(key).decode()
    store.delete_key(key)
    return str(json.loads(answer)["card"])


def _wait(store: Store, line: Line, caller: Caller, key: str, deadline: float) -> str | None:
    """The card of who asks; None: nobody did, or did not wait for the answer."""

    def leave(waiting: list[Entry]) -> bool:
        mine = [entry for entry in waiting if entry[0] == key]
        for entry in mine:
            waiting.remove(entry)
        return bool(mine)

    try:
        # One that has been taken off the board just now is asked at once.
        if not line.within(key, seconds_until(deadline)) and (
            _change(store, leave) or not line.within(key, _ANSWER_SECONDS)
        ):
            return None
    except BaseException:
        _change(store, leave)
        raise
    question = json.loads(store.get(key))
    store.delete_key(key)
    answer = json.dumps({"card": caller.card})
    if store.compare_set(question["answer"], "", answer).decode() == answer:
        return str(question["card"])
    store.delete_key(question["answer"])
    return None


def _change(store: Store, action: Callable[[list[Entry]], Found]) -> Found:
    """Does something to the board that nobody else changes meanwhile."""
    while True:
        before = store.get(BOARD).decode() if store.check([BOARD]) else ""
        waiting = json.loads(before)["waiting"] if before else []
        found = action(waiting)
        # No two changes are written alike, so that who has written one knows it was that one.
        after = json.dumps({"waiting": waiting, "by": uuid4().hex})
        if store.compare_set(BOARD, before, after).decode() == after:
            return found
