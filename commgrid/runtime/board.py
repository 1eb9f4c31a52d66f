"""Two who do not know each other meet at a store: on a board, where the first to come waits.

Who comes and finds one it looks for takes it off the board and asks it; who is asked answers, and
the two have each other's cards. So the first of one side meets the first of the other, the second
the second, and nobody asks the store again and again.

    first to come     written on the board ──── waits ────► asked ── answers ──►
    second            takes it off the board, asks ─────────►     waits ────────► answered

A store keeps what processes have written that are gone. Who does not answer within a moment is
taken for one of these, and the next is asked; if it was only slow, it finds out when it answers
that this is no longer awaited, and comes anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar
from uuid import uuid4

from commgrid.runtime.roll import Line, Store, seconds_until

BOARD = "commgrid/board"
_ANSWER_SECONDS = 1.0
_WITHDRAWN = "withdrawn"

Found = TypeVar("Found")
Words = Sequence[str | None]
Entry = tuple[str, Words, Words]
"""Where to ask who has written it, what that is, and whom it looks for."""


def find(
    store: Store, line: Line, mine: Words, theirs: Words, card: str, deadline: float
) -> str | None:
    """The other's card, once it has this one's.

    Args:
        store: shared by all.
        line: over the same store.
        mine: what this one is, in words.
        theirs: what the other is, word by word; None: whatever it is there.
        card: what the other is told.
        deadline: `time.monotonic()` until which to wait.

    Returns:
        None where nobody has come until then.
    """
    while True:
        key = f"{BOARD}/{uuid4().hex}"
        asked = _change(store, partial(_take, (key, mine, theirs)))
        if asked is not None:
            found = _ask(store, line, card, asked, key, deadline)
        else:
            found = _wait(store, line, card, key, deadline)
        if found is not None or seconds_until(deadline) == 0:
            return found


def _take(own: Entry, waiting: list[Entry]) -> str | None:
    """Takes the first that fits off the board; or else writes this one's entry on it."""
    _, mine, theirs = own
    for entry in waiting:
        key, words, wanted = entry
        if _fits(words, theirs) and _fits(mine, wanted):
            waiting.remove(entry)
            return key
    waiting.append(own)
    return None


def _fits(words: Words, wanted: Words) -> bool:
    return all(want in (None, word) for word, want in zip(words, wanted, strict=True))


def _leave(key: str, waiting: list[Entry]) -> bool:
    """Takes an own entry off the board, if it still is there."""
    before = len(waiting)
    waiting[:] = [entry for entry in waiting if entry[0] != key]
    return len(waiting) < before


def _ask(store: Store, line: Line, card: str, asked: str, key: str, deadline: float) -> str | None:
    """What who was on the board answers; None: it is gone, or slow."""
    store.set(asked, json.dumps({"card": card, "answer": key}))
    answered = line.within(key, min(_ANSWER_SECONDS, seconds_until(deadline)))
    if not answered and store.compare_set(key, "", _WITHDRAWN).decode() == _WITHDRAWN:
        return None
    answer = store.get(key).decode()
    store.delete_key(key)
    return answer


def _wait(store: Store, line: Line, card: str, key: str, deadline: float) -> str | None:
    """The card of who asks; None: nobody did, or did not wait for the answer."""
    try:
        if not line.within(key, seconds_until(deadline)) and (
            _change(store, partial(_leave, key))
            or not line.within(key, _ANSWER_SECONDS)  # taken off just now, and asked at once
        ):
            return None
    except BaseException:
        _change(store, partial(_leave, key))
        raise
    question = json.loads(store.get(key))
    store.delete_key(key)
    if store.compare_set(question["answer"], "", card).decode() == card:
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
