"""The agreement that starts a world, at a store that may hold keys of processes that are gone.

A launcher's store outlives the processes that it restarts, and no counter of a launcher tells their
attempts apart. So rank 0, which every attempt has once, opens an epoch under a name that it draws,
and it alone concludes the comparison there. Ranks that have come to an earlier epoch are sent on.
All keys of a world lie below its epoch, so that nothing else has to tell attempts apart.

    epoch           name of the latest epoch
    <epoch>/next    name of the epoch after it
    lobby           arrivals of ranks that find none, for the error that rank 0 is absent
    <epoch>/left    arrivals of ranks that have left the world, and `all` once all have
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commgrid.errors import CommGridError, PeerTimeoutError
from commgrid.rendezvous.agreement import Agreement
from commgrid.rendezvous.arrival_bitmap import arrive, arrived, counters
from commgrid.rendezvous.documents import drop_agreement, show
from commgrid.rendezvous.op import Drop, Get, Now, Protocol, Put, WaitKey
from commgrid.rendezvous.round import Decision, conclude, decision_of, drop_left
from commgrid.rendezvous.start_decision import error_of, held_up
from commgrid.rendezvous.timeouts import timeouts

_LISTED = 1024  # ranks of a world whose presence is looked up one by one


class FirstAgreement(Agreement):
    """The agreement that starts a world; see above.

    Args:
        token: name of the epoch that this process opens if it is rank 0; no other has drawn it.
        **given: as `Agreement` takes them.
    """

    def __init__(self, *, token: str, **given: Any) -> None:
        super().__init__(**given)
        self._token = token

    @property
    def incarnation(self) -> str:
        """Name of the epoch."""
        return self._token

    def compare(self) -> Protocol[None]:
        """Open an epoch, or join it; then as `Agreement.compare`."""
        if self._me == self._first:
            before = yield from self._open()
            if not (yield from self._compare_at(self._token)):
                raise PeerTimeoutError(
                    f"{self.about}: another process has come as rank {self._me} after this one; "
                    "is it running twice?"
                )
            yield from self._drop_before(before)
        else:
            self._token = ""
            while not (yield from self._join((yield from self._opened()))):
                pass
        self._phase = 1

    def _open(self) -> Protocol[str | None]:
        """Open an epoch, and send on the ranks that wait in the previous one; return that one."""
        found = (yield Get(("epoch",)))[0]
        before = None if found is None else found.decode()
        self._base = self._token
        yield from show(self._token, self._me, self._text)
        # First: no rank may go on to an epoch that the next rank 0 does not find here.
        yield Put("epoch", self._token.encode())
        if before is not None:
            yield Put(f"{before}/next", self._token.encode())
            yield from conclude(f"{before}/phase 0", {"kind": "moved"})
        return before

    def _drop_before(self, before: str | None) -> Protocol[None]:
        """Delete what is left of the previous epoch, from which all ranks have gone on."""
        yield Drop(tuple(counters("lobby", self._members)))
        if before is not None:
            yield from drop_agreement(before, self._members)
            yield Drop((f"{before}/next",))
            yield from drop_left(left_at(before), self._members)

    def _opened(self) -> Protocol[str]:
        """Wait for an epoch that this rank has not seen yet.

        Raises:
            PeerTimeoutError: rank 0 opens none in time.
        """
        key, patience = f"{self._token}/next" if self._token else "epoch", timeouts().unseen
        while True:
            until = min(self._until, (yield Now()) + patience)
            found: bytes | None = yield WaitKey(key, until)
            if (yield Now()) > self._until + timeouts().answer:
                raise held_up(self.about, self._me, self._limit)
            if found is None:  # a rank 0 may have ended before it wrote `next`
                found = (yield Get(("epoch",)))[0]
            if found is not None and found.decode() != self._token:
                return found.decode()
            if patience == timeouts().unseen:
                yield from arrive("lobby", self._me, ())
                patience = timeouts().lease
            if (yield Now()) >= self._until:
                raise (yield from self._nobody_opened(key))

    def _nobody_opened(self, key: str) -> Protocol[CommGridError]:
        """Return the error that rank 0 is absent, with the others that are."""
        opened: bytes | None = yield WaitKey(
            key, (yield Now()) + self.margin
        )  # others come to it now
        if opened is not None and opened.decode() != self._token:
            return PeerTimeoutError(
                f"{self.about}: {self._limit} was over on rank {self._me} when rank {self._first} "
                f"had come; either it came too late, or rank {self._me} was held up meanwhile"
            )
        few = self._members if len(self._members) <= _LISTED else [self._first, self._me]
        here = yield from arrived("lobby", few)
        missing = [rank for rank in few if rank not in {*here, self._me}]
        return error_of(self._absent(missing, here, "arrive"), self.about, self._me)

    def _join(self, epoch: str) -> Protocol[bool]:
        self._token = epoch
        if (yield Get((f"{epoch}/phase 0/decision",)))[0] is not None:
            return False
        return (yield from self._compare_at(epoch))

    def _decision(self, is_last: bool, members: Sequence[int]) -> Protocol[Decision]:
        """Return the decision about documents, which rank 0 makes when the last has arrived."""
        at, complete = self._place(0), f"{self._base}/complete"
        if is_last:
            yield Put(complete, b"")
        if self._me == self._first and (is_last or (yield from self._all_have_come(complete))):
            return (yield from conclude(at, (yield from self._judge((), False))))
        return (
            yield from decision_of(at, self._me, members, self._until, self._judge, looks=False)
        )

    def _all_have_come(self, complete: str) -> Protocol[bool]:
        """Wait for the last rank's word, and look whether it has come and ended before that."""
        while (now := (yield Now())) < self._until:
            until = min(self._until, now + timeouts().lease)
            if (yield WaitKey(complete, until)) is not None:
                return True
            here = yield from arrived(self._place(0), self._members)
            if len(here) == len(self._members):
                return True
        return False


def left_at(epoch: str) -> str:
    """Return the place where ranks leave a world.

    Args:
        epoch: name of the world's; empty if this process has come to none.
    """
    return f"{epoch}/left" if epoch else "left"
