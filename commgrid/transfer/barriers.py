"""The barriers of a transfer at the store: all ranks pass each, or all learn why not."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from commgrid.errors import CommGridError, PeerFailedError, PeerTimeoutError, TransferError
from commgrid.rendezvous.barriers import Barriers
from commgrid.rendezvous.op import Put, StoreLostError, single
from commgrid.rendezvous.round import Decision, is_good, said
from commgrid.store.driver import StoreDriver
from commgrid.torch_compat.world import Numbering

KINDS: dict[str, type[CommGridError]] = {
    "absent": PeerTimeoutError, "gone": PeerFailedError, "failed": TransferError,
}  # fmt: skip


class TransferBarriers:
    """Barriers that the ranks of a transfer pass; see `commgrid.rendezvous.barriers`.

    Args:
        key: what nothing else at the store is called.
        numbering: of the ranks.
        ranks: of the transfer.
        leftovers: keys that the last rank to leave deletes, too.

    Attributes:
        next: name of the first barrier of the next run.
    """

    next = "run 1"

    def __init__(
        self, key: str, numbering: Numbering, ranks: Sequence[int], leftovers: Sequence[str] = ()
    ) -> None:
        self.rank, self.ranks, self._leftovers = numbering.rank, ranks, [*leftovers]
        self._key = key
        self._driver = StoreDriver(numbering.store, len(ranks))
        self._barriers = Barriers(key, self.rank, ranks)

    def come(self, name: str, seconds: float, did_not: str) -> None:
        """Arrive, and wait for the others.

        Args:
            name: of the barrier.
            seconds: how long to wait.
            did_not: what absent ranks did not do, for the message.

        Raises:
            PeerTimeoutError: some ranks did not come; it names them.
            PeerFailedError, TransferError: a rank has failed before.
            RuntimeError: torch's, if the store is lost.
        """
        until = time.monotonic() + seconds
        try:
            decision = self._driver.run(self._barriers.come(name, until, did_not))
        except StoreLostError as lost:
            raise (lost.__cause__ or lost) from None  # torch's own, as from a collective
        if not is_good(decision):
            raise _error(decision)

    def exchange(self, name: str, mine: str, seconds: float) -> dict[int, str]:
        """Tell the others a text, and return what each rank has told; passes a barrier.

        Raises:
            PeerTimeoutError, PeerFailedError, TransferError, RuntimeError: as `come` does.
        """
        keys = {rank: f"{self._key}/{name}/said/{rank}" for rank in self.ranks}
        self._leftovers += keys.values()
        self._driver.run(single(Put(keys[self.rank], mine.encode())))
        self.come(name, seconds, f"did not get as far as its {name}")
        found = self._driver.run(said(f"{self._key}/{name}", self.ranks))
        return {rank: text.decode() for rank, text in found.items()}

    def fail(self, name: str, kind: str, message: str) -> CommGridError | None:
        """Decide that a barrier fails; return the error that stands, None if all have passed."""
        decision: Decision = {"kind": kind, "message": message}
        with suppress(StoreLostError):
            decision = self._driver.run(self._barriers.fail(name, kind, message))
        return None if is_good(decision) else _error(decision)

    def absent_after_failure(self, name: str, waited_for: int | None) -> set[int]:
        """See `Barriers.absent_after_failure`; all other ranks if the store is lost."""
        with suppress(StoreLostError):
            return self._driver.run(self._barriers.absent_after_failure(name, waited_for))
        return {*self.ranks} - {self.rank}

    @property
    def interrupted(self) -> bool:
        """Whether a rank is lost, so that no barrier opens any more."""
        return self._barriers.lost is not None

    def interrupt(self, why: str, late: bool) -> None:
        """End the barrier that this rank waits at, and all later ones; from another thread."""
        with suppress(StoreLostError):
            self._driver.run(self._barriers.interrupt(why, late))

    def close(self) -> None:
        """Leave; the last rank deletes what is left at the store."""
        with suppress(StoreLostError):
            why = f"rank {self.rank} has closed the transfer, or its program has ended"
            self._driver.run(self._barriers.close(*self._leftovers, before=self.next, why=why))
        self._driver.close()


def _error(decision: Decision) -> CommGridError:
    return KINDS[decision["kind"]](decision["message"])
