"""Who has come, and waiting for what others write: the two things ranks do at a store.

A roll keeps a bit for every rank in counters of 60. To come is one call, and to see who has not is
one call for each 60 ranks. A line waits for a key without holding up anything else that this
process asks the store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from enum import Enum
from typing import Any, Protocol
from weakref import WeakKeyDictionary

_BLOCK = 60  # a store's counters are signed and have 64 bits
_LONGEST_SECONDS = 24 * 3600.0


class Store(Protocol):
    """What is used of a `torch.distributed.Store`."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, value: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...
    def delete_key(self, key: str, /) -> bool: ...


class Asking:
    """A store that is asked over whichever connection of a line no wait holds.

    Args:
        line: see `Line.asking`.
    """

    def __init__(self, line: Line) -> None:
        self._line = line

    def __getattr__(self, name: str) -> Any:
        return getattr(self._line.asking, name)


class Coming(Enum):
    """What a rank finds when it marks itself on a roll."""

    EARLY = "others are still to come"
    LAST = "with it all have come"
    AGAIN = "somebody has come as this rank before"


class Roll:
    """Which ranks have come to one place.

    Args:
        store: shared by all ranks of the world.
        key: what its counters are called.
        ranks: those that should come; who else comes is kept too, and completes nothing.
    """

    def __init__(self, store: Store, key: str, ranks: Sequence[int]) -> None:
        self._store, self._key = store, key
        self._ranks = ranks if isinstance(ranks, range) else frozenset(ranks)

    def come(self, rank: int, sweeping: Iterable[str] = ()) -> Coming:
        """Marks a rank as here; one call, and some more for the last of every 60.

        Args:
            rank: the one that comes.
            sweeping: keys of rolls of the same ranks that nobody reads any more. The last of every
                60 takes their counter from the store.
        """
        block, bit = rank // _BLOCK, 1 << rank % _BLOCK
        marked = self._store.add(f"{self._key}/{block}", bit)
        if (marked - bit) & bit:
            self._store.add(f"{self._key}/{block}", -bit)
            return Coming.AGAIN
        whole = sum(
            1 << each % _BLOCK
            for each in range(block * _BLOCK, (block + 1) * _BLOCK)
            if each in self._ranks
        )
        if not bit & whole or marked & whole != whole:
            return Coming.EARLY
        for other in sweeping:
            self._store.delete_key(f"{other}/{block}")
        count = self._store.add(f"{self._key}/blocks", 1)
        return Coming.LAST if count == len(_blocks(self._ranks)) else Coming.EARLY

    def here(self, among: Iterable[int]) -> list[int]:
        """Those of some ranks that have come."""
        wanted = sorted(set(among))
        marks = {b: self._store.add(f"{self._key}/{b}", 0) for b in _blocks(wanted)}
        return [rank for rank in wanted if marks[rank // _BLOCK] >> rank % _BLOCK & 1]

    def delete(self) -> None:
        """Takes its counters from the store."""
        for block in (*_blocks(self._ranks), "blocks"):
            self._store.delete_key(f"{self._key}/{block}")


def _blocks(ranks: Iterable[int]) -> list[int]:
    return sorted({rank // _BLOCK for rank in ranks})


_FREE: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
"""Of each store, further connections that no line waits on."""


class Line:
    """Waiting for a key of the store without holding up what else this process asks it.

    A wait holds its connection, so it takes one that no other thread uses. And nothing interrupts
    torch's wait, not even Ctrl-C, and torch logs each that ends without its key: so it runs on a
    thread of its own, and who gives up leaves it waiting. Connections are few: a store's server
    looks up the name of whoever connects before it serves anybody else.

    Args:
        store: where to ask.
        alone: whether nobody else asks this store while the line is in use: then it waits on the
            store's own connection, and takes another one only to ask beside an abandoned wait.
    """

    def __init__(self, store: Any, alone: bool = False) -> None:
        self._store, self._alone = store, alone
        self._mine: list[Any] = [store] if alone else []
        self._waiting: _Wait | None = None
        self._abandoned: list[_Wait] = []

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *error: object) -> None:
        """Leaves its connections to others, but for those that an abandoned wait holds."""
        free = [each for each in self._mine if each is not self._store and not self._holds(each)]
        _FREE.setdefault(self._store, []).extend(free)
        self._mine = [self._store] if self._alone else []

    @property
    def asking(self) -> Store:
        """The store for what does not wait."""
        return self._connection() if self._alone else self._store  # type: ignore[no-any-return]

    def within(self, key: str, seconds: float) -> bool:
        """Whether the key is there within so many seconds.

        Raises:
            RuntimeError: the store is gone.
        """
        waiting = self._waiting
        if waiting is None or waiting.key != key:
            if waiting is not None:
                self._abandoned.append(waiting)
            waiting = self._waiting = _Wait(self._connection(), key)
        return waiting.within(seconds)

    def _holds(self, connection: Any) -> bool:
        waits = [*self._abandoned, *filter(None, [self._waiting])]
        return any(wait.store is connection and not wait.over.is_set() for wait in waits)

    def _connection(self) -> Any:
        """One that no wait holds."""
        for each in self._mine:
            if not self._holds(each):
                return each
        made = None
        with suppress(IndexError):
            made = _FREE.get(self._store, []).pop()
        if made is None:
            try:
                made = self._store.clone()
                made.set_timeout(self._store.timeout)
            except RuntimeError:  # a kind of store that has no second connection
                made = self._store
        self._mine.append(made)
        return made


class _Wait:
    """One wait on a thread."""

    def __init__(self, store: Any, key: str) -> None:
        self.key = key
        self.over = threading.Event()
        self._error: BaseException | None = None
        self.store = store
        threading.Thread(target=self._run, name=f"commgrid waits for {key}", daemon=True).start()

    def _run(self) -> None:
        try:
            self.store.wait([self.key], timedelta(seconds=_LONGEST_SECONDS))
        except BaseException as error:
            self._error = error
        self.over.set()

    def within(self, seconds: float) -> bool:
        if not self.over.wait(max(seconds, 0.0)):
            return False
        if self._error is not None:
            raise self._error
        return True


def seconds_until(deadline: float) -> float:
    """Seconds until a `time.monotonic()`, 0 where it has passed."""
    return max(deadline - time.monotonic(), 0.0)
