"""The communicator of two grids that have come together, and the watch over it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

from commgrid.grid_pairs.pairing import Pairing
from commgrid.health.detector import Watch
from commgrid.planning.group_row import GroupOptions
from commgrid.runtime.grid import HyperCommGrid
from commgrid.store.gate import Hearing
from commgrid.torch_compat import ended_groups
from commgrid.torch_compat import groups as torch_groups
from commgrid.torch_compat import nccl as torch_nccl
from commgrid.torch_compat import world as torch_world
from commgrid.torch_compat.messages import start_exchange
from commgrid.torch_compat.peer_errors import as_peer_error


class PairGroup(torch_groups.CalledGroup):
    """A communicator of ranks of two grids; watched if the pairing says so.

    Made on all of its ranks at once, which connect it and then begin.

    Args:
        pair: all ranks of both grids, which have met.
        about: its name in messages, such as `bridge 'images'`.
        ranks: by the pairing's numbers, in one order on all of them.
        grids: that this rank is in, whose watches it follows.
        backend: None: the pairing's.
        timeout: seconds that a message may take; None: torch's default.
        connect: whether `connect` is going to be called, rather than a first collective.
        told: called before the watch breaks connections, with the failure, and whether it is a rank
            that does not answer.

    Attributes:
        name: `about`.
        group: torch's.
        ranks: of it.
        key: at the store, for it alone.
    """

    def __init__(
        self,
        pair: Pairing,
        about: str,
        ranks: Sequence[int],
        grids: Iterable[HyperCommGrid],
        *,
        backend: str | None = None,
        timeout: float | None,
        connect: bool = False,
        told: Callable[[str, bool], object] = lambda text, late: None,
    ) -> None:
        self.name, self.ranks, self.key = about, tuple(ranks), pair.key
        self._told = told
        self._watch: Watch | None = None
        self._addresses: list[tuple[Any, str]] = []
        with torch_nccl.errors_are_ours() if pair.watched else nullcontext():
            self.group = torch_groups.create_group(
                self.key,
                about,
                self.ranks,
                backend=backend or pair.backend or None,
                options=GroupOptions(),
                timeout=timeout,
                startup_timeout=pair.patience(),
                connect=connect,
                hearing=Hearing(self._where, self.post),
                numbering=pair.numbering,
            )
        self._unconnected = {self.group}
        if pair.watched and len(self.ranks) > 1:
            try:
                watch = Watch(
                    self.key, self.ranks, timeout, self._wake, [self], pair.numbering,
                    pair.hears_silence,
                )  # fmt: skip
                watch.tell_address()
                for grid in grids:
                    if grid.watch is not None:
                        of = f"grid {grid.name!r}: " if pair.numbering.is_joint else ""
                        watch.follow(grid.watch, of)
                self._watch = watch
            except BaseException:
                ended_groups.abort_all([self.group], self._unconnected, tell=False)
                raise

    def _wake(self, why: str, late: bool) -> None:
        """End the waits of this rank after a failure."""
        self._told(why, late)
        self._addresses = torch_groups.addresses([self.group])
        torch_groups.end_gate(self.group, why, late)
        ended_groups.wake([self.group], self._unconnected, watched=True)

    def connect_watch(self) -> None:
        """Connect the watch's ranks, all of which have made it."""
        if self._watch is not None:
            self._watch.connect(self.key)

    def connect(self, timeout: float) -> None:
        """Connect all ranks; collective, after all have made it.

        Args:
            timeout: seconds.

        Raises:
            PeerTimeoutError: a rank did not connect.
        """
        if self.group.size() == 1 or torch_groups.backend_of(self.group) == torch_world.FAKE:
            return
        try:
            devices = torch_groups.devices_of(self.group)
            exchanges = torch_groups.connected_by(
                lambda: [start_exchange(self.group, device) for device in devices],
                [self.group], timeout, lambda: self.name, self.failure,
            )  # fmt: skip
            for exchange in exchanges:
                exchange.wait(timeout)
        except RuntimeError as error:
            raise as_peer_error(f"{self.name} cannot be connected", error) from error

    def begin(self) -> None:
        """All have connected: watch what they do from here on."""
        self._unconnected.clear()
        if self._watch is not None:
            self._watch.begin()

    # -- failures -------------------------------------------------------------------------

    def failure(self, patience: float = 0.0) -> str | None:
        """Return what the watch knows of ranks that are gone or have failed.

        Args:
            patience: seconds to wait for it, as where a message has just failed.
        """
        return None if self._watch is None else self._watch.read(patience)

    @property
    def is_late(self) -> bool:
        """Whether the watch has found a rank that does not answer."""
        return self._watch is not None and self._watch.late

    def post(self, failure: str, late: bool = False) -> None:
        """Tell all ranks of a failure here; a rank that waits on its device is woken."""
        if self._watch is not None:
            self._watch.post(failure, late)

    def _where(self, ranks: Sequence[int]) -> str:
        return "" if self._watch is None else self._watch.where(ranks)

    def end(self, broken: bool = False, finish: Callable[[], object] | None = None) -> None:
        """Destroy the communicator, not twice.

        Args:
            broken: True: messages under way are not waited for, and ranks that wait for this one
                get an error. This is so as well if the watch knows of a failure.
            finish: else called before.
        """
        if self._watch is not None:
            self._watch.close()
            broken = broken or self._watch.failure is not None
        is_alive = torch_groups.is_alive(self.group)
        if is_alive and not broken:
            try:
                if finish is not None:
                    finish()
            finally:
                torch_groups.destroy_group(self.group)
            return
        if is_alive:
            self._addresses += torch_groups.addresses([self.group])
            ended_groups.abort_all([self.group], self._unconnected)
        torch_groups.forget_addresses(self._addresses)
        self._addresses = []
