"""Failure detector: sees that a rank of the grid is gone, stopped or late, and ends waits for it.

NCCL waits on the device. A rank that is gone is no error there, until torch's watchdog ends the
process. Here a thread in every process is linked with other ranks (`commgrid.health.channel`). It
tells all ranks of a failure, and every rank breaks the connections of all its communicators at
once. So collectives return, and the main thread raises the failure:

    a process has ended        its neighbours' links close                          at once
    a process says nothing     no sign of life on its links        min(timeout, 60 s)
    a failed rank tells        `named_failures` on it                               at once
    a call is too late         NCCL's own timeout on one rank; the members tell     timeout
                               how many calls they made, whether they wait
                               themselves, and where they are
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch

from commgrid.errors import SpecError
from commgrid.health.channel import ControlChannel, Message
from commgrid.health.late_call import LateCall, Watched
from commgrid.planning.spec import GridSpec
from commgrid.rendezvous.op import Drop, Get, Put, StoreLostError, single
from commgrid.rendezvous.timeouts import timeouts
from commgrid.store.client import Asked
from commgrid.store.driver import StoreDriver
from commgrid.torch_compat import groups as torch_groups
from commgrid.torch_compat import nccl as torch_nccl
from commgrid.torch_compat import world as torch_world

_LONGEST = 8000
_NEVER = 1e9
_log = logging.getLogger("commgrid")


class Watch:
    """The detector of one grid on one rank; `failure` is the first failure that it learns of.

    A grid's detector publishes its address before the rendezvous, and is connected when all ranks
    have come, so that it sees losses while the communicators are made.

    Args:
        key: under which addresses are exchanged at the store; one grid at a time uses it.
        ranks: of the grid.
        timeout: seconds a collective may take; None: torch's default for WORLD's backend.
        wake: ends waits on the grid's communicators; is given the failure, and whether it is a rank
            that may live.
        communicators: those whose backends are asked whether they have failed.
        numbering: of the ranks, with their store; None: WORLD's.
        hears_silence: whether a stopped rank is a failure, besides an ended one.
    """

    def __init__(
        self,
        key: str,
        ranks: range | tuple[int, ...],
        timeout: float | None,
        wake: Callable[[str, bool], object],
        communicators: Sequence[Watched] = (),
        numbering: torch_world.Numbering | None = None,
        hears_silence: bool = True,
    ) -> None:
        numbering = numbering or torch_world.world_numbering()
        self._driver, self._at = StoreDriver(numbering.store, len(ranks)), f"{key}/watch"
        self._rank, self._timeout = numbering.rank, torch_world.group_timeout(timeout)
        self._hears_silence = hears_silence
        self._communicators, self._wake = communicators, wake
        self._first = threading.Lock()
        self._ended = self._is_published = False
        self.failure: str | None = None
        self.late = False
        """Whether the lost rank may live: it does not answer."""
        self.ended: set[int] = set()
        """Ranks whose processes this one, or the rank that told of the failure, has seen end."""
        self._learnt = threading.Event()
        self._waking: Asked | None = None
        self._followers: list[tuple[Watch, str]] = []
        self._followed: list[Watch] = []
        self._links = ControlChannel(
            self._rank, ranks, torch_world.own_address(numbering.store),
            timeouts().silent if hears_silence else _NEVER,
            hear=self._heard, lost=self._lost, look=self._look,
        )  # fmt: skip
        self._late_call = LateCall(self._rank, self._timeout, self._links.tell)

    def tell_address(self) -> None:
        """Publish where the others find this rank; one store call."""
        self._is_published = True
        self._driver.run(single(Put(f"{self._at}/{self._rank}", self._links.address.encode())))

    def connect(self, secret: str) -> None:
        """Links this rank with its neighbours, once all have told their address; one store call.

        Args:
            secret: what only the grid's processes know.
        """
        ranks = self._links.neighbours()
        found = self._driver.run(
            single(Get(tuple(f"{self._at}/{rank}" for rank in ranks), stay=True))
        )
        self._links.connect(dict(zip(ranks, map(bytes.decode, found), strict=True)), secret)

    def begin(self, communicators: Sequence[Watched] | None = None) -> None:
        """All have connected, and collectives begin: takes this rank's address from the store.

        Args:
            communicators: that have been made meanwhile.
        """
        if communicators is not None:
            self._communicators = communicators
        if self._hears_silence:
            self._links.silent_after = min(self._timeout, timeouts().silent)
        self._withdraw()

    def _withdraw(self) -> None:
        """Take this rank's address from the store."""
        if self._is_published:
            self._is_published = False
            self._driver.run(single(Drop((f"{self._at}/{self._rank}",))))

    def follow(self, other: Watch, of: str = "") -> None:
        """Fails whenever another does, as what is between two grids fails with each of them.

        Args:
            other: of a grid, some of whose ranks this one watches too.
            of: what goes before its failures, where it has other numbers for ranks.
        """
        self._followed.append(other)
        other._followers.append((self, of))
        if other.failure is not None:
            self._fails(f"{of}{other.failure}", other.late)

    def post(self, text: str, late: bool = False) -> str:
        """Tells all ranks of a failure, unless this one has learnt of another before; which.

        Args:
            text: what has failed.
            late: whether the lost rank may live.
        """
        self._fails(text, late, wake=False)
        return self.failure or text

    def leave(self, text: str) -> None:
        """Tell all ranks that this one leaves; a rank that waits for it fails.

        Args:
            text: why.
        """
        self._links.tell({"kind": "left", "text": text[:_LONGEST]})

    def where(self, ranks: Sequence[int]) -> str:
        """Ask ranks for the line of their main threads; return the answers: `it is at a.py:7`."""
        return self._late_call.where(ranks)

    def read(self, patience: float) -> str | None:
        """Return the failure, if one is seen within so many seconds."""
        self._learnt.wait(patience)
        return self.failure

    def close(self) -> None:
        """Ends the thread; the others do not miss this rank."""
        with self._first:
            self._ended = True
        while self._followed:
            followers = self._followed.pop()._followers
            followers[:] = [each for each in followers if each[0] is not self]
        if self._waking is not None:
            self._waking.is_over(timeouts().abort + timeouts().answer)
        self._links.close()
        with suppress(StoreLostError):  # collectives never began
            self._withdraw()
        # It may be kept, for `ended`; it must not keep communicators with their connections.
        self._communicators, self._wake = (), lambda text, late: None
        self._late_call = LateCall(self._rank, self._timeout, self._links.tell)

    # -- the thread's part --------------------------------------------------------------

    def _lost(self, rank: int, how: str) -> None:
        """A neighbour is lost; see `ControlChannel`."""
        texts = {
            "ended": "is gone: its process has ended",
            "unreachable": "cannot be reached: its connection is closed, and no other can be made; "
            "its process has ended, or its host is cut off",
            "silent": f"says nothing for {self._links.silent_after:.3g} s: its process is stopped, "
            "or its host is gone",
        }
        if how == "ended":
            self.ended.add(rank)
        self._fails(f"rank {rank} {texts[how]}", how == "silent")

    def _heard(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "failed":
            self.ended.update(message.get("ended", ()))  # a neighbour that dropped us says none
            self._fails(message["text"], bool(message["late"]), tell=False)
        else:
            self._late_call.hear(message, self._communicators)

    def _fails(self, text: str, late: bool, *, tell: bool = True, wake: bool = True) -> None:
        with self._first:
            if self.failure is not None or self._ended:
                return
            self.late = late
            self.failure = text = text[:_LONGEST]
            if tell:
                ended = sorted(self.ended)
                self._links.tell({"kind": "failed", "text": text, "late": late, "ended": ended})
            if wake:  # which takes NCCL some time, while the links go on
                self._waking = Asked(partial(self._wakes, text, late))
        self._learnt.set()
        for each, of in list(self._followers):
            each._fails(f"{of}{text}", late, wake=wake)

    def _wakes(self, text: str, late: bool) -> None:
        try:
            self._wake(text, late)
        except Exception as error:
            _log.warning("rank %d: after %s: %s", self._rank, self.failure, error)

    def _look(self) -> None:
        """Asks the backends whether something went wrong that the links do not tell."""
        if self.failure is not None:
            return
        if found := self._late_call.look(self._communicators):
            self._fails(*found)


def is_wanted(asked: bool | None, spec: GridSpec, backend: str | None) -> bool:
    """Return whether a grid is watched: by default if one of its groups runs on NCCL.

    The result is the same on all ranks.

    Args:
        asked: `watch` of `initialize`.
        spec: resolved.
        backend: `backend` of `initialize`.

    Raises:
        SpecError: a backend that ends the process, instead of what waits for a lost rank.
    """
    if len(spec.grid_ranks) == 1 or torch_world.world_backend() == torch_world.FAKE:
        return False
    backends = {each.options.backend or backend for each in spec.definitions.values()}
    kinds = {kind for each in backends for kind in torch_groups.nccl_kinds(each)}
    fatal = torch_nccl.ending_at_abort(kinds)
    if asked and fatal:
        raise SpecError(
            f"watch=True: {fatal[0]} of torch {torch.__version__} ends the process when a "
            "communicator is aborted (pytorch#192105); use nccl, or torch 2.15, or watch=False"
        )
    return asked if asked is not None else bool(kinds) and not fatal


def can_watch(backend: str) -> bool:
    """Whether a communicator can be watched: not in a fake world, nor if an abort ends the process.

    Args:
        backend: of the communicator; "": WORLD's.
    """
    chosen = backend or torch_world.world_backend()
    kinds = torch_groups.nccl_kinds(chosen)
    return chosen != torch_world.FAKE and not torch_nccl.ending_at_abort(kinds)
