"""The process's named grids: the one piece of module state there is."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from commgrid.errors import (
    GridExistsError,
    GridNotInitializedError,
    NotInGridError,
    PeerTimeoutError,
    SpecError,
)
from commgrid.planning.audited import spec_over
from commgrid.planning.constraints import BY_RANK
from commgrid.planning.names import nearest
from commgrid.planning.plan import GroupPlan
from commgrid.planning.ranks import as_ranks
from commgrid.planning.spec import DEFAULT_ORDER, DEFAULT_SHARE, GridSpec
from commgrid.runtime import inquiry, recorder, torch_standby, torch_world
from commgrid.runtime import order as order_check
from commgrid.runtime.agreement import Meeting
from commgrid.runtime.alike import said_once
from commgrid.runtime.audited import audit_sizes, audited_grid
from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.launch import Launch
from commgrid.runtime.patient import PatientStore
from commgrid.runtime.roll import Line
from commgrid.runtime.roll_call import tell_over
from commgrid.runtime.seconds import Seconds, as_seconds
from commgrid.runtime.torch_world import versions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LAST_RANK_SECONDS = 5.0


@dataclass(frozen=True)
class Made:
    """How a grid of this rank was made, for `rebuild` to make another of its kind.

    Args:
        given: as the user gave it, its -1 not filled.
        full: the sizes of the first of its kind.
        last: the resolved one that this rank was in last.
        identity: of that one.
        backend, timeout, trace, watch: as they were given.
    """

    given: GridSpec
    full: dict[str, int]
    last: GridSpec
    identity: str
    backend: str | None
    timeout: float | None
    trace: bool = False
    watch: bool | None = None


@dataclass
class StorePlace:
    """Which store ranks meet at, and which they would go to without it.

    Args:
        server: the rank that serves the store; None: the launcher, or whoever started torch.
        standbys: ranks that serve further stores, and where.
        own: what this process serves.
        gone: ranks that were not there when a grid was rebuilt.
    """

    server: int | None = None
    standbys: list[tuple[int, str]] = field(default_factory=list)
    own: torch_standby.Standby | None = None
    gone: frozenset[int] = frozenset()


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
        """The live grid of this name; forgets one that was destroyed behind our back."""
        grid = self.grids.get(name)
        if grid is None:
            return None
        if grid.is_alive:
            return grid
        grid.destroy()
        self.grids.pop(name, None)
        self.tables.pop(name, None)
        return None

    def ensure_world(self, backend: str | None, timeout: float | None, deadline: float) -> bool:
        """Starts torch.distributed unless it is up, once all ranks are there; whether it did."""
        if not self.world_lock.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
            raise PeerTimeoutError(
                "another thread of this process has been starting torch.distributed for as long as "
                "startup_timeout; the error that it raises says whom it waits for"
            )
        try:
            starts = not torch_world.is_initialized()
            if starts:
                self._start_world(backend, timeout, deadline)
            return starts
        finally:
            self.world_lock.release()

    def _start_world(self, backend: str | None, timeout: float | None, deadline: float) -> None:
        chosen = backend or torch_world.default_backend()
        torch_world.check_backend("backend", chosen)
        launch = Launch.from_environment(os.environ)
        if self.store is None or launch != self.launch:
            self.store = torch_world.connect_store(launch, deadline - time.monotonic())
            self.launch = launch
        torch_world.follow_timeout(self.store, timeout, chosen)
        others = [r for r in range(launch.world_size) if not launch.is_served_by(r)]
        candidates = torch_standby.chosen(others if launch.address else [])
        self.place = StorePlace(server=0 if launch.is_served_by(0) else None)
        if launch.rank in candidates:
            self.place.own = torch_standby.serve((str(launch.address), launch.port))
        try:
            with Meeting(
                self.store,
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
            ) as meeting:
                patience = meeting.patience()
                torch_world.start_world(launch, self.store, meeting.incarnation, chosen, patience)
                self.place.standbys = self._tell_standbys(meeting, launch.rank, candidates)
        except BaseException:
            with suppress(RuntimeError):
                torch_world.stop_world()
            raise
        self.started_world = True
        atexit.unregister(self.leave)  # once is enough, however often the world is started
        atexit.register(self.leave)

    def _tell_standbys(
        self, meeting: Meeting, rank: int, candidates: Sequence[int]
    ) -> list[tuple[int, str]]:
        """Meets for the last phase, in which all hear of the standby stores: a call of the store
        for each of those who serve one, and a few for the last rank to come."""
        keys = [f"standby/{meeting.incarnation}/{each}" for each in candidates]
        if rank in candidates:
            own = self.place.own
            self.store.set(keys[candidates.index(rank)], own.address if own else "")

        def tell() -> dict[str, list[str]]:
            if not keys:
                return {}
            found = [text.decode() for text in self.store.multi_get(keys)]
            for key in keys:
                self.store.delete_key(key)
            return {"standbys": found}

        found = meeting.meet(tell).get("standbys", ())
        return [(who, where) for who, where in zip(candidates, found, strict=False) if where]

    def move_store(self, store: Any, server: int | None) -> None:
        """Has all that is made from now on meet at another store."""
        self.store = torch_standby.move_world(store)
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
            inquiry.stop()
            torch_world.stop_world()
            self.made.clear()

    def leave(self) -> None:
        """At exit: ends everything; the rank that serves the store waits for the others a little,
        since they may still be reading from it."""
        failed = getattr(sys, "last_exc", getattr(sys, "last_value", None)) is not None
        end(failed)
        launch, store, place = self.launch, self.store, self.place
        if launch is None or launch.world_size == 1:
            return
        serves = place.server == launch.rank
        expected = launch.world_size - len(place.gone)
        try:
            store = PatientStore(store, lambda: _LAST_RANK_SECONDS)
            left = store.add("left", 1)
            until = time.monotonic() + _LAST_RANK_SECONDS
            while serves and left < expected and time.monotonic() < until:
                time.sleep(0.02)
                left = store.add("left", 0)
        except RuntimeError:
            pass  # the store has gone first


_registry = Registry()


def initialize(
    *,
    dp: int = -1,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    order: str = DEFAULT_ORDER,
    create: str | Sequence[str] = "all",
    connect: str | Sequence[str] = "axes",
    share: str = DEFAULT_SHARE,
    groups: Mapping[str, Any] | None = None,
    ranks: range | Sequence[int] | str | None = None,
    within: Mapping[str, str] | None = None,
    place: str = BY_RANK,
    backend: str | None = None,
    timeout: Seconds | None = None,
    startup_timeout: Seconds = 600.0,
    trace: bool = False,
    watch: bool | None = None,
    verify: str | None = None,
    preset: str | None = None,
    config: str | Path | Mapping[str, Any] | GridSpec | None = None,
    name: str = "default",
    **axes: int,
) -> HyperCommGrid:
    """Creates a grid on all its ranks and registers it; starts torch.distributed if nobody has.

    Every rank of the grid calls it with the same arguments; it returns when all of them
    have all their communicators.

    Args:
        dp, tp, pp, cp: sizes of the dense axes; one -1 is filled from the number of ranks.
        ep, etp: expert and expert tensor parallel sizes; they make the expert region.
        order: axes fastest-varying first, as Megatron spells it.
        create: `"all"` combinations of axes, or a list of names.
        connect: which communicators connect now: `"axes"` (single axes and the groups
            table), `"all"`, `"none"` or a list of names; the rest do at first use.
        share: which names of equal rank sets are one communicator: `"aliases"` (those that say
            they are the same, and groups of one rank), `"region"` (also those that differ by axes
            of size 1) or `"all"`. The last two save memory, and all members then issue
            collectives on names that share in one order, asynchronous ones too.
        groups: the groups table, as in YAML.
        ranks: the global ranks this grid covers, in any order: the place in the list is the
            place in the grid. None: all of WORLD. Where commgrid starts torch.distributed, every
            rank of WORLD calls initialize or `join`.
        within: groups that may not leave a host, as `{"tp": "node"}`; where the hosts of the ranks
            break it, it is an error on all of them.
        place: `"by_host"` gives the ranks of one host neighbouring places in the grid, whatever
            their numbers, and says so where that changes anything.
        backend: None takes WORLD's; where commgrid starts torch.distributed, `nccl` with CUDA,
            else `gloo`. The current CUDA device becomes that of LOCAL_RANK or SLURM_LOCALID, unless
            one other than 0 is current.
        timeout: of collectives, seconds or timedelta; None: torch's default.
        startup_timeout: how long this call may take, likewise; ten minutes, since the processes
            of a large job come minutes apart.
        trace: whether this process records its collectives, for `commgrid.trace`; it also does
            where COMMGRID_TRACE is set in the environment.
        watch: whether a thread of each rank, linked with some others', sees that ranks are gone,
            stopped or late, tells all, and ends what waits for them. None: where something runs on
            NCCL, which leaves its errors to it then; gloo tells of most failures by itself.
        verify: `"order"` on all ranks compares what the members of each communicator issue, call by
            call, and raises GridMismatchError at the first difference, with both lines.
        preset: a grid that others use, by name, as `commgrid presets` lists them; what is given of
            dp to place, other than by its default, is laid over it.
        config: a YAML path, dict or GridSpec, instead of all from dp to place but ranks.
        name: the name to register the grid under.
        **axes: sizes of further axes, named in `order`; `dp_replicate` and `dp_shard`
            stand in for dp.

    Returns:
        The grid, which `get_grid(name)` returns from now on. Where commgrid has started
        torch.distributed, None on a rank that `ranks` leaves out.

    Raises:
        GridExistsError: a grid of this name is alive.
        SpecError, NotInGridError, GridMismatchError, PeerTimeoutError, PeerFailedError:
            see `HyperCommGrid`.

    Example:
        >>> grid = initialize(name="docs")     # in a bare process: a world of one
        >>> grid.get_ranks("dp_cp")
        (0,)
        >>> shutdown()
    """
    deadline = time.monotonic() + as_seconds("startup_timeout", startup_timeout)
    limit = None if timeout is None else as_seconds("timeout", timeout)
    order_check.check_argument(verify)
    sizes = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp, **axes}
    rest = {"order": order, "create": create, "connect": connect, "share": share, "groups": groups,
            "within": within, "place": place}  # fmt: skip
    known = {*str(order).split("-"), "dp_replicate", "dp_shard"}
    for axis in axes.keys() - known if preset is None else ():
        raise SpecError(
            f"{axis}={axes[axis]!r}: neither an argument of initialize nor an axis of "
            f"order={order!r}{nearest(axis, _ARGUMENTS)}"
        )
    with said_once():
        audited = audited_grid() if name == "default" else None
        if preset is not None:
            spec = _from_preset(preset, config, sizes, rest, ranks)
        elif config is None:
            sizes = sizes if audited is None else _audited(sizes)
            spec = GridSpec.build(**{**sizes, **rest}, ranks=ranks)  # type: ignore[arg-type]
        else:
            spec = _from_config(config, {**sizes, **rest}, ranks)
        if audited is not None and (preset is not None or config is not None):
            spec = spec_over(audited, spec)
    with _registry.reserved(name):
        if not torch_world.is_initialized():
            with said_once():
                _check_fit(spec)
        started = _registry.ensure_world(backend, limit, deadline)
        try:
            left = deadline - time.monotonic()
            grid = HyperCommGrid(
                spec, name=name, backend=backend, timeout=timeout, startup_timeout=max(left, 1e-3),
                watch=watch,
            )  # fmt: skip
        except NotInGridError as error:
            if _registry.started_world:
                # A rank without a part in the grid; its None is not in the annotation, which is
                # for the many who give no ranks.
                return cast("HyperCommGrid", None)
            error.args = (
                f"{error}; a program that starts torch.distributed itself calls initialize on the "
                "grid's ranks alone: initialize(…) if rank in ranks else None",
            )
            raise
        except BaseException:
            if started:
                _registry.stop_unused_world(name)
            raise
        _registry.add(grid)
        _registry.made[name] = Made(
            spec, dict(grid.shape), grid.spec, grid.identity, backend, limit, trace, watch
        )
        recorder.follow(trace, grid.rank, grid.members_of_communicators())
        inquiry.follow()
        order_check.follow(verify, grid)
    return grid


def _audited(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """An audit's sizes in place of a program's; dp's two parts make up its dp."""
    found = audit_sizes(**sizes)
    if "dp_shard" in sizes or "dp_replicate" in sizes:
        found.update(dp=-1, dp_shard=-1, dp_replicate=sizes.get("dp_replicate", 1))
    return found


def _check_fit(spec: GridSpec) -> None:
    """A spec that cannot fit is this rank's own error, before it meets anybody."""
    launch = Launch.from_environment(os.environ)
    try:
        GroupPlan.for_rank(spec.resolve(launch.world_size), launch.rank)
    except NotInGridError:
        pass  # a spare rank; or one process stands for the whole job by mistake
    except SpecError as error:
        if launch.address is not None:
            raise
        raise SpecError(
            f"{error}; no launcher has started this process, so it is a world of one; run it under "
            "torchrun --nproc-per-node N, or srun"
        ) from error


def join(
    *, backend: str | None = None, timeout: Seconds | None = None, startup_timeout: Seconds = 600.0
) -> None:
    """Takes part in starting torch.distributed without being in a grid, as a spare rank does.

    Every rank of WORLD calls this or `initialize`; it returns when all of them have. Later calls,
    and those where torch.distributed is up, do nothing.

    Args:
        backend: of WORLD, as the other ranks give it.
        timeout: of collectives on WORLD, seconds or timedelta; None: torch's default.
        startup_timeout: how long this call may take, likewise.

    Raises:
        GridMismatchError, PeerTimeoutError, PeerFailedError: as in `initialize`.

    Example:
        >>> join()    # in a bare process: a world of one
        >>> shutdown()
    """
    deadline = time.monotonic() + as_seconds("startup_timeout", startup_timeout)
    limit = None if timeout is None else as_seconds("timeout", timeout)
    _registry.ensure_world(backend, limit, deadline)


_DEFAULTS: dict[str, Any] = {
    "dp": -1, "tp": 1, "pp": 1, "cp": 1, "ep": 1, "etp": None, "order": DEFAULT_ORDER,
    "create": "all", "connect": "axes", "share": DEFAULT_SHARE, "groups": None,
    "within": None, "place": BY_RANK,
}  # fmt: skip
_ARGUMENTS = (*_DEFAULTS, "dp_replicate", "dp_shard", "ranks", "backend", "timeout",
              "startup_timeout", "trace", "watch", "verify", "preset", "config",
              "name")  # fmt: skip


def _from_preset(
    preset: str,
    config: object,
    sizes: Mapping[str, Any],
    rest: Mapping[str, Any],
    ranks: range | Sequence[int] | str | None,
) -> GridSpec:
    """The preset's spec, with what differs from the defaults laid over it."""
    if config is not None:
        raise SpecError(f"preset={preset!r} beside config=: give one of them")
    given, changes = (
        {k: v for k, v in part.items() if k not in _DEFAULTS or v != _DEFAULTS[k]}
        for part in (sizes, rest)
    )
    rows = changes.pop("groups", None) or {}
    changes.update({f"groups.{name}": row for name, row in rows.items()})
    return GridSpec.from_preset(preset, ranks=ranks, changes=changes, **given)


def started_ranks() -> int:
    """How many ranks there are, or a launcher has started: 1 where nobody has."""
    if torch_world.is_initialized():
        return torch_world.world_size()
    return Launch.from_environment(os.environ).world_size


def _from_config(
    config: str | Path | Mapping[str, Any] | GridSpec,
    given: Mapping[str, Any],
    ranks: range | Sequence[int] | str | None,
) -> GridSpec:
    """The config's spec; anything else that describes a grid beside it is an error."""
    beside = [k for k, v in given.items() if k not in _DEFAULTS or v != _DEFAULTS[k]]
    if beside:
        raise SpecError(
            f"{', '.join(f'{key}={given[key]!r}' for key in beside)} beside config=: the config "
            "describes the whole grid; put these into it, or leave config out"
        )
    spec = GridSpec.from_config(config)
    return spec if ranks is None else replace(spec, ranks=as_ranks(ranks))


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
        >>> grid = initialize(name="docs")
        >>> with use_grid("docs"):
        ...     get_ranks("dp_cp")
        (0,)
        >>> shutdown()
    """
    name = grid if isinstance(grid, str) else grid.name
    found = get_grid(name)
    if not isinstance(grid, str) and found is not grid:
        raise GridNotInitializedError(
            f"use_grid: the grid {name!r} that was given is not the one of that name in the "
            "registry; give one that commgrid.initialize has made"
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
    for each in list(_registry.grids) if name is None else [name]:
        grid = _registry.grids.pop(each, None)
        _registry.tables.pop(each, None)
        if grid is not None:
            grid.destroy()


def shutdown() -> None:
    """Destroys all grids, and ends torch.distributed where commgrid started it; runs at exit."""
    end(failed=False)


def end(failed: bool) -> None:
    """Shuts down; who waits in `rebuild` for a place in a grid learns it, unless this one failed.

    Args:
        failed: whether an error ends this process.
    """
    if not failed and torch_world.is_initialized():
        for grid in live_grids():
            covers_all = len(grid.spec.grid_ranks) == torch_world.world_size()
            if not covers_all and grid.rank == grid.spec.grid_ranks[0]:
                tell_over(torch_world.world_store())
    try:
        destroy()
    finally:
        _registry.stop_world()
