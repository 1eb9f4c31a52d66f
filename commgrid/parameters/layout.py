"""Layout of one parameter along the axes of its region: sliced, replicated or distinct.

The one place that says which ranks have copies and which have slices. Reduction groups, norms,
comparisons of replicas, boxes of checkpoints and checks of wrappers are views of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Replicate, Shard

from commgrid.errors import SpecError, UnknownGroupError
from commgrid.parameters.placement import Placement
from commgrid.runtime.grid import HyperCommGrid


class Distinct:
    """Layout along an axis with other parameters at each index, such as a pipeline's stages."""

    def __repr__(self) -> str:
        return "Distinct()"


@dataclass(frozen=True)
class ParameterLayout:
    """Layout of one parameter along the axes of its region.

    Args:
        weight: by axis, `Shard(dim)`: this rank has a slice; `Replicate()`: a copy; `Distinct()`:
            other indices have other parameters.
        grad: by axis, `Partial()`: after backward each rank has a part of a sum; `Replicate()`: all
            of it, along data axes of this rank's samples, over which a reducer takes the mean.
        shape: of the full parameter.
        sizes: of the axes.
        sharers: number of stages that each use a copy of it differently.
    """

    weight: Mapping[str, Shard | Replicate | Distinct]
    grad: Mapping[str, Partial | Replicate]
    shape: tuple[int, ...]
    sizes: Mapping[str, int]
    sharers: int = 1

    @property
    def copied_axes(self) -> tuple[str, ...]:
        """The axes along which ranks have copies of this rank's tensor."""
        return tuple(axis for axis, kind in self.weight.items() if isinstance(kind, Replicate))

    @property
    def own_axes(self) -> tuple[str, ...]:
        """The axes along which ranks have copies or slices of the same parameter."""
        return tuple(axis for axis, kind in self.weight.items() if not isinstance(kind, Distinct))

    @property
    def num_distinct(self) -> float:
        """Number of distinct shards or parameters held across the grid in this one's place."""
        apart = [axis for axis in self.weight if axis not in self.copied_axes]
        return math.prod(self.sizes[axis] for axis in apart) / self.sharers


def layout_of(
    placement: Placement, grid: HyperCommGrid, further: Iterable[tuple[str, int]] = ()
) -> ParameterLayout:
    """Layout of a parameter along the axes of a grid.

    Each pipeline stage has its own parameters, and so has each rank of an expert-parallel group.

    Args:
        placement: the parameter.
        grid: its grid.
        further: groups over which the layer's tensor is sliced once more, as by FSDP2 or a
            sharded optimizer: (name, dim) of each.

    Raises:
        SpecError: it is sliced over a group that is not one of the grid's names, that lists its
            ranks, or that is of another region.
    """
    regions = {region.name: region.axes for region in grid.spec.regions}
    own = regions.get(placement.region, grid.spec.regions[0].axes)
    weight: dict[str, Shard | Replicate | Distinct] = dict.fromkeys(own, Replicate())
    if "pp" in own:
        weight["pp"] = Distinct()
    if placement.region == "expert" and "ep" in own:
        weight["ep"] = Distinct()
    cut: dict[str, int] = {}
    for dim, group in placement.shards:
        if group.grid_name != grid.name:
            raise SpecError(
                f"{placement.name}: sliced over {group}, which was not given as a name of grid "
                f"{grid.name!r}; give the layer the group's name"
            )
        cut |= dict.fromkeys(_axes_of(group.name, placement, grid), dim)
    for name, dim in further:
        cut |= dict.fromkeys(_axes_of(name, placement, grid), dim)
    if not cut.keys() <= set(own):
        raise SpecError(
            f"{placement.name}: sliced over {', '.join(sorted(cut))}, but its region has the axes "
            f"{', '.join(own)}; expert parameters are sharded over axes of the expert region, such "
            "as edp, and others over those of the dense one"
        )
    weight |= {axis: Shard(dim) for axis, dim in cut.items()}
    partial = placement.partial
    summed: tuple[str, ...] = ()
    if partial is not None and partial.grid_name == grid.name:
        summed = grid.spec.definitions[grid.spec.resolve_name(partial.name)].axes
    return ParameterLayout(
        weight, {axis: Partial() if axis in summed else Replicate() for axis in own},
        placement.shape, {axis: grid.size(axis) for axis in own},
        placement.shared.size if placement.shared is not None else 1,
    )  # fmt: skip


def _axes_of(name: str, placement: Placement, grid: HyperCommGrid) -> tuple[str, ...]:
    try:
        definition = grid.spec.definitions[grid.spec.resolve_name(name)]
    except LookupError as error:
        raise SpecError(
            f"{placement.name}: sliced over {name!r}, which grid {grid.name!r} does not have; take "
            f"meshes from grid.device_mesh ({error})"
        ) from error
    if not definition.is_whole:
        raise SpecError(
            f"{placement.name}: sliced over {name!r}, which lists its ranks or has some of those "
            "along its axes, so that the ranks with copies are unknown; give the layer, or the "
            "reducer that shards, an axis"
        )
    return definition.axes


def num_distinct(placement: Placement, grid: HyperCommGrid) -> float:
    """Number of distinct shards or parameters held across the grid in this one's place."""
    try:
        return layout_of(placement, grid).num_distinct
    except SpecError:  # sliced over a group that the grid does not know by axes
        distinct = ("pp", "ep") if placement.region == "expert" else ("pp",)
        apart = [axis for axis in distinct if axis in grid.coordinate]
        sharers = placement.shared.size if placement.shared is not None else 1
        return placement.num_slices * math.prod(grid.size(axis) for axis in apart) / sharers


def axes_in_use(placements: Iterable[Placement], grid: HyperCommGrid, *names: str) -> set[str]:
    """Axes whose ranks work on one model: tp, cp, the data axes, and axes that its layers name.

    Along other axes, such as the members of an ensemble, weights may differ on purpose.

    Args:
        placements: of the model.
        grid: its grid.
        names: the groups over which its gradients are summed.
    """
    found = {"tp", "cp"} & set(grid.shape)
    groups = [group for p in placements for _, group in p.shards] + [
        p.partial for p in placements if p.partial is not None
    ]
    known = [group.name for group in groups if group.grid_name == grid.name]
    for name in {*names, *known}:
        with suppress(UnknownGroupError):
            found |= set(grid.spec.definitions[grid.spec.resolve_name(name)].axes)
    return found
