"""A start's rendezvous: `commgrid.rendezvous.agreement` over the store of a live job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from uuid import uuid4

from commgrid.errors import CommGridError, PeerTimeoutError
from commgrid.rendezvous.agreement import PHASES, Agreement, Tell
from commgrid.rendezvous.op import StoreLostError
from commgrid.rendezvous.round import Decision
from commgrid.rendezvous.start_decision import held_up
from commgrid.rendezvous.timeouts import timeouts
from commgrid.rendezvous.world_epoch import FirstAgreement
from commgrid.store.driver import StoreDriver
from commgrid.store.hosts import own_host, ranks_here
from commgrid.store.key_wait import Line, seconds_until
from commgrid.store.search import first_line
from commgrid.torch_compat.peer_errors import address_of, lost_by_gloo


def _on_this_host(rank: int) -> tuple[str, Sequence[int]]:
    """Return the host's name, and the ranks on it, or none if the launcher does not say."""
    ranks = ranks_here(rank)
    with suppress(OSError):
        return (own_host(), ranks) if ranks else ("", ())
    return "", ()


class Rendezvous:
    """The ranks of one grid at the store, from comparing documents to being ready.

    Made on every rank at once, and used with `with`: an error within the block is reported to the
    ranks that wait, and becomes the error that says best what happened.

    Args:
        store: shared by all ranks of the world.
        name: what the ranks agree on, such as the grid's name.
        rank: this process's global rank.
        ranks: the ranks that are expected.
        document: plain values, the same on all of them.
        deadline: `time.monotonic()` until which to wait.
        phases: names of the barriers after comparing; the last one ends it.
        line: over the same store, to wait on; None: one of its own.
        opens: whether this is the first rendezvous of a world, which opens an epoch.
        beforehand: called before this rank arrives; leaves something at the store. It may raise
            StoreLostError.
        let_go: called after a connection was lost; closes this rank's connections.
        tells_host: whether the launcher's numbers of the ranks on this host are those of `ranks`.
        **more: `about`, `call` and `limit`, as `Agreement` takes them.

    Raises:
        GridMismatchError: ranks hold other documents.
        PeerTimeoutError: a rank did not come; it is named.
        PeerFailedError: a rank failed meanwhile.
    """

    def __init__(
        self,
        store: Any,
        *,
        name: str,
        rank: int,
        ranks: Sequence[int],
        document: Mapping[str, Any],
        deadline: float,
        phases: Sequence[str] = PHASES,
        line: Line | None = None,
        opens: bool = False,
        beforehand: Callable[[], None] | None = None,
        let_go: Callable[[], object] = lambda: None,
        tells_host: bool = True,
        **more: str,
    ) -> None:
        self._deadline, self._let_go, self._leaves = deadline, let_go, False
        given: dict[str, Any] = {
            "name": name, "me": rank, "members": ranks, "document": document, "phases": phases,
            "began": time.monotonic(), "until": deadline, "server": 0,
            "where": partial(_on_this_host, rank) if tells_host else lambda: ("", ()), **more,
        }  # fmt: skip
        self._agreement = (
            FirstAgreement(token=uuid4().hex[:16], **given) if opens else Agreement(**given)
        )
        self.about, limit = self._agreement.about, more.get("limit", "startup_timeout")
        if seconds_until(deadline) == 0:
            raise held_up(self.about, rank, limit)
        self._driver = StoreDriver(store, len(ranks), self._patience, line)
        try:
            with self._asking():
                if beforehand is not None:
                    beforehand()
                self._driver.run(self._agreement.compare())
        except BaseException as error:
            if not isinstance(error, CommGridError):
                self._give_up(error)  # Ctrl-C: this rank has arrived, and says that it leaves
            self._driver.close()
            raise

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            cause = error and self._give_up(error)
        finally:
            self._driver.close()
        if cause is not error:
            assert cause is not None
            raise cause from error

    @property
    def incarnation(self) -> str:
        """A name that no other rendezvous at this store has."""
        return self._agreement.incarnation

    @property
    def counter(self) -> str:
        """The key that stays at the store for the next rendezvous of this name and rank."""
        return self._agreement.counter

    def meet(
        self, tell: Tell | None = None, say: bytes | None = None, speakers: Sequence[int] = ()
    ) -> Decision:
        """Pass the next barrier; see `Agreement.meet`."""
        with self._asking():
            return self._driver.run(self._agreement.meet(tell, say, speakers))

    def tell(self, error: BaseException) -> None:
        """Tell the others why this rank fails, before it closes its connections."""
        with suppress(StoreLostError):
            self._driver.run(self._agreement.tell(error, lost_by_gloo(error)))

    def interrupt(self, why: str, late: bool) -> None:
        """End the phase that the ranks wait in; may be called by another thread.

        Args:
            why: which rank does not come, and what is known of it.
            late: whether it may be alive.
        """
        with suppress(StoreLostError):
            self._driver.run(self._agreement.interrupt(why, late))

    def patience(self) -> float:
        """Return the seconds to wait for peers elsewhere, which leave time to report the absent."""
        return max(seconds_until(self._deadline) - self._agreement.margin, 0.01)

    def _patience(self) -> float:
        """Return the seconds that one operation may take."""
        answer = timeouts().answer
        return answer if self._leaves else max(seconds_until(self._deadline), answer)

    def _give_up(self, error: BaseException) -> BaseException:
        self._leaves = True
        with suppress(StoreLostError):  # and with it everybody who could be told
            lost = lost_by_gloo(error)
            error = self._driver.run(self._agreement.give_up(error, lost))
            if self._agreement.loss is not None:
                self._let_go()
                error = self._driver.run(self._agreement.report())
        return error

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Within it, a store that does not answer is a PeerTimeoutError."""
        try:
            yield
        except StoreLostError as lost:
            twin = " Another process has come as this rank, too." if self._agreement.doubled else ""
            raise PeerTimeoutError(
                f"{self.about}: the store{address_of(self._driver.store)} stopped answering "
                f"({first_line(lost)}); has the process that serves it, usually rank 0 or "
                f"the launcher, ended?{twin}"
            ) from lost.__cause__
