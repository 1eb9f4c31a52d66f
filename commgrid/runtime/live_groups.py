"""Live groups: the communicators of a grid, from their creation to their end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from torch.distributed import ProcessGroup

from commgrid.errors import PeerFailedError, PeerTimeoutError
from commgrid.health.detector import Watch
from commgrid.planning.plan import PlannedCommunicator
from commgrid.planning.spec import GridSpec
from commgrid.rendezvous.failure_round import Failure, failures_of
from commgrid.rendezvous.op import StoreLostError
from commgrid.runtime.communicator import Communicator
from commgrid.runtime.device_mesh import GridMeshes
from commgrid.runtime.named_groups import NamedGroups
from commgrid.store.driver import StoreDriver
from commgrid.store.gate import Hearing
from commgrid.torch_compat import ended_groups
from commgrid.torch_compat import groups as torch_groups
from commgrid.torch_compat import world as torch_world
from commgrid.torch_compat.mesh import forget_plans
from commgrid.torch_compat.peer_errors import as_peer_error


class PeerFailure(NamedTuple):
    """The failure of another rank.

    Args:
        text: which rank, and what is known of it.
        late: whether it may be alive.
    """

    text: str
    late: bool


class LiveGroups(NamedGroups):
    """The communicators of a grid: added one by one as it starts, released together as it ends.

    Args:
        name, spec, rank: see `NamedGroups`.
        backend: of every communicator that the groups table gives none; None: WORLD's.
        timeout: seconds that a collective may take; None: torch's default.
    """

    _pg_options: Any = None  # torch's, in place of the groups table's

    def __init__(
        self, name: str, spec: GridSpec, rank: int, backend: str | None, timeout: float | None
    ) -> None:
        super().__init__(name, spec, rank)
        self._backend, self._timeout = backend, timeout
        self._owns_groups, self._incarnation = True, ""
        self._addresses: list[tuple[Any, str]] = []
        self._before_destroy: list[Callable[[], object]] = []
        self._communicators: list[Communicator] = []
        self._meshes: GridMeshes | None = None
        self._watch: Watch | None = None
        self._failure: PeerFailure | None = None

    # -- what it is ---------------------------------------------------------------------

    @property
    def is_destroyed(self) -> bool:
        """Whether `destroy` was called."""
        return self._destroyed

    @property
    def is_alive(self) -> bool:
        """Whether it is not destroyed, and the torch.distributed it was made in has not ended."""
        return not self._destroyed and all(
            torch_groups.is_alive(communicator.group) for communicator in self.communicators[:1]
        )

    @property
    def backend(self) -> str | None:
        """The backend it was given; None: WORLD's."""
        return self._backend

    @property
    def on_nccl(self) -> bool:
        """Whether a communicator of several ranks runs on NCCL."""
        return any(torch_groups.nccl_backends(each.group) for each in self._communicators)

    @property
    def watch(self) -> Watch | None:
        """The thread that sees whether ranks are gone; None where nothing watches."""
        return self._watch

    @property
    def failure(self) -> PeerFailure | None:
        """The failure of another rank that this one has learnt of; None: it knows of none."""
        watch = self._watch
        if self._failure is None and watch is not None and watch.failure is not None:
            return PeerFailure(watch.failure, watch.late)
        return self._failure

    @property
    def timeout(self) -> float | None:
        """The seconds that a collective may take; None: torch's default."""
        return self._timeout

    @property
    def identity(self) -> str:
        """A name unlike any other grid's at this store: name, first rank and incarnation."""
        return f"{self._name}@{self.spec.grid_ranks[0]}/{self._incarnation}"

    @property
    def communicators(self) -> tuple[Communicator, ...]:
        """The distinct communicators of this rank, in creation order."""
        return tuple(self._communicators)

    # -- making, holding and letting go -------------------------------------------------

    def _make_group(
        self,
        planned: PlannedCommunicator,
        name: str,
        patience: float,
        prefix: str = "",
    ) -> ProcessGroup:
        """Make the torch group of a communicator; with `prefix` again, under its earlier name."""
        try:
            return torch_groups.create_group(
                name, ",".join(planned.names), planned.members, backend=self._backend,
                options=planned.options, timeout=self._timeout, startup_timeout=patience,
                backend_options=self._pg_options, connect=planned.connect, prefix=prefix,
                hearing=Hearing(self._where, self._hear),
            )  # fmt: skip
        except RuntimeError as error:
            again = " again" if prefix else ""
            what = f"grid {self._name!r}: communicator {planned.name!r} cannot be created{again}"
            raise as_peer_error(what, error) from error

    def _where(self, ranks: Sequence[int]) -> str:
        return "" if self._watch is None else self._watch.where(ranks)

    def _hear(self, text: str, late: bool) -> None:
        """Take a failure from a gate, and tell the other ranks."""
        self.note_failure(text, late)
        if self._watch is not None:
            self._watch.post(text, late)

    def _hold(self, communicator: Communicator) -> None:
        self._communicators.append(communicator)
        position = communicator.planned.members.index(self.rank)
        for name in communicator.names:
            self._groups[name] = communicator.group
            self._positions[name] = position

    def _swap(self, communicator: Communicator, group: ProcessGroup) -> None:
        """Replace a communicator's torch group, under all its names and in meshes."""
        before, communicator.group = communicator.group, group
        for name, held in self._groups.items():
            if held is before:
                self._groups[name] = group
        if self._meshes is not None:
            self._meshes.replace(group)

    def note_failure(self, text: str, late: bool) -> None:
        """Note that a rank has failed, so that looking up a group raises from now on.

        On NCCL a call that was aborted returns without an error, and its result is undefined.

        Args:
            text: which rank, and what is known of it.
            late: whether it may be alive.
        """
        if self._failure is None:
            self._failure = PeerFailure(text, late)
            self._groups.clear()  # so that no look-up has to check

    def refuse_if_failed(self) -> None:
        """Raise the failure of another rank that this rank knows of.

        Raises:
            PeerFailedError, PeerTimeoutError: a rank is gone, or late.
        """
        failure = self.failure
        if failure is not None and not self._destroyed:
            kind = PeerTimeoutError if failure.late else PeerFailedError
            raise kind(
                f"{failure.text}; grid {self._name!r} cannot be used any more: call "
                "commgrid.rebuild, or commgrid.destroy and commgrid.initialize"
            )

    def _resolve(self, name: str) -> str:
        self.refuse_if_failed()
        return super()._resolve(name)

    def before_destroy(self, callback: Callable[[], object]) -> None:
        """Register a function that is called once, before the grid is destroyed."""
        self._before_destroy.append(callback)

    def destroy(self) -> None:
        """Destroy the grid's communicators; a second call does nothing."""
        self._destroy(at_exit=False)

    def _destroy(self, at_exit: bool) -> None:
        self._announce_end()  # before connections close, which wakes ranks that wait
        torch_groups.destroy_all(self._release_all(), at_exit)

    def _announce_end(self) -> None:
        """Tell ranks that wait for this one that the grid has ended here."""
        if not self._owns_groups or not self._communicators or not self.is_alive:
            return
        ranks = tuple(sorted(self.spec.grid_ranks))
        if len(ranks) == 1 or torch_world.world_backend() == torch_world.FAKE:
            return
        driver = StoreDriver(torch_world.world_store(), len(ranks))
        with suppress(StoreLostError):  # with the rank that served it
            driver.run(Failure(failures_of(self.identity), self.rank, ranks).over())
        driver.close()

    def abort(self) -> None:
        """Destroy the grid after a failure, without waiting for calls under way.

        Ranks that wait for this one get an error; on a watched grid it names this rank.
        """
        if self._watch is not None:
            self._watch.post(f"rank {self.rank} has aborted grid {self._name!r}")
        self.abort_after_failure()

    def abort_after_failure(self) -> None:
        """Destroy the grid as `abort` does, without telling the other ranks."""
        by_pairs = self._connected_by_pairs()
        groups = self._release_all()
        self._addresses = torch_groups.addresses(groups)
        ended_groups.abort_all(groups, by_pairs)

    def forget_addresses(self) -> None:
        """Delete the addresses that `abort` has left at the store, if the store still exists."""
        torch_groups.forget_addresses(self._addresses)
        self._addresses = []

    def _connected_by_pairs(self) -> set[ProcessGroup]:
        return {c.group for c in self._communicators if not c.connected}

    def _release_all(self) -> list[ProcessGroup]:
        self._destroyed = True
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
        while self._before_destroy:
            self._before_destroy.pop()()
        self._forget()
        if self._meshes is not None:
            forget_plans()
        self._meshes = None
        made, self._communicators = self._communicators, []
        return [communicator.group for communicator in made] if self._owns_groups else []
