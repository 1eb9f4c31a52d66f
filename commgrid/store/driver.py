"""The driver of rendezvous protocols: it carries out their operations on a torch store."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from commgrid.rendezvous.op import (
    Add,
    Cas,
    Drop,
    Get,
    Now,
    Op,
    Protocol,
    Put,
    StoreLostError,
    WaitKey,
)
from commgrid.store.client import PatientStore, SilentStoreError
from commgrid.store.key_wait import Line, seconds_until

Result = TypeVar("Result")

_FEW_KEYS = 64


class StoreDriver:
    """Runs protocols over one store.

    Args:
        store: a `torch.distributed.Store`.
        among: number of ranks that wait for each other; a few look for a while before they wait.
        patience: returns the seconds that one operation may take; None: `Timeouts.answer`.
        line: to wait on, over the same store; None: one of its own.
    """

    def __init__(
        self,
        store: Any,
        among: int,
        patience: Callable[[], float] | None = None,
        line: Line | None = None,
    ) -> None:
        self.store = PatientStore(store, patience)
        self._line = line or Line(store, among)

    def run(self, protocol: Protocol[Result]) -> Result:
        """Run a protocol to its end, and return its result.

        Raises:
            StoreLostError: the store has ended or does not answer, unless the protocol handles it.
        """
        outcome: Any = None
        try:
            operation = next(protocol)
            while True:
                try:
                    outcome = self._carry_out(operation)
                except RuntimeError as error:  # torch's DistNetworkError and DistStoreError, too
                    silent = isinstance(error, SilentStoreError)
                    lost = StoreLostError(f"{error}".partition("\n")[0], silent)
                    lost.__cause__ = error
                    operation = protocol.throw(lost)
                else:
                    operation = protocol.send(outcome)
        except StopIteration as over:
            result: Result = over.value
            return result

    def has_come(self, key: str) -> bool:
        """Return whether a key has come, once for each time. The first call starts a wait; the next
        ones ask the store nothing, and only look whether it has ended."""
        return self._line.within(key, 0.0) is not None

    def close(self) -> None:
        """End a wait that is under way, and let connections go."""
        self._line.close()

    def _carry_out(self, operation: Op) -> Any:
        match operation:
            case Get(keys, stay):
                return self._get(keys, stay)
            case Put(key, value):
                self.store.set(key, value)  # type: ignore[arg-type]
            case Add(key, by):
                return self.store.add(key, by)
            case Cas(key, old, new):
                return self.store.compare_set(key, old, new)  # type: ignore[arg-type]
            case WaitKey(key, until):
                return self._wait(key, until)
            case Drop(keys):
                self.store.delete_keys(keys)
            case Now():
                return time.monotonic()
        return None

    def _get(self, keys: tuple[str, ...], stay: bool) -> tuple[bytes | None, ...]:
        # Torch's `multi_get` waits for a key that is deleted meanwhile.
        if (stay and keys) or (len(keys) > _FEW_KEYS and self.store.check(list(keys))):
            return tuple(self.store.multi_get(list(keys)))
        return tuple(self.store.read(key) for key in keys)

    def _wait(self, key: str, until: float) -> bytes | None:
        while True:
            came = self._line.within(key, seconds_until(until))
            # Not read yet; or it was deleted, or another rank has ended its wait for it, which
            # ends all. If the time is up, it may have come just now.
            found = came or self.store.read(key)
            if found is not None or came is None:
                return found
