"""Stores and waits that count calls, or whose process ends after so many."""

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from commgrid.store.key_wait import Line


class CountingStore:
    """A store that counts one rank's calls."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.calls: Counter[str] = Counter()

    timeout = timedelta(seconds=300)

    def clone(self) -> "CountingStore":
        made = CountingStore(self.store.clone())
        made.calls = self.calls
        return made

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.calls[name] += name not in ("set_timeout", "clone")  # which ask the store nothing
            return getattr(self.store, name)(*args)

        return call


class Killed(BaseException):
    """What stands for a process that is gone: nobody hears of it."""


class MortalStore(CountingStore):
    """A store whose process ends after so many calls, other than waiting."""

    def __init__(self, store: Any, left: int) -> None:
        super().__init__(store)
        self.left = left

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.store.wait(keys, timeout)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self.left -= name != "set_timeout"
        if self.left < 0:
            raise Killed
        return getattr(self.store, name)  # type: ignore[no-any-return]


class MortalLine(Line):
    """A line whose process ends where it waits in vain."""

    def within(self, key: str, seconds: float) -> bytes | None:
        found = super().within(key, 0.1)
        if found is None:
            self._store.left = 0
            raise Killed
        return found
