"""The process's named grids: the one piece of module state there is."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import ProcessGroup

from commgrid.errors import GridExistsError, GridNotInitializedError, PeerTimeoutError
from commgrid.health.detector import Watch
from commgrid.planning.spec import GridSpec
from commgrid.recording import recorder, remote
from commgrid.rendezvous.membership import Membership
from commgrid.rendezvous.op import StoreLostError
from commgrid.rendezvous.round import leave
from commgrid.rendezvous.timeouts import timeouts, use_timeouts
from commgrid.rendezvous.world_epoch import left_at
from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.startup_agreement import Rendezvous
from commgrid.store import standby as torch_standby
from commgrid.store.driver import StoreDriver
from commgrid.store.key_wait import Line, end_all
from commgrid.store.launch import Launch
from commgrid.store.search import connect_store, follow_timeout
from commgrid.torch_compat import world as torch_world
from commgrid.torch_compat.interposer import put_back
from commgrid.torch_compat.world import versions


@dataclass(frozen=True)
class Made:
    """How a grid of this rank was made, for `rebuild` to make another of its kind.

    Args:
        given: the user's spec, its -1 not filled.
        full: the sizes before any rebuild.
        last: the resolved spec of this rank's latest grid.
        identity: of the latest grid.
        backend, timeout, trace, watch, verify: as they were given.
        seen_by: the latest grid's watch, which sees processes end.
    """

    given: GridSpec
    full: dict[str, int]
    last: GridSpec
    identity: str
    backend: str | None
    timeout: float | None
    trace: bool = False
    watch: bool | None = None
    verify: str | None = None
    seen_by: Watch | None = None


@dataclass
class StorePlace:
    """The store in use, and the standby stores for when it is gone.

    Args:
        server: the rank that serves the store; None: the launcher, or another program.
        standbys: ranks that serve standby stores, and their addresses.
        own: this process's standby store.
        gone: ranks missing when a grid was rebuilt, or named as gone by a failure.
        ended: missing ranks whose processes were seen to end.
        epoch: of the world that met there; empty: it has not met.
        left: whether this process has left it.
    """

    server: int | None = None
    standbys: list[tuple[int, str]] = field(default_factory=list)
    own: torch_standby.Standby | None = None
    gone: frozenset[int] = frozenset()
    ended: frozenset[int] = frozenset()
    epoch: str = ""
    left: bool = False


class Registry:
    """Grids by name, and the torch.distributed that commgrid started for them, if it did."""

    def __init__(self) -> None:
        self.grids: dict[str, HyperCommGrid] = {}
        self.default = "default"  # the grid that is meant where none is named
        # Grid name to its table of groups: what get_group reads.
        self.tables: dict[str, dict[str, ProcessGroup]] = {}
        self.launch: Launch | None = None
        # Kept until the process ends: a launcher's store cannot be served a second time.
        self.store: Any = None
        self.place = StorePlace()
        self.made: dict[str, Made] = {}  # by name, also of grids that are gone
        self.started_world = False
        # Callbacks that release what other rooms keep for the job's grids.
        self.at_shutdown: list[Callable[[], object]] = []
        # Called at exit with each grid that is alive, and the error that ends the program, if any.
        self.at_exit: list[Callable[[HyperCommGrid, BaseException | None], object]] = []
        # Threads may start grids at once: each name is one thread's, and one thread starts WORLD.
        self.starting: set[str] = set()
        self.lock = threading.RLock()
        self.world_lock = threading.RLock()

    @contextmanager
    def reserved(self, name: str) -> Iterator[None]:
        """Within it, the name is this thread's to start a grid under.

        Raises:
            GridExistsError: a grid of this name is alive, or another thread is starting one.
        """
        with self.lock:
            state = "alive already" if self.find(name) else "being started by another thread"
            if name in self.grids or name in self.starting:
                raise GridExistsError(
                    f"grid {name!r} is {state}; commgrid.destroy({name!r}) first, or give another "
                    "name="
                )
            self.starting.add(name)
        try:
            yield
        finally:
            with self.lock:
                self.starting.discard(name)

    def add(self, grid: HyperCommGrid) -> None:
        """Registers a live grid under its name."""
        self.grids[grid.name] = grid
        self.tables[grid.name] = grid._groups

    def find(self, name: str) -> HyperCommGrid | None:
        """The live grid of this name; a destroyed one is forgotten."""
        grid = self.grids.get(name)
        if grid is None:
            return None
        if grid.is_alive:
            return grid
        grid.destroy()
        self.grids.pop(name, None)
        self.tables.pop(name, None)
        return None

    def ensure_world(
        self, backend: str | None, timeout: float | None, deadline: float, watched: bool = True
    ) -> bool:
        """Start torch.distributed unless it is up, once all ranks are there; whether it did."""
        if not self.world_lock.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
            raise PeerTimeoutError(
                "another thread of this process has been starting torch.distributed for as long as "
                "startup_timeout; the error that it raises says whom it waits for"
            )
        try:
            starts = not torch_world.is_initialized()
            if starts:
                self._start_world(backend, timeout, deadline, watched)
            return starts
        finally:
            self.world_lock.release()

    def _start_world(
        self, backend: str | None, timeout: float | None, deadline: float, watched: bool
    ) -> None:
        chosen = backend or torch_world.default_backend()
        torch_world.check_backend("backend", chosen)
        launch = Launch.from_environment(os.environ)
        if self.store is None or launch != self.launch:
            self.store = connect_store(launch, deadline - time.monotonic())
            self.launch = launch
        follow_timeout(self.store, timeout, chosen)
        self.place = StorePlace(server=0 if launch.rank_serves else None)
        # If a launcher's agent serves the store and ends, the launcher ends all ranks as well.
        others = range(1, launch.world_size) if launch.rank_serves else ()
        candidates = torch_standby.chosen(others)
        if launch.rank in candidates:
            self.place.own = torch_standby.serve((str(launch.address), launch.port))
        try:
            with Rendezvous(
                self.store,
                opens=True,
                line=Line(self.store, launch.world_size, reuse=False),  # WORLD meets once
                name="WORLD",
                rank=launch.rank,
                ranks=range(launch.world_size),
                document={
                    "world_size": launch.world_size,
                    "backend": chosen,
                    "versions": versions(),
                },
                deadline=deadline,
                phases=("ready",),
            ) as rendezvous:
                self.place.epoch, patience = rendezvous.incarnation, rendezvous.patience()
                torch_world.start_world(
                    launch, self.store, self.place.epoch, chosen, patience, watched
                )
                self.place.standbys = self._tell_standbys(rendezvous, launch.rank, candidates)
        except BaseException:
            with suppress(RuntimeError):
                torch_world.stop_world()
            raise
        self.started_world = True
        atexit.unregister(self.leave)  # once is enough, however often the world is started
        atexit.register(self.leave)

    def _tell_standbys(
        self, rendezvous: Rendezvous, rank: int, candidates: Sequence[int]
    ) -> list[tuple[int, str]]:
        """Run the last phase of a start: all ranks learn the standby stores' addresses."""
        own = self.place.own
        address = (own.address if own is not None else "").encode()
        found = rendezvous.meet(
            lambda said: {"standbys": [(who, said[who].decode()) for who in sorted(said)]},
            address if rank in candidates else None,
            candidates,
        )
        return [(who, where) for who, where in found["standbys"] if where]

    def move_store(self, store: Any, server: int | None) -> None:
        """Use another store for all groups and grids made from now on."""
        self.store = torch_standby.move_world(torch_world.world_store(), store)
        self.place.server = server

    def stop_unused_world(self, name: str) -> None:
        """Ends what a grid of this name has started and nothing else uses."""
        with self.world_lock:
            if not self.grids and self.starting <= {name}:
                self.stop_world()

    def stop_world(self) -> None:
        """Ends the torch.distributed that commgrid started."""
        if self.started_world:
            self.started_world = False
            remote.stop()
            torch_world.stop_world()
            self.made.clear()

    def leave(self) -> None:
        """At exit: ends everything."""
        end_all()
        error = getattr(sys, "last_exc", getattr(sys, "last_value", None))
        if torch_world.is_initialized():
            for grid in live_grids():
                for tell in self.at_exit:
                    tell(grid, error)
        end(failed=error is not None, at_exit=True)
        self.leave_store()

    def leave_store(self) -> None:
        """Leave the store, once: the rank that serves it waits for the others a little, since they
        may still read and delete keys."""
        launch, place = self.launch, self.place
        if launch is None or launch.world_size == 1 or place.server is None or place.left:
            return
        place.left = True
        driver = StoreDriver(self.store, launch.world_size)
        world, serves = range(launch.world_size), place.server == launch.rank
        until = time.monotonic() + timeouts().exit
        with suppress(StoreLostError):  # the store has gone first
            driver.run(leave(left_at(place.epoch), launch.rank, world, place.gone, serves, until))
        driver.close()


_registry = Registry()


def get_grid(name: str | None = None) -> HyperCommGrid:
    """The grid registered under a name; None: the default one, which is "default" or `use_grid`'s.

    Raises:
        GridNotInitializedError: there is none, or none any more.
    """
    name = name or _registry.default
    grid = _registry.find(name)
    if grid is None:
        others = ", ".join(repr(other) for other in _registry.grids)
        raise GridNotInitializedError(
            f"there is no grid {name!r}; call commgrid.initialize() first"
            + (f" (alive: {others})" if others else "")
        )
    return grid


@contextmanager
def use_grid(grid: HyperCommGrid | str) -> Iterator[HyperCommGrid]:
    """Within it a grid is the default one: names that are given without a grid mean its groups.

    For programs with several grids. Layers, reducers and pipelines that are made within it belong
    to the grid, and stay with it afterwards. It holds for all threads, since backward runs on
    others.

    Args:
        grid: a registered one, or its name.

    Raises:
        GridNotInitializedError: it was destroyed, or made without `initialize`.

    Example:
        >>> import commgrid
        >>> grid = commgrid.initialize(name="docs")
        >>> with commgrid.use_grid("docs"):
        ...     commgrid.get_ranks("dp_cp")
        (0,)
        >>> commgrid.shutdown()
    """
    name = grid if isinstance(grid, str) else grid.name
    found = get_grid(name)
    if not isinstance(grid, str) and found is not grid:
        raise GridNotInitializedError(
            f"use_grid: the grid {name!r} that was given is not the one of that name in the "
            "registry; give a grid of commgrid.initialize"
        )
    before, _registry.default = _registry.default, name
    try:
        yield found
    finally:
        _registry.default = before


def store_server() -> int | None:
    """The rank whose process serves the store; None: a launcher, or it is not known."""
    return _registry.place.server


def live_grids() -> tuple[HyperCommGrid, ...]:
    """Every registered grid that is alive, in the order in which they were made."""
    found = (_registry.find(name) for name in list(_registry.grids))
    return tuple(grid for grid in found if grid is not None)


def is_initialized(name: str | None = None) -> bool:
    """Whether a grid of this name is alive; None: the default one."""
    return _registry.find(name or _registry.default) is not None


def get_group(name: str, grid: str | None = None) -> ProcessGroup:
    """The communicator of a group, by name, from the registry: one dictionary access after another.

    Args:
        name: a group name, axes in any order: `"tp"`, `"dp_cp"`.
        grid: the grid's name; None: the default one.

    Raises:
        GridNotInitializedError: there is no such grid.
        UnknownGroupError, NotInGroupError: see `HyperCommGrid.get_group`.
    """
    try:
        return _registry_tables[grid or _registry.default][name]
    except KeyError:
        pass  # so that what is raised below does not begin with a KeyError
    return get_grid(grid).get_group(name)


_registry_tables = _registry.tables


def get_ranks(*names: str, grid: str | None = None) -> tuple[int, ...]:
    """The global ranks of this rank's group in a registered grid: `HyperCommGrid.get_ranks`."""
    return get_grid(grid).get_ranks(*names)


def get_local_rank(*names: str, grid: str | None = None) -> int:
    """This rank's position in a group of a registered grid: `HyperCommGrid.get_local_rank`."""
    return get_grid(grid).get_local_rank(*names)


def size(*names: str, grid: str | None = None) -> int:
    """The number of ranks in a group of a registered grid: `HyperCommGrid.size`."""
    return get_grid(grid).size(*names)


def destroy(name: str | None = None) -> None:
    """Destroys one grid, or all; torch.distributed stays up. Destroying nothing is fine."""
    for grid in _taken(list(_registry.grids) if name is None else [name]):
        grid.destroy()


def _taken(names: Sequence[str]) -> Iterator[HyperCommGrid]:
    """Take grids out of the registry, each before it is yielded."""
    for name in names:
        grid = _registry.grids.pop(name, None)
        _registry.tables.pop(name, None)
        if grid is not None:
            yield grid


def shutdown() -> None:
    """Destroys all grids, and ends torch.distributed where commgrid started it; runs at exit.

    The states of `checkpoint.keep` are dropped too: the next training is another job. The rank that
    serves the store waits until the others have shut down, `Timeouts.exit` at most.
    """
    started = _registry.started_world
    end(failed=False)
    if started:
        _registry.leave_store()
    use_timeouts(None)
    for each in _registry.at_shutdown:
        each()


def _tell_over(grid: HyperCommGrid) -> None:
    """Tell ranks that wait for a place that the job is over.

    Once this process has ended, WORLD's store may be gone before they have read it there, and they
    look in their own standby stores.
    """
    _tell_over_at(torch_world.world_store())
    waiting = grid.rebuilt.spares if grid.rebuilt is not None else ()
    place = _registry.place
    for address in (address for rank, address in place.standbys if rank in waiting):
        store, _ = torch_standby.connect(address, place.own)
        if store is not None:
            _tell_over_at(torch_standby.world_in(store))


def _tell_over_at(store: Any) -> None:
    driver = StoreDriver(store, 1)
    with suppress(StoreLostError):  # the store is gone, and with it who waits there
        driver.run(Membership(-1, ()).tell_over())
    driver.close()


def end(failed: bool, at_exit: bool = False) -> None:
    """Shut down; ranks that wait in `rebuild` learn of it, unless this process failed.

    Args:
        failed: whether an error ends this process.
        at_exit: whether the process ends, with or without an error.
    """
    if not failed and torch_world.is_initialized():
        for grid in live_grids():
            covers_all = len(grid.spec.grid_ranks) == torch_world.world_size()
            if not covers_all and grid.rank == grid.spec.grid_ranks[0]:
                _tell_over(grid)
    try:
        for grid in _taken(list(_registry.grids)):
            grid._destroy(at_exit)
    finally:
        _registry.stop_world()
        recorder.rest()
        put_back()
