"""Keys of the order check at the store: the errors that ranks have found, and a search's lease."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from typing import NamedTuple
from uuid import uuid4

from commgrid.rendezvous.timeouts import timeouts
from commgrid.store.client import PatientStore

_KEPT = 64  # errors at the store, the last ones


class FoundError(NamedTuple):
    """An error of several ranks, each of which raises it once.

    Args:
        event: the call that differs, or the deadlock in words; two errors of one event are one.
        ranks: the ranks in a deadlock, and those that wait for them; empty: the members of the
            call.
        finder: the rank that has found it.
        text: the error.
    """

    event: str
    ranks: Collection[int]
    finder: int
    text: str


class OrderStore:
    """The keys of one grid's order check.

    Args:
        store: the store.
        prefix: the beginning of the keys.
        rank: this rank.
    """

    def __init__(self, store: PatientStore, prefix: str, rank: int) -> None:
        self._store, self._rank = store, rank
        self._errors, self._search = f"{prefix}/failed", f"{prefix}/search"
        self._raised: deque[str] = deque(maxlen=2 * _KEPT)  # events
        self._seen, self._since = "", 0.0  # a lease, and when this rank has first seen it
        self._mine = ""

    def post(self, event: str, text: str, ranks: Collection[int] = ()) -> None:
        """Tell the other ranks of an error, unless another rank has."""
        mine, before = FoundError(event, ranks, self._rank, text), ""
        with suppress(RuntimeError):  # the store has gone with the rank that served it
            while True:
                found = [FoundError(*each) for each in json.loads(before or "[]")]
                if any(each.event == event for each in found):
                    return
                after = json.dumps([*found, mine][-_KEPT:])
                said = self._store.compare_set(self._errors, before, after).decode()
                if said == after:
                    return
                before = said

    def error(self, events: Collection[str]) -> FoundError | None:
        """Return an error that this rank has to raise in the call in which it waits.

        Args:
            events: the call's.
        """
        for each in self._found():
            if each.event in events or self._rank in each.ranks:
                return each
        return None

    def note_raised(self, event: str) -> None:
        """Note that this rank has raised an error, which is not returned again."""
        self._raised.append(event)

    def note_ended(self) -> None:
        """Note that a long wait has ended well: no deadlock of before concerns the next one."""
        for each in self._found():
            if self._rank in each.ranks:
                self.note_raised(each.event)

    def _found(self) -> list[FoundError]:
        """The errors at the store that this rank has not raised."""
        with suppress(RuntimeError):  # the store has gone; the wait itself will name another cause
            held = json.loads(self._store.read(self._errors) or "[]")
            found = [FoundError(*each) for each in held]
            return [each for each in found if each.event not in self._raised]
        return []

    def take_lease(self) -> bool:
        """Return whether this rank may search: no other rank does, or one for too long.

        The time is that of this rank's clock, since it has first seen the other's lease.
        """
        before = (self._store.read(self._search) or b"").decode()
        now = time.monotonic()
        if before != self._seen:
            self._seen, self._since = before, now
        if before and now - self._since < timeouts().lease:
            return False
        self._mine = f"{self._rank} {uuid4().hex}"
        return self._store.compare_set(self._search, before, self._mine).decode() == self._mine

    def end_lease(self) -> None:
        """Give the lease back, unless another rank has taken it over."""
        self._store.compare_set(self._search, self._mine, "")

    def close(self) -> None:
        """Delete the lease. Other ranks may still have to read the errors."""
        with suppress(RuntimeError):
            self._store.delete_key(self._search)
