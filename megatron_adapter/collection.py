"""A grid's groups as megatron-core's ProcessGroupCollection, and such a collection as a grid.

Code that takes `pg_collection=` needs no parallel state at all.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from commgrid.errors import NotInGroupError, UnknownGroupError
from commgrid.layout.axis_names import nearest
from commgrid.runtime.grid import HyperCommGrid
from megatron_adapter.errors import MegatronVersionError
from megatron_adapter.names import MEGATRON_GROUPS, hierarchical
from megatron_adapter.releases import SUPPORTED
from megatron_adapter.state import STORE

FIELDS = {group.field: group for group in MEGATRON_GROUPS if group.field is not None}
"""Each field of a ProcessGroupCollection, in one release or another, but `hcp`, which is a list of
groups."""


def process_group_collection(grid: HyperCommGrid, required: Iterable[str] | None = None) -> Any:
    """megatron-core's ProcessGroupCollection of a grid.

    Args:
        grid: alive; every rank of it calls this, for the first time together: what Megatron has
            and the grid has not (embedding groups, say) is created then.
        required: the fields to fill; None: every one.

    Returns:
        A `megatron.core.process_groups_config.ProcessGroupCollection`, whose groups live as long
        as the grid. Fields are None where
        Megatron's are: groups this rank is not in, levels or instances that were not asked for.

    Raises:
        MegatronVersionError: megatron-core is not installed, or has a field that is not known.
        UnknownGroupError: a required field that it does not have.
        SpecError: Megatron cannot express the grid.
    """
    try:
        module = importlib.import_module("megatron.core.process_groups_config")
    except ImportError as error:
        raise MegatronVersionError(
            f"megatron-core cannot be imported ({error}); install one of {', '.join(SUPPORTED)}"
        ) from error
    ProcessGroupCollection = module.ProcessGroupCollection
    known = {field.name for field in fields(ProcessGroupCollection)}
    strange = sorted(known - FIELDS.keys() - {"hcp"})
    if strange:
        raise MegatronVersionError(
            f"this megatron-core's ProcessGroupCollection has fields {', '.join(strange)}, which "
            f"the adapter does not know; use megatron-core {', '.join(SUPPORTED)}"
        )
    wanted = sorted(known) if required is None else list(required)
    for name in wanted:
        if name not in known:
            raise UnknownGroupError(
                f"ProcessGroupCollection has no field {name!r}, expected some of "
                f"{', '.join(sorted(known))}{nearest(name, known)}"
            )
    state = STORE.state_of(grid)
    state.handed_out = True
    variables = {"hcp": "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS"}
    variables |= {name: group.state for name, group in FIELDS.items()}
    return ProcessGroupCollection(**{name: state.values[variables[name]] for name in wanted})


class CollectionGrid:
    """The groups of a ProcessGroupCollection under commgrid's names, for code that takes a grid.

    It answers what a HyperCommGrid answers by name, and owns nothing.

    Args:
        collection: megatron-core's, or any object with fields of these names.

    Example:
        >>> class Collection:
        ...     tp = None
        >>> CollectionGrid(Collection()).group_names
        ('tp',)
    """

    def __init__(self, collection: Any) -> None:
        self._groups: dict[str, tuple[str, ProcessGroup | None]] = {}
        sharded = {"gtp": "gtp_remat", "egtp": "expt_gtp_remat"}
        sizes = {axis: getattr(collection, field, None) for axis, field in sharded.items()}
        axes = [axis for axis, group in sizes.items() if group is not None and group.size() > 1]
        for field, group in FIELDS.items():
            if _is_set(collection, field):
                found = (field, getattr(collection, field))
                self._groups.setdefault(group.name_on(axes), found)
        for level, group in enumerate(getattr(collection, "hcp", None) or []):
            self._groups[hierarchical(level)] = (f"hcp[{level}]", group)

    @property
    def group_names(self) -> tuple[str, ...]:
        """The names it has, also those of groups this rank is not in."""
        return tuple(self._groups)

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return dist.get_rank()

    def _find(self, names: tuple[str, ...]) -> tuple[str, ProcessGroup | None]:
        asked = "_".join(names)
        parts = sorted(asked.split("_"))
        for name, found in self._groups.items():
            if name == asked or sorted(name.split("_")) == parts:
                return found
        raise UnknownGroupError(
            f"the collection has no group {asked!r}, but {', '.join(self._groups)}"
            f"{nearest(asked, self._groups)}"
        )

    def get_group(self, *names: str) -> ProcessGroup:
        """A group by its commgrid name, axes in any order.

        Raises:
            UnknownGroupError: the collection has no such field.
            NotInGroupError: it is None: this rank is not in it, or it was not created.
        """
        field, group = self._find(names)
        if group is None:
            raise NotInGroupError(
                f"rank {self.rank} is not in group {'_'.join(names)!r}: the collection's "
                f"{field} is None"
            )
        return group

    def is_member(self, *names: str) -> bool:
        """Whether this rank is in the group."""
        return self._find(names)[1] is not None

    def size(self, *names: str) -> int:
        """The number of ranks in the group."""
        return self.get_group(*names).size()

    def get_local_rank(self, *names: str) -> int:
        """This rank's position in the group."""
        return self.get_group(*names).rank()

    def get_ranks(self, *names: str) -> tuple[int, ...]:
        """The global ranks of the group, in its order."""
        return tuple(dist.get_process_group_ranks(self.get_group(*names)))

    def next_rank(self, *names: str) -> int:
        """The global rank after this one in the group; the first after the last."""
        return self._step(1, names)

    def prev_rank(self, *names: str) -> int:
        """The global rank before this one in the group; the last before the first."""
        return self._step(-1, names)

    def _step(self, by: int, names: tuple[str, ...]) -> int:
        ranks = self.get_ranks(*names)
        return ranks[(ranks.index(self.rank) + by) % len(ranks)]

    def is_first(self, *names: str) -> bool:
        """Whether this rank is the first of its group."""
        return self.get_local_rank(*names) == 0

    def is_last(self, *names: str) -> bool:
        """Whether this rank is the last of its group."""
        return self.get_local_rank(*names) == self.size(*names) - 1


def _is_set(collection: Any, field: str) -> bool:
    """Whether a collection has a field; Megatron's own answers None for others from 0.19 on."""
    if field in getattr(type(collection), "__dataclass_fields__", {}):
        return field in vars(collection)
    return hasattr(collection, field)


def grid_view(collection: Any) -> CollectionGrid:
    """A ProcessGroupCollection as a grid: its groups under commgrid's names.

    Args:
        collection: megatron-core's.
    """
    return CollectionGrid(collection)
