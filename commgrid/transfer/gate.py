"""Gates at the store: all ranks of a transfer pass each, or all of them learn why not.

Ranks mark themselves as here; the last of them opens it for all. One that fails, that has waited
long enough, or that has learnt who will not come, writes why instead. Whatever is written first
stands, so that all have one answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress

from commgrid.errors import CommGridError, PeerFailedError, PeerTimeoutError, TransferError
from commgrid.planning.rank_lists import describe_ranks
from commgrid.runtime import torch_world
from commgrid.runtime.patient import PatientStore
from commgrid.runtime.roll import Coming, Line, Roll

_ANSWER_SECONDS = 5.0
_CAUSE_SECONDS = 2.0  # for who was waited for, to come and say whom it waited for itself

KINDS: dict[str, type[CommGridError]] = {
    "absent": PeerTimeoutError, "gone": PeerFailedError, "failed": TransferError,
}  # fmt: skip


class Gates:
    """The gates that the same ranks come to, one after the other, each under a name of its own.

    Args:
        key: what nothing else at the store is called.
        rank: this one.
        ranks: who has to come.

    Attributes:
        interrupted: whether a rank is lost, as this one was told or has heard at a gate.
    """

    def __init__(self, key: str, rank: int, ranks: Sequence[int]) -> None:
        self.rank, self.ranks = rank, ranks
        self._store = PatientStore(torch_world.world_store(), lambda: _ANSWER_SECONDS)
        self._key = key
        self._line = Line(self._store, len(ranks))
        self._used: set[str] = set()
        self._failed: set[str] = set()
        self._at = ""  # the gate that this rank waits at
        self._will_not_open: tuple[str, str] | None = None

    def come(self, gate: str, seconds: float, what: str) -> None:
        """Marks this rank and waits for the others.

        Args:
            gate: its name.
            seconds: how long.
            what: what a rank that does not come has not done, for the message.

        Raises:
            PeerTimeoutError: some did not come, as it names.
            CommGridError: one has said why not.
        """
        roll, verdict = self._roll(gate), self._verdict(gate)
        self._at = gate
        if self._will_not_open is not None:
            found = self.conclude(gate, *self._will_not_open, lost=True)
        elif roll.come(self.rank) is Coming.LAST:
            self._forget(but=gate)  # the others, which all have left
            found = self.conclude(gate, "open", "")
        elif self._line.within(verdict, seconds):
            found = self._error(self._store.get(verdict))
        else:
            missing = sorted(set(self.ranks) - set(roll.here(self.ranks)))
            told = f"{describe_ranks(missing)} {what} within {seconds:.3g} s"
            found = self.conclude(gate, "absent", told)
        self._at = ""
        if found is not None:
            raise found
        self._used = {gate}

    def conclude(
        self, gate: str, kind: str, message: str, lost: bool = False
    ) -> CommGridError | None:
        """Says how it ends, unless somebody was first; what stands, None where all may pass.

        Args:
            gate, kind, message: which one, and why.
            lost: whether a rank is lost, so that no other gate opens either.
        """
        self._used.add(gate)
        mine = json.dumps([kind, message, lost]).encode()
        with suppress(RuntimeError):  # the store is gone with the rank that served it
            mine = self._store.compare_set(self._verdict(gate), "", mine.decode())
        return self._error(mine)

    def _error(self, verdict: bytes) -> CommGridError | None:
        kind, message, lost = json.loads(verdict)
        if lost:  # this rank may hear of it here before its own watch says so
            self._will_not_open = kind, message
        return None if kind == "open" else KINDS[kind](message)

    def ask(self, gate: str, waited_for: int | None) -> set[int]:
        """Waits for the cause of a failure that this rank only sees an end of.

        Who has waited long enough closes its connections, and is then as good as gone for those who
        wait for it. But it comes here and says whom it waited for; who is gone does not.

        Args:
            gate: that the failure is in the way of; what is said stands there.
            waited_for: who seems gone; None: it cannot be told.

        Returns:
            Who has not come; of use where nobody has said why.
        """
        self._failed.add(gate)
        roll, verdict, missing = self._failures(gate), self._verdict(gate), set(self.ranks)
        with suppress(RuntimeError):  # the store is gone with the rank that served it
            roll.come(self.rank)
            if not self._line.within(verdict, _CAUSE_SECONDS):
                missing -= set(roll.here(self.ranks))
                if waited_for is not None and waited_for not in missing:
                    self._line.within(verdict, _ANSWER_SECONDS)
        return missing - {self.rank}

    @property
    def interrupted(self) -> bool:
        return self._will_not_open is not None

    def interrupt(self, why: str, late: bool) -> None:
        """Ends the gate that this rank waits at, for all, and the next ones; from another thread.

        Args:
            why: who will not come.
            late: whether it may be alive and does not answer.
        """
        self._will_not_open = "absent" if late else "gone", why
        if self._at:
            self.conclude(self._at, *self._will_not_open, lost=True)

    def close(self) -> None:
        """Lets the store's connections go; the last rank to do so takes away what is left there."""
        self._line.close()
        with suppress(RuntimeError):  # the store is gone
            left = self._roll("left")
            if left.come(self.rank) is Coming.LAST:
                left.delete()
                self._forget()

    def _forget(self, but: str = "") -> None:
        """Takes gates from the store."""
        for gate in self._used - {but}:
            self._roll(gate).delete()
            self._store.delete_key(self._verdict(gate))
        for gate in self._failed - {but}:
            self._failures(gate).delete()

    def _roll(self, gate: str) -> Roll:
        return Roll(self._store, f"{self._key}/{gate}/here", self.ranks)

    def _failures(self, gate: str) -> Roll:
        return Roll(self._store, f"{self._key}/{gate}/failed", self.ranks)

    def _verdict(self, gate: str) -> str:
        return f"{self._key}/{gate}/verdict"
