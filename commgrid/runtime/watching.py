"""Watches of grids, and of groups between two grids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed import ProcessGroup

from commgrid.errors import SpecError
from commgrid.planning.spec import GridSpec
from commgrid.runtime.watch import Watch
from commgrid.torch_compat import failed_groups
from commgrid.torch_compat import groups as torch_groups
from commgrid.torch_compat import nccl as torch_nccl
from commgrid.torch_compat import world as torch_world

if TYPE_CHECKING:
    from commgrid.runtime.communicator import Communicator
    from commgrid.runtime.grid import HyperCommGrid


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
    kinds = {
        k for d in spec.definitions.values() for k in torch_groups.nccl_kinds(backend, d.options)
    }
    fatal = torch_nccl.ending_at_abort(kinds)
    if asked and fatal:
        raise SpecError(
            f"watch=True: {fatal[0]} of torch {torch.__version__} ends the process when a "
            "communicator is aborted (pytorch#192105); use nccl, or torch 2.15, or watch=False"
        )
    return asked if asked is not None else bool(kinds) and not fatal


def prepare(grid: HyperCommGrid, wake: Callable[[str, bool], object]) -> Watch:
    """Make the watch of a grid that has no communicators yet.

    Args:
        wake: see `Watch`.
    """
    return Watch(
        torch_world.world_store(),
        f"commgrid/watch/{grid.name}@{min(grid.spec.grid_ranks)}",
        grid.rank,
        grid.spec.grid_ranks,
        timeout=torch_world.group_timeout(grid.timeout),
        address=torch_world.own_address(),
        wake=wake,
    )


def begin(watch: Watch, grid: HyperCommGrid) -> None:
    """Watch the collectives of a grid that has its communicators."""
    watch.begin([_Watched(each) for each in grid.communicators if len(each.ranks) > 1])


def between(
    key: str,
    what: str,
    rank: int,
    ranks: Sequence[int],
    group: ProcessGroup,
    *,
    timeout: float,
    grids: Iterable[HyperCommGrid],
    unconnected: set[ProcessGroup] | None = None,
    told: Callable[[str, bool], object] = lambda text, late: None,
) -> Watch:
    """Make the watch of a group whose ranks are of two grids; it follows their watches.

    It publishes its address. The caller connects it, with its key for a secret, and begins it.

    Args:
        key: unlike all others at the store.
        what: the group, for messages.
        rank: this one.
        ranks: the group's, in its order.
        timeout: seconds a collective may take.
        grids: of this rank; some may be watched.
        unconnected: contains the group while some pairs of its ranks may not be connected.
        told: called before the group's connections are broken, with the failure, and whether it is
            a rank that does not answer.
    """

    def wake(why: str, late: bool) -> None:
        told(why, late)
        failed_groups.wake([group], unconnected or (), watched=True)

    try:
        made = Watch(
            torch_world.world_store(),
            key,
            rank,
            tuple(ranks),
            timeout=timeout,
            address=torch_world.own_address(),
            communicators=[_WatchedGroup(what, tuple(ranks), group)],
            wake=wake,
        )
        made.tell_address()
    except BaseException:
        failed_groups.abort_all([group], unconnected, tell=False)
        raise
    for grid in grids:
        if grid.watch is not None:
            made.follow(grid.watch)
    return made


@dataclass(frozen=True)
class _WatchedGroup:
    """A group as a `Watch` sees it."""

    name: str
    ranks: Sequence[int]
    group: ProcessGroup

    def error(self) -> str:
        return torch_groups.error_of(self.group)

    def calls(self) -> int:
        return torch_groups.calls_of(self.group)


@dataclass(frozen=True)
class _Watched:
    """A communicator as a `Watch` sees it; its group changes where it is suspended."""

    communicator: Communicator

    @property
    def name(self) -> str:
        return self.communicator.names[0]

    @property
    def ranks(self) -> Sequence[int]:
        return self.communicator.ranks

    def error(self) -> str:
        return torch_groups.error_of(self.communicator.group)

    def calls(self) -> int:
        return torch_groups.calls_of(self.communicator.group)
