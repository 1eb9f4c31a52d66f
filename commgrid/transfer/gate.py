"""A gate at the store: all of some ranks pass it, or all of them learn why not.

Ranks mark themselves as here; the last of them opens it for all. One that fails, or that has waited
long enough, writes why instead. Whatever is written first stands, so that all have one answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from commgrid.errors import CommGridError, PeerFailedError, PeerTimeoutError, TransferError
from commgrid.planning.rank_lists import describe_ranks
from commgrid.runtime.roll import Coming, Line, Roll

KINDS: dict[str, type[CommGridError]] = {
    "absent": PeerTimeoutError, "gone": PeerFailedError, "failed": TransferError,
}  # fmt: skip


class Gate:
    """One place that ranks come to.

    Args:
        store: shared by all ranks.
        key: what it is called there; used once.
        rank: this one.
        ranks: who has to come.
        line: over the same store.
    """

    def __init__(self, store: Any, key: str, rank: int, ranks: Sequence[int], line: Line) -> None:
        self._store, self._key, self._rank, self._ranks = store, key, rank, ranks
        self._line, self._roll = line, Roll(store, f"{key}/here", ranks)
        self._verdict = f"{key}/verdict"

    def come(
        self, seconds: float, what: str, before: Gate | None = None, limit: float | None = None
    ) -> None:
        """Marks this rank and waits for the others.

        Args:
            seconds: how long.
            what: what a rank that does not come has not done, for the message.
            before: the gate that all have passed once all are here, which is forgotten.
            limit: of which these seconds are what is left; None: they are all.

        Raises:
            PeerTimeoutError: some did not come, as it names.
            CommGridError: one has said why not.
        """
        if self._roll.come(self._rank) is Coming.LAST:
            if before is not None:
                before.forget()
            self.conclude("open", "")
        elif not self._line.within(self._verdict, seconds):
            missing = sorted(set(self._ranks) - set(self._roll.here(self._ranks)))
            self.conclude(
                "absent", f"{describe_ranks(missing)} {what} within {limit or seconds:.3g} s"
            )
        found = self.read()
        if found is not None:
            raise found

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
