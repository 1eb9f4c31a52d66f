"""Comparison of items that ranks should have alike, before one of them is saved or sent for all."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache

from torch.distributed import ProcessGroup

from commgrid.collectives.plain import all_gather
from commgrid.equality.digest import device_for
from commgrid.equality.values import number_of
from commgrid.errors import CheckpointError, GridMismatchError
from commgrid.replicas import Copy, differing, groups_along
from commgrid.resharding.item import Item, Value
from commgrid.resharding.model_state import ModelState
from commgrid.resharding.naming import SharedNames
from commgrid.runtime.grid import HyperCommGrid


def compare_copies(items: Sequence[Item | Value], model: ModelState) -> None:
    """Refuse to write one of several copies that differ.

    Collective over the grid, all of whose ranks have items of one model.

    Raises:
        GridMismatchError: names tensor and ranks.
    """
    grid = model.grid
    axes = dict.fromkeys(axis for region in grid.spec.regions for axis in region.axes)
    everywhere = [groups_along([axis], grid) for axis in axes if axis != "pp"]
    told = differing(_copies(items, grid), groups=[one for groups in everywhere for one in groups])
    if told is not None:
        raise GridMismatchError(
            f"{told}; these should be copies, of which one would have been saved for all. Where "
            "ranks have slices, say so with a ShardedModule's shard_dims; of buffers that ranks "
            f"have of their own, with mark_buffers(…, own=); {_where_copies_differ(model)}"
        )


def _where_copies_differ(model: ModelState) -> str:
    """The advice for copies that differ on purpose."""
    if model.own_axes:
        return members_of(model.own_axes)
    return (
        "where copies may differ, as kernels that are not deterministic make them, "
        'copies="first" writes the first rank\'s'
    )


def members_of(axes: Sequence[str]) -> str:
    """The advice for an ensemble along axes of the user's own."""
    return (
        f"members of an ensemble along {' or '.join(axes)} need a grid each, or modules with names "
        "of their own"
    )


def check_shared(told: Mapping[int, SharedNames]) -> None:
    """Refuse a copy of another stage's weight that this one does not have.

    Args:
        told: of each rank.

    Raises:
        CheckpointError: names the weight and both ranks.
    """
    for rank, shared in told.items():
        for key, names in shared.items():
            for other in key[0]:
                if len(told[other].get(key, ())) != len(names):
                    raise CheckpointError(
                        f"{names[-1]} of rank {rank} is marked as shared with ranks "
                        f"{list(key[0])}, of which rank {other} has no such weight of shape "
                        f"{key[1]}; call mark_parameters(…, shared=…) on all stages that have it"
                    )


def axes_apart(items: Sequence[Item | Value], model: ModelState) -> list[str]:
    """The axes of the user's own along which ranks have modules of other names.

    Collective over the ranks along each of these axes.
    """
    mine = number_of(sorted(item.key for item in items if item.path[0] == "model"))
    return [
        axis
        for axis in model.own_axes
        for group in groups_along([axis], model.grid)
        if len(set(all_gather(mine.to(device_for(group)).view(1), group).flatten().tolist())) > 1
    ]


def compare_members(items: Sequence[Item | Value], model: ModelState) -> None:
    """Refuse what differs along axes of the user's own, such as the members of an ensemble.

    These have one name each and other numbers, of which one member's would be there for all.
    Collective over the grid.

    Raises:
        GridMismatchError: names tensor and ranks.
    """
    apart, grid = axes_apart(items, model), model.grid
    axes = [axis for axis in model.own_axes if axis not in apart]
    groups = [one for axis in axes for one in groups_along([axis], grid)]
    told = differing(_copies(items, grid, axes), groups=groups)
    if told is not None:
        raise GridMismatchError(
            f"{told}, along an axis of your own, {' or '.join(axes)}, which no layer or reducer of "
            "the model names; one member's numbers would be there for all; "
            f"{members_of(axes)}"
        )


def _copies(
    items: Sequence[Item | Value], grid: HyperCommGrid, axes: Collection[str] | None = None
) -> list[Copy]:
    """Return the tensors of which other ranks should have copies, with the groups of these.

    Args:
        axes: along these alone; None: along all.
    """
    copies: list[Copy] = []
    num_shared = 0

    @cache
    def groups_of(named: tuple[str, ...]) -> tuple[ProcessGroup, ...]:
        return groups_along([axis for axis in named if axes is None or axis in axes], grid)

    for item in items:
        if isinstance(item, Item):
            for chunk in item.chunks:
                copies.append(Copy(item.key, chunk.data, groups_of(item.copies)))
                if item.shared is not None and axes is None:  # under a name per stage
                    key = f"shared {num_shared}"
                    copies.append(Copy(item.key, chunk.data, (item.shared,), key))
                    num_shared += 1
        elif item.copies:
            number = number_of([item.plain, item.of])
            copies.append(Copy(item.key, number, groups_of(item.copies)))
    return copies
