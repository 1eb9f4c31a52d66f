"""The process's named grids: the one piece of module state there is."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commgrid.errors import (
    GridExistsError,
    GridNotInitializedError,
    SpecError,
)
from commgrid.planning.names import nearest
from commgrid.planning.plan import GroupPlan
from commgrid.planning.ranks import as_ranks
from commgrid.planning.spec import DEFAULT_ORDER, DEFAULT_SHARE, GridSpec
from commgrid.runtime import torch_groups, torch_world
from commgrid.runtime.agreement import Meeting
from commgrid.runtime.grid import HyperCommGrid, Seconds, as_seconds
from commgrid.runtime.launch import Launch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LAST_RANK_SECONDS = 5.0


class Registry:
    """Grids by name, and the torch.distributed that commgrid started for them, if it did."""

    def __init__(self) -> None:
        self.grids: dict[str, HyperCommGrid] = {}
        # Grid name to its table of groups: what get_group reads.
        self.tables: dict[str, dict[str, ProcessGroup]] = {}
        self.launch: Launch | None = None
        # Kept until the process ends: a launcher's store cannot be served a second time.
        self.store: Any = None
        self.started_world = False

    def add(self, grid: HyperCommGrid) -> None:
        """Registers a live grid under its name."""
        self.grids[grid.name] = grid
        self.tables[grid.name] = grid._groups

    def find(self, name: str) -> HyperCommGrid | None:
        """The live grid of this name; forgets one that was destroyed behind our back."""
        grid = self.grids.get(name)
        if grid is None:
            return None
        if not grid.is_destroyed and all(
            torch_groups.is_alive(c.group) for c in grid.communicators[:1]
        ):
            return grid
        grid.destroy()
        self.grids.pop(name, None)
        self.tables.pop(name, None)
        return None

    def start_world(self, backend: str | None, timeout: float | None, deadline: float) -> None:
        """Starts torch.distributed from the launcher's variables, once all ranks are there."""
        chosen = backend or torch_world.default_backend()
        torch_world.check_backend("backend", chosen)
        launch = Launch.from_environment(os.environ)
        if self.store is None or launch != self.launch:
            self.store = torch_world.connect_store(launch, deadline - time.monotonic())
            self.launch = launch
        torch_world.follow_timeout(self.store, timeout, chosen)
        meeting = Meeting(
            self.store,
            name="WORLD",
            rank=launch.rank,
            ranks=range(launch.world_size),
            document={"world_size": launch.world_size, "backend": chosen},
            deadline=deadline,
        )
        try:
            torch_world.start_world(
                launch, self.store, meeting.incarnation, chosen, meeting.patience()
            )
            meeting.meet("created")
        except BaseException as error:
            cause = meeting.give_up("created", error)
            with suppress(RuntimeError):
                torch_world.stop_world()
            if cause is not error:
                raise cause from error
            raise
        self.started_world = True
        atexit.unregister(self.leave)  # once is enough, however often the world is started
        atexit.register(self.leave)

    def stop_world(self) -> None:
        """Ends the torch.distributed that commgrid started."""
        if self.started_world:
            self.started_world = False
            torch_world.stop_world()

    def leave(self) -> None:
        """At exit: ends everything; the rank that serves the store waits for the others a little,
        since they may still be reading from it."""
        shutdown()
        launch, store = self.launch, self.store
        if launch is None or launch.world_size == 1:
            return
        try:
            left = store.add("left", 1)
            until = time.monotonic() + _LAST_RANK_SECONDS
            while launch.hosts_store and left < launch.world_size and time.monotonic() < until:
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
    ranks: range | Sequence[int] | None = None,
    backend: str | None = None,
    timeout: Seconds | None = None,
    startup_timeout: Seconds = 600.0,
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
        ranks: the evenly spaced global ranks this grid covers; None: all of WORLD. Where
            commgrid starts torch.distributed, every rank of WORLD calls initialize, each for
            the grid it is in.
        backend: None takes WORLD's; where commgrid starts torch.distributed,
            `cpu:gloo,cuda:nccl`, or gloo without CUDA.
        timeout: of collectives, seconds or timedelta; None: torch's default.
        startup_timeout: how long this call may take, likewise; ten minutes, since the processes
            of a large job come minutes apart.
        config: a YAML path, dict or GridSpec, instead of everything from dp to groups.
        name: the name to register the grid under.
        **axes: sizes of further axes, named in `order`; `dp_replicate` and `dp_shard`
            stand in for dp.

    Returns:
        The grid, which `get_grid(name)` returns from now on.

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
    if _registry.find(name) is not None:
        raise GridExistsError(
            f"grid {name!r} is alive already; commgrid.destroy({name!r}) first, or give another "
            "name="
        )
    sizes = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp, **axes}
    rest = {"order": order, "create": create, "connect": connect, "share": share, "groups": groups}
    for axis in axes.keys() - {*str(order).split("-"), "dp_replicate", "dp_shard"}:
        raise SpecError(
            f"{axis}={axes[axis]!r}: neither an argument of initialize nor an axis of "
            f"order={order!r}{nearest(axis, _ARGUMENTS)}"
        )
    if config is None:
        spec = GridSpec.build(**{**sizes, **rest}, ranks=ranks)  # type: ignore[arg-type]
    else:
        spec = _from_config(config, {**sizes, **rest}, ranks)
    starts_world = not torch_world.is_initialized()
    if starts_world:
        # A spec that cannot fit is this rank's own error, before it meets anybody.
        launch = Launch.from_environment(os.environ)
        GroupPlan.for_rank(spec.resolve(launch.world_size), launch.rank)
        _registry.start_world(backend, limit, deadline)
    try:
        grid = HyperCommGrid(
            spec,
            name=name,
            backend=backend,
            timeout=timeout,
            startup_timeout=max(deadline - time.monotonic(), 0.01),
        )
    except BaseException:
        if starts_world:
            _registry.stop_world()
        raise
    _registry.add(grid)
    return grid


_DEFAULTS: dict[str, Any] = {
    "dp": -1, "tp": 1, "pp": 1, "cp": 1, "ep": 1, "etp": None, "order": DEFAULT_ORDER,
    "create": "all", "connect": "axes", "share": DEFAULT_SHARE, "groups": None,
}  # fmt: skip
_ARGUMENTS = (*_DEFAULTS, "dp_replicate", "dp_shard", "ranks", "backend", "timeout",
              "startup_timeout", "config", "name")  # fmt: skip


def _from_config(
    config: str | Path | Mapping[str, Any] | GridSpec,
    given: Mapping[str, Any],
    ranks: range | Sequence[int] | None,
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


def get_grid(name: str = "default") -> HyperCommGrid:
    """The grid registered under a name.

    Raises:
        GridNotInitializedError: there is none, or none any more.
    """
    grid = _registry.find(name)
    if grid is None:
        others = ", ".join(repr(other) for other in _registry.grids)
        raise GridNotInitializedError(
            f"there is no grid {name!r}; call commgrid.initialize() first"
            + (f" (alive: {others})" if others else "")
        )
    return grid


def live_grids() -> tuple[HyperCommGrid, ...]:
    """Every registered grid that is alive, in the order in which they were made."""
    found = (_registry.find(name) for name in list(_registry.grids))
    return tuple(grid for grid in found if grid is not None)


def is_initialized(name: str = "default") -> bool:
    """Whether a grid of this name is alive."""
    return _registry.find(name) is not None


def get_group(name: str, grid: str = "default") -> ProcessGroup:
    """The communicator of a group, by name, from the registry: one dictionary access after another.

    Args:
        name: a group name, axes in any order: `"tp"`, `"dp_cp"`.
        grid: the grid's name.

    Raises:
        GridNotInitializedError: there is no such grid.
        UnknownGroupError, NotInGroupError: see `HyperCommGrid.get_group`.
    """
    try:
        return _registry_tables[grid][name]
    except KeyError:
        pass  # so that what is raised below does not begin with a KeyError
    return get_grid(grid).get_group(name)


_registry_tables = _registry.tables


def destroy(name: str | None = None) -> None:
    """Destroys one grid, or all; torch.distributed stays up. Destroying nothing is fine."""
    for each in list(_registry.grids) if name is None else [name]:
        grid = _registry.grids.pop(each, None)
        _registry.tables.pop(each, None)
        if grid is not None:
            grid.destroy()


def shutdown() -> None:
    """Destroys all grids, and ends torch.distributed where commgrid started it; runs at exit."""
    try:
        destroy()
    finally:
        _registry.stop_world()
