"""Which grids are watched, and a grid's watch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from commgrid.planning.spec import GridSpec
from commgrid.runtime import torch_groups, torch_world
from commgrid.runtime.watch import Watch

if TYPE_CHECKING:
    from commgrid.runtime.communicator import Communicator
    from commgrid.runtime.grid import HyperCommGrid


def is_wanted(asked: bool | None, spec: GridSpec, backend: str | None) -> bool:
    """Whether a grid is watched: as it was asked for, else where one of its names runs on NCCL.

    The same on all ranks, whichever groups they have.

    Args:
        asked: what `initialize` was given.
        spec: a resolved one.
        backend: of its communicators, as `initialize` was given it.
    """
    if len(spec.grid_ranks) == 1 or torch_world.world_backend() == torch_world.FAKE:
        return False
    if asked is not None:
        return asked
    return any(torch_groups.runs_on_nccl(backend, d.options) for d in spec.definitions.values())


def begin(grid: HyperCommGrid) -> Watch:
    """The watch of a grid whose communicators are made; `connect` links it with the others."""
    return Watch(
        torch_world.world_store(),
        f"commgrid/watch/{grid.identity}",
        grid.rank,
        grid.spec.grid_ranks,
        timeout=torch_world.group_timeout(grid.timeout),
        address=torch_world.own_address(),
        communicators=[_Watched(each) for each in grid.communicators if len(each.ranks) > 1],
        wake=grid.wake,
    )


@dataclass(frozen=True)
class _Watched:
    """A communicator as a `Watch` sees it."""

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
