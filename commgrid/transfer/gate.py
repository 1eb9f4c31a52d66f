"""Gates at the store: all ranks of a transfer pass each, or all of them learn why not.

Ranks mark themselves as here; the last of them opens it for all. One that fails, or that has waited
long enough, writes why instead. Whatever is written first stands, so that all have one answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress

from commgrid.errors import CommGridError, PeerFailedError, PeerTimeoutError, TransferError
from commgrid.planning.rank_lists import describe_ranks
from commgrid.runtime import torch_world
from commgrid.runtime.roll import Coming, Line, Roll

KINDS: dict[str, type[CommGridError]] = {
    "absent": PeerTimeoutError, "gone": PeerFailedError, "failed": TransferError,
}  # fmt: skip


class Gates:
    """The gates that the same ranks come to, one after the other.

    Args:
        key: what nothing else at the store is called.
        rank: this one.
        ranks: who has to come.
    """

    def __init__(self, key: str, rank: int, ranks: Sequence[int]) -> None:
        self.store = torch_world.world_store()
        self.key, self.rank, self.ranks = key, rank, ranks
        self.line = Line(self.store, len(ranks))
        self.passed: Gate | None = None

    def gate(self, name: str) -> Gate:
        """One of them; a name is used once."""
        return Gate(self, f"{self.key}/{name}")

    def close(self) -> None:
        """Lets the store's connections go; the last rank to do so takes away what is left there."""
        self.line.close()
        with suppress(RuntimeError):  # the store is gone with the rank that served it
            left = Roll(self.store, f"{self.key}/left", self.ranks)
            if left.come(self.rank) is Coming.LAST:
                left.delete()
                if self.passed is not None:
                    self.passed.forget()


class Gate:
    """One place that ranks come to; made by `Gates.gate`."""

    def __init__(self, gates: Gates, key: str) -> None:
        self._gates, self._store = gates, gates.store
        self._roll = Roll(gates.store, f"{key}/here", gates.ranks)
        self._verdict = f"{key}/verdict"

    def come(self, seconds: float, what: str) -> None:
        """Marks this rank and waits for the others.

        Args:
            seconds: how long.
            what: what a rank that does not come has not done, for the message.

        Raises:
            PeerTimeoutError: some did not come, as it names.
            CommGridError: one has said why not.
        """
        ranks = self._gates.ranks
        if self._roll.come(self._gates.rank) is Coming.LAST:
            if self._gates.passed is not None:  # by all, since all are here
                self._gates.passed.forget()
            self.conclude("open", "")
        elif not self._gates.line.within(self._verdict, seconds):
            missing = sorted(set(ranks) - set(self._roll.here(ranks)))
            self.conclude("absent", f"{describe_ranks(missing)} {what} within {seconds:.3g} s")
        found = self.read()
        if found is not None:
            raise found
        self._gates.passed = self

    def conclude(self, kind: str, message: str) -> CommGridError | None:
        """Says how it ends, unless somebody was first; what stands, None where all may pass."""
        mine = json.dumps([kind, message])
        with suppress(RuntimeError):  # the store is gone with the rank that served it
            mine = bytes(self._store.compare_set(self._verdict, "", mine)).decode()
        return _error(mine)

    def read(self) -> CommGridError | None:
        """What stands there; None: all may pass, or nothing yet."""
        if not self._store.check([self._verdict]):
            return None
        return _error(bytes(self._store.get(self._verdict)).decode())

    def forget(self) -> None:
        """Takes it from the store."""
        self._roll.delete()
        self._store.delete_key(self._verdict)


def _error(verdict: str) -> CommGridError | None:
    kind, message = json.loads(verdict)
    return None if kind == "open" else KINDS[kind](message)
