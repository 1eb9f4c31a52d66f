"""Calls of the store that end, also if the process that serves it is stopped.

torch's client waits in C++ for each answer, without a limit. If the server has ended, that is an
error at once. A stopped server, or one behind a cut link, never answers, and not even Ctrl-C
reaches the waiting thread. So each call runs on a thread beside, and its caller waits for a limited
time. Threads are kept for later calls, since to start one takes several times the processor time of
a call, and Python 3.12 starts none at the end of a process.

    asked ── thread ──► torch's client ──► server        nothing comes
      └── after so many seconds: DistNetworkError; the next call waits for this one's answer first
"""

from __future__ import annotations

import _thread
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist

from commgrid.rendezvous.timeouts import timeouts

Answer = TypeVar("Answer")

_OWED: WeakKeyDictionary[Any, Asked] = WeakKeyDictionary()
"""The unanswered call of each store. Until it returns, no other call can use that client."""

_LOST: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""Of a store whose server has closed the connection, torch's error. torch's client does not connect
again, and logs some twenty lines of C++ for each further call."""

PAUSES_GROW = 1.2
"""Pauses between two looks at a key, each beside the one before: a key is seen a sixth of its wait
late at most, and 1,000 times the first pause take 30 looks."""

_MISSING = b"\x00missing"
"""No key holds this value: compare and set with it reads a key, and does not wait as torch's `get`
does, if the key was deleted meanwhile."""


class NoThreadError(RuntimeError):
    """Python starts no thread: the process ends, or has as many as it may have."""


class SilentStoreError(dist.DistNetworkError):
    """The store's server has neither answered nor ended: it is stopped, or cannot be reached."""


def served(store: Any) -> Any:
    """Return the store beneath torch's prefixes, which has the `host` and `port` if it is served.

    Args:
        store: torch's, or a `PatientStore`.
    """
    found = store.raw if isinstance(store, PatientStore) else store
    while hasattr(found, "underlying_store"):
        found = found.underlying_store
    return found


class PatientStore:
    """A store whose calls end.

    Args:
        store: torch's.
        patience: returns the seconds that a call may take; None: `Timeouts.answer`.
    """

    def __init__(self, store: Any, patience: Callable[[], float] | None = None) -> None:
        self.raw: Any = store.raw if isinstance(store, PatientStore) else store
        self._client = served(store)  # shared by all prefixes, with its connection and its lock
        self._patience = patience or (lambda: timeouts().answer)

    @property
    def timeout(self) -> Any:
        """Limit of torch's own waits."""
        return self.raw.timeout

    def set_timeout(self, timeout: Any) -> None:
        """Set the limit of torch's own waits, and of making a connection."""
        self.raw.set_timeout(timeout)

    def set(self, key: str, value: str) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._ask("get", key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return list(self._ask("multi_get", keys))

    def add(self, key: str, value: int) -> int:
        return int(self._ask("add", key, value))

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return bytes(self._ask("compare_set", key, expected, desired))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete_key", key))

    def delete_keys(self, keys: Iterable[str]) -> None:
        """Delete keys, present or not."""
        self._told_if_lost(lambda: [self.raw.delete_key(key) for key in keys])

    def read(self, key: str) -> bytes | None:
        """Return a key's value, None if it is missing."""
        return self._told_if_lost(lambda: self._value(key))

    def look(self, key: str, seconds: float) -> bytes | None:
        """Look for a key until it is there: its value, or None if that takes longer.

        One thread looks again and again: to have each look made by another costs more than a look.
        """
        ended, until = threading.Event(), time.monotonic() + seconds

        def look() -> bytes | None:
            pause = timeouts().poll
            while (found := self._value(key)) is None:
                left = until - time.monotonic()
                if left <= 0 or ended.wait(min(pause, left, timeouts().beat)):
                    break
                pause *= PAUSES_GROW
            return found

        try:
            return self._told_if_lost(look, seconds)
        finally:
            ended.set()  # the caller was interrupted

    def _value(self, key: str) -> bytes | None:
        # Compare and set alone would wake all ranks that wait for a missing key.
        if not self.raw.check([key]):
            return None
        found = bytes(self.raw.compare_set(key, _MISSING, _MISSING))
        return None if found == _MISSING else found  # deleted meanwhile

    def clone(self) -> Any:
        """A further connection, which is torch's own."""
        return self._told_if_lost(self.raw.clone, own=False)

    def _ask(self, name: str, *args: Any) -> Any:
        return self._told_if_lost(lambda: getattr(self.raw, name)(*args))

    def _told_if_lost(
        self, call: Callable[[], Answer], lasts: float = 0.0, own: bool = True
    ) -> Answer:
        """Run a call over this connection; where it is lost, no later one is made.

        Args:
            lasts: seconds that it takes by itself.
            own: whether its errors are of this connection.

        Raises:
            SilentStoreError: it has not returned in time, or an earlier one has not yet.
        """
        if self._client in _LOST:
            raise dist.DistNetworkError(_LOST[self._client])
        what = f"the store has not answered for {self._patience():.3g} s"
        owed = _OWED.pop(self._client, None)
        if owed is not None and not owed.is_over(min(self._patience(), timeouts().moment)):
            _OWED[self._client] = owed
            raise SilentStoreError(what)
        asked = Asked(call)
        if not asked.is_over(self._patience() + lasts):
            _OWED[self._client] = asked
            raise SilentStoreError(what)
        try:
            return cast(Answer, asked.answer())
        except dist.DistNetworkError as error:
            if own:
                _LOST[self._client] = str(error)
            raise


class Asked:
    """A call under way on a thread that is kept for the next one.

    Args:
        call: runs on the thread.
        lasts: whether it lasts until another call ends it. Then a spare thread is started for that
            one, since Python may start none at the end of the process.

    Raises:
        NoThreadError: no thread can be started for a call that lasts. The caller makes another one
            itself.
    """

    def __init__(self, call: Callable[[], Any], lasts: bool = False) -> None:
        self._call: Callable[[], Any] | None = call
        self._answer: Any = None
        self._error: BaseException | None = None
        self._held = _thread.allocate_lock()  # until the call has returned
        self._held.acquire()
        try:
            asker = _idle() or _Asker()
            if lasts and not _IDLE:
                try:
                    _IDLE.append(_Asker())
                except RuntimeError:
                    _IDLE.append(asker)
                    raise
        except RuntimeError as error:
            if lasts:
                raise NoThreadError(f"{error}") from error
            self.run()
            self.tell()
        else:
            asker.ask(self)

    def run(self) -> None:
        """Makes the call, on its thread."""
        call, self._call = self._call, None
        assert call is not None
        try:
            self._answer = call()
        except BaseException as error:
            self._error = error

    def tell(self) -> None:
        """Wake the caller."""
        self._held.release()

    @property
    def has_failed(self) -> bool:
        """Whether it has raised an error."""
        return self._error is not None

    def is_over(self, seconds: float = 0.0) -> bool:
        """Whether it has returned, once so many seconds have passed at most."""
        if not self._held.acquire(timeout=max(seconds, 0.0)):
            return False
        self._held.release()
        return True

    def answer(self) -> Any:
        """Return its result, or raise its error."""
        if self._error is not None:
            raise self._error
        return self._answer


_IDLE: list[_Asker] = []
"""Threads without a call; `append` and `pop` are one step of the interpreter each."""


def _idle() -> _Asker | None:
    try:
        return _IDLE.pop()
    except IndexError:
        return None


class _Asker:
    """A thread that makes calls one after the other, until the process ends.

    A call that hangs keeps it. Between two calls it holds no reference to a store.
    """

    def __init__(self) -> None:
        self._asked: Asked | None = None
        self._wanted = _thread.allocate_lock()  # until there is a call
        self._wanted.acquire()
        _thread.start_new_thread(self._run, ())

    def ask(self, asked: Asked) -> None:
        """Make a call on this thread, which is new, or was taken from the idle ones."""
        self._asked = asked
        self._wanted.release()

    def _run(self) -> None:
        while True:
            self._wanted.acquire()
            asked, self._asked = self._asked, None
            assert asked is not None
            asked.run()
            _IDLE.append(self)  # before the caller continues, so that its next call finds it idle
            asked.tell()
            del asked


def _forget() -> None:
    """In a forked process none of these threads is there, and no answer comes."""
    _IDLE.clear()
    _OWED.clear()
    _LOST.clear()


os.register_at_fork(after_in_child=_forget)
