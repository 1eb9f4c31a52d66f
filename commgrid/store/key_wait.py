"""Waiting for a key of the store, while this process asks the store other things.

    line ── thread ──► a further connection ──► the server answers once the key is there
      └── the store's own connection ──► compare-and-set of the key wakes who waits for it

The second way ends a wait that is not needed any more. At the end of the process all waits are
ended: a thread that returns from torch's C++ while Python is being taken down aborts the process.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from commgrid.rendezvous.timeouts import timeouts
from commgrid.store.client import PAUSES_GROW, Asked, NoThreadError, PatientStore, served

_NO_LIMIT = timedelta(days=1000)  # of a wait, which is ended in another way
# So few ranks come soon after each other. They look a few times, with growing pauses, before they
# wait: a connection costs more. More ranks would keep the store's server busy.
_FEW_RANKS = 64
_NOTHING = "\x00nothing"
"""A value that no key ever holds, so that a compare-and-set with it changes nothing."""


_FREE: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
"""Of each store, further connections that no line waits on."""


class Line:
    """Waits for keys of a store, one after the other.

    A wait holds its connection, so each runs on a further one, on a thread, and lasts until its
    line is closed or waits for another key. Connections are kept for later lines, since the server
    may look up the name of a client's host when it connects, and serves no other client meanwhile.
    Of a store whose waits cannot be ended, a file's or that of torch's older server, it looks for
    the key instead, at most once in `Timeouts.beat`.

    Args:
        store: where to ask.
        among: how many ranks wait for each other; few look for a while before they wait.
        reuse: whether its connections stay open for the next line over this store.
    """

    def __init__(self, store: Any, among: int, reuse: bool = True) -> None:
        self._patience, self._reuse = 0.0, reuse
        self._asked = PatientStore(store, lambda: self._patience)
        self._store = self._asked.raw
        self._ends_waits = getattr(served(store), "libuvBackend", False)
        self._look_seconds = timeouts().unseen if among <= _FEW_RANKS else 0.0
        self._waits: list[_Wait] = []

    def close(self) -> None:
        """End what still waits, and let the connections go."""
        for wait in self._waits:
            wait.end()
        if self._reuse:
            _FREE.setdefault(self._store, []).extend(self._free())
        self._waits = []

    def _free(self) -> list[Any]:
        """Its connections that no wait holds, and that were not lost."""
        held = {id(w.store) for w in self._waits if not w.is_over() or w.has_failed}
        return list({id(w.store): w.store for w in self._waits if id(w.store) not in held}.values())

    def within(self, key: str, seconds: float) -> bytes | None:
        """Wait for a key.

        Returns:
            Its value, once for each time that it came; empty if the caller must read it, since
            the wait was ended elsewhere; None if the key has not come within so many seconds.

        Raises:
            RuntimeError: the store is gone.
        """
        self._patience = max(seconds, timeouts().answer)
        until = time.monotonic() + seconds
        if _process_ends and threading.current_thread() is not threading.main_thread():
            raise dist.DistNetworkError("this process is ending")
        if _process_ends or not self._ends_waits:
            return self._asked.look(key, seconds)
        last = self._waits[-1] if self._waits else None
        if last is None or last.key != key or last.is_read:
            for wait in self._waits:
                wait.end()
            # At least once: a server that has ended is an error at once on this connection.
            found = self._asked.look(key, min(self._look_seconds, seconds))
            if found is not None:
                return found
            store = self._connection()
            self._waits = [wait for wait in self._waits if wait.store is not store]
            try:
                last = _Wait(store, key, self._store)
            except NoThreadError:
                return self._asked.look(key, seconds_until(until))
            self._waits.append(last)
        return last.within(seconds_until(until))

    def _connection(self) -> Any:
        """One that no wait holds."""
        for free in (self._free(), _FREE.get(self._store, [])):
            with suppress(IndexError):
                return free.pop()
        return connection_of(self._asked)


def connection_of(store: Any) -> Any:
    """A connection of one's own to a store, since another's wait holds the one it waits on.

    Returns:
        The store itself, where it is of a kind without connections.
    """
    with _connecting:
        limit = store.timeout  # of calls: to connect may take longer, where names are looked up
        try:
            store.set_timeout(max(limit, timedelta(seconds=timeouts().connect)))
            made = store.clone()
        except RuntimeError as error:
            if type(error) is not RuntimeError:  # the network's, not that there is no such thing
                raise
            return store
        finally:
            store.set_timeout(limit)
    made.set_timeout(limit)
    return made


_connecting = threading.Lock()
"""Held while a store has another timeout: a clone copies the store's timeout."""


class _Wait(Asked):
    """A wait under way on a thread.

    Args:
        store: a connection that nothing else uses meanwhile.
        key: to wait for.
        asked: another connection, which ends it.
    """

    def __init__(self, store: Any, key: str, asked: Any) -> None:
        self.key, self.store, self._asked = key, store, asked
        self.is_read = False
        """Whether its value or error was taken by `within`."""
        store.set_timeout(_NO_LIMIT)
        with _beginning:
            if _process_ends:
                raise dist.DistNetworkError("this process is ending")
            _UNDER_WAY.add(self)
            try:
                super().__init__(self._wait, lasts=True)
            except BaseException:
                _UNDER_WAY.discard(self)
                raise

    def _wait(self) -> bytes:
        try:
            return bytes(self.store.get(self.key))  # empty, if a compare-and-set has ended it
        finally:
            _UNDER_WAY.discard(self)

    def within(self, seconds: float) -> bytes | None:
        """As `Line.within`."""
        if not self.is_over(seconds):
            return None
        self.is_read = True
        return bytes(self.answer())

    def end(self) -> None:
        """End it: a compare-and-set wakes all waits for its key, even if it sets nothing."""
        if self not in _UNDER_WAY:
            self.is_over(timeouts().moment)  # at once, or it is a parent's
            return
        until, pause = time.monotonic() + timeouts().margin, timeouts().poll
        with suppress(RuntimeError):  # of a store that has ended, as the wait then has
            asking = PatientStore(self._asked, lambda: timeouts().margin)
            while not self.is_over() and time.monotonic() < until:
                asking.compare_set(self.key, _NOTHING, _NOTHING)
                self.is_over(pause)  # the wait, just begun, may come to the server after this
                pause *= PAUSES_GROW
        self.is_over(seconds_until(until))


_UNDER_WAY: set[_Wait] = set()
_process_ends = False
_beginning = threading.Lock()
"""Held while a wait begins, and while the process begins to end."""


def _is_forked() -> None:
    """In a forked process no wait is under way, and the connections are its parent's."""
    global _connecting, _process_ends, _beginning
    _connecting, _beginning = threading.Lock(), threading.Lock()
    _process_ends = False
    _UNDER_WAY.clear()
    _FREE.clear()


os.register_at_fork(after_in_child=_is_forked)


def end_all() -> None:
    """End all waits, at the end of the process; from now on lines look for their keys."""
    global _process_ends
    with _beginning:
        _process_ends = True
    for wait in list(_UNDER_WAY):
        wait.end()


atexit.register(end_all)


def seconds_until(deadline: float) -> float:
    """Seconds until a `time.monotonic()`, 0 where it has passed."""
    return max(deadline - time.monotonic(), 0.0)
