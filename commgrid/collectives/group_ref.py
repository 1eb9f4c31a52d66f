"""GroupRef: a reference to a group by name, so that layers copy, pickle and outlive a grid."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from commgrid.errors import CommGridError, GridNotInitializedError, ShapeError
from commgrid.layout.rank_text import describe_ranks
from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.registry import get_grid, is_initialized


class GroupRef:
    """The communicator of a name, looked up once, and again after its grid was destroyed.

    Args:
        group: a group name, or a bare ProcessGroup.
        grid: the grid to look in; None: the registry's default grid.
        owner: prefix of error messages, such as `ColumnParallelLinear(64, 256)`.

    Raises:
        UnknownGroupError, NotInGroupError, GridNotInitializedError: the look-up failed.
    """

    def __init__(
        self, group: str | ProcessGroup, grid: HyperCommGrid | None = None, owner: str = ""
    ) -> None:
        self.owner = owner
        self._bare: ProcessGroup | None = None
        self._registered = False
        self._table: dict[str, ProcessGroup] = {}
        if isinstance(group, str):
            grid = grid or get_grid()
            self.name, self.grid_name = group, grid.name
            self._registered = is_initialized(grid.name) and get_grid(grid.name) is grid
            grid.get_group(group)  # raises here rather than at first use
            self._table = grid._groups
        else:
            self.name, self.grid_name = group.group_desc, ""
            self._bare = group
        self.size = self.group.size()
        self._ranks = dist.get_process_group_ranks(self.group)
        self._rank = self.group.rank()

    @property
    def group(self) -> ProcessGroup:
        """The live communicator.

        Raises:
            GridNotInitializedError: the grid was destroyed, and no other has its name.
            ShapeError: a new grid of its name has this group in another size or order.
        """
        found = self._bare or self._table.get(self.name)
        return found if found is not None else self._find_again()

    def _find_again(self) -> ProcessGroup:
        who = f"{self.owner}: " if self.owner else ""
        try:
            if not self._registered:
                raise GridNotInitializedError(
                    "the grid was destroyed and never registered; "
                    "give the layer a living one, as grid="
                )
            grid = get_grid(self.grid_name)
            found = grid.get_group(self.name)
        except GridNotInitializedError as error:
            raise GridNotInitializedError(
                f"{who}its group {self.name!r} is gone with grid {self.grid_name!r}; {error}"
            ) from error
        if found.size() != self.size:
            raise ShapeError(
                f"{who}made for group {self.name!r} of {self.size} ranks, but grid "
                f"{self.grid_name!r} now has it with {found.size()}; build the layer again"
            )
        ranks = dist.get_process_group_ranks(found)
        place = {rank: i for i, rank in enumerate(ranks)}
        moved = [r for i, r in enumerate(self._ranks) if place.get(r, i) != i]
        if moved or found.rank() != self._rank:
            raise ShapeError(
                f"{who}made at place {self._rank} of group {self.name!r} of ranks {self._ranks}, "
                f"but grid {self.grid_name!r} now has this rank at place {found.rank()} of ranks "
                f"{ranks}, where it would take its slice for another; build the layer again, or "
                "keep the order of the ranks"
            )
        self._table = grid._groups
        return found

    @property
    def rank(self) -> int:
        """This process's position in the group."""
        return self.group.rank()

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupRef:
        copied = object.__new__(GroupRef)
        copied.__dict__.update(self.__dict__)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        if self._bare is not None:
            raise CommGridError(
                f"{self.owner or 'this layer'} was given a bare ProcessGroup ({self.name}), which "
                "cannot be pickled; give it the group's name instead"
            )
        if not self._registered:
            raise CommGridError(
                f"{self.owner or 'this layer'} belongs to a grid {self.grid_name!r} that is not in "
                "the registry, where it would look for its group again; use commgrid.initialize"
            )
        return {**self.__dict__, "_table": {}}

    def __repr__(self) -> str:
        return f"{self.name!r} ({self.size} ranks)"


def name_of(group: ProcessGroup) -> str:
    """The first of a communicator's names in its grid."""
    return group.group_desc.partition(",")[0]


def described(group: ProcessGroup) -> str:
    """Name and ranks of a communicator, for messages: `group 'tp' (ranks 0-3)`."""
    ranks = describe_ranks(dist.get_process_group_ranks(group))
    return f"group {name_of(group)!r} ({ranks})"
