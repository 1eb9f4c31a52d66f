"""Watches of grids: whether one is wanted, and what it looks at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed import ProcessGroup

from commgrid.errors import SpecError
from commgrid.planning.spec import GridSpec
from commgrid.runtime.watch import Watch
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


@dataclass(frozen=True)
class WatchedGroup:
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
