"""The communicator of two grids that have come together, and the watch over it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from commgrid.grid_pairs.pairing import Pairing
from commgrid.health.detector import Watch, WatchedGroup, prepare
from commgrid.planning.group_row import GroupOptions
from commgrid.runtime.grid import HyperCommGrid
from commgrid.torch_compat import ended_groups
from commgrid.torch_compat import groups as torch_groups
from commgrid.torch_compat import world as torch_world
from commgrid.torch_compat.messages import start_exchange
from commgrid.torch_compat.peer_errors import as_peer_error


class PairGroup:
    """A communicator of ranks of two grids; watched if one of the grids is.

    Made on all of its ranks at once, which connect it and then begin.

    Args:
        pair: all ranks of both grids, which have met.
        about: its name in messages, such as `bridge 'images'`.
        ranks: global ranks, in one order on all of them.
        grids: that this rank is in, whose watches it follows.
        backend: None: WORLD's.
        timeout: seconds that a message may take; None: torch's default.
        connect: whether `connect` is going to be called, rather than a first collective.
        told: called before the watch breaks connections, with the failure, and whether it is a rank
            that does not answer.

    Attributes:
        group: torch's.
        ranks: its global ranks.
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
        self.about, self.ranks, self.key = about, tuple(ranks), pair.key
        self._options, self._timeout, self._told = GroupOptions(), timeout, told
        self.group = torch_groups.create_group(
            self.key,
            about,
            self.ranks,
            backend=backend,
            options=self._options,
            timeout=timeout,
            startup_timeout=pair.patience(),
            connect=connect,
            watched=pair.watched,
        )
        self._unconnected = {self.group}
        self._watch: Watch | None = None
        if pair.watched and len(self.ranks) > 1:
            try:
                self._watch = self._make_watch(grids)
            except BaseException:
                ended_groups.abort_all([self.group], self._unconnected, tell=False)
                raise

    def _make_watch(self, grids: Iterable[HyperCommGrid]) -> Watch:
        """Make the watch, and publish its address."""
        watched = WatchedGroup(self.about, self.ranks, self.group)
        watch = prepare(self.key, self.ranks, self._timeout, self._wake, [watched])
        watch.tell_address()
        for grid in grids:
            if grid.watch is not None:
                watch.follow(grid.watch)
        return watch

    def _wake(self, why: str, late: bool) -> None:
        """End the waits of this rank after a failure."""
        self._told(why, late)
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
            for device in torch_groups.devices_of(self.group):
                start_exchange(self.group, device).wait(timeout)
        except RuntimeError as error:
            raise as_peer_error(f"{self.about} cannot be connected", error) from error
        torch_groups.keep_timeout(self.group, self._options, self._timeout)

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

    def post(self, failure: str) -> None:
        """Tell the ranks of a failure here, also those that wait on a device for this one."""
        if self._watch is not None:
            self._watch.post(failure)

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
        if not torch_groups.is_alive(self.group):
            return
        if broken:
            ended_groups.abort_all([self.group], self._unconnected)
            return
        try:
            if finish is not None:
                finish()
        finally:
            torch_groups.destroy_group(self.group)
