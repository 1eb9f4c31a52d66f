"""The group over which each parameter's gradient is summed, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.tensor import Replicate

from commgrid.collectives.common_group import common_group
from commgrid.errors import SpecError, UnknownGroupError
from commgrid.parameters import Distinct, Placement, layout_of
from commgrid.parameters.layout import axes_in_use, num_distinct
from commgrid.replicas import groups_along
from commgrid.runtime.grid import HyperCommGrid


class ReductionGroups:
    """Where the gradients of a model's parameters are summed.

    Args:
        grid: where the names are looked up.
        model: placements of all its parameters.
        dense, expert: names of the groups of ranks that saw different data, for each region.
        shard: whether each rank of such a group keeps a part of the sum.
    """

    def __init__(
        self,
        grid: HyperCommGrid,
        model: Iterable[Placement],
        dense: str,
        expert: str,
        *,
        shard: bool,
    ) -> None:
        self.grid, self.shard, self.dense = grid, shard, dense
        self._expert = expert
        model = list(model)
        self._regions = {grid.spec.regions[0].name, *(p.region for p in model)}
        self.used = axes_in_use(model, grid, dense, expert)
        """The axes along which ranks have one model."""
        many = "pp" in grid.shape
        self.stages = next(iter(self.along(["pp"])), None) if many else None
        """The group of one rank of each pipeline stage; None: there is one, or others train
        nothing."""

    def of(self, placement: Placement) -> tuple[ProcessGroup, str]:
        """The group over which a gradient is summed, and its name, of region and partial sums.

        Raises:
            SpecError: it is partial over a group that is not known by a name of the grid.
        """
        name = self._expert if placement.region == "expert" else self.dense
        partial = placement.partial
        if partial is None or partial.size == 1:
            return self._common(self.grid.get_group(name)), name
        spec = self.grid.spec
        if partial.grid_name != self.grid.name:
            raise SpecError(
                f"{placement}: its gradients are partial over {partial}, which was not given as a "
                f"name of grid {self.grid.name!r} and so cannot be combined with {name!r}"
            )
        for part in (name, partial.name):
            if not spec.definitions[spec.resolve_name(part)].is_whole:
                raise SpecError(
                    f"{placement}: its gradients are summed over {name!r} and {partial.name!r}, of "
                    f"which {part!r} lists its ranks or has some of those along its axes; give "
                    "groups of whole axes, such as group='dp_cp' and partial='tp'"
                )
        axes = dict.fromkeys(
            axis for part in (name, partial.name)
            for axis in spec.definitions[spec.resolve_name(part)].axes
        )  # fmt: skip
        return self._common(self.grid.get_group(*axes)), "_".join(axes)

    def _common(self, group: ProcessGroup) -> ProcessGroup:
        return common_group(group, self.grid, (self.dense, self._expert))

    def apart(self, placement: Placement) -> Iterator[tuple[str, list[int]]]:
        """Axes along which other ranks hold other parameters, each with the ranks along it."""
        with suppress(SpecError):
            layout = layout_of(placement, self.grid)
            for axis, kind in layout.weight.items():
                if isinstance(kind, Distinct) and layout.sizes[axis] > 1:
                    yield axis, dist.get_process_group_ranks(self.grid.get_group(axis))

    def of_copies(
        self, placement: Placement, summed: ProcessGroup | None
    ) -> tuple[ProcessGroup, ...]:
        """Groups along which copies of a parameter must stay equal.

        Args:
            placement: the parameter.
            summed: the group over which its gradients are summed, None: it has none; taken if the
                parameter is sliced over a group unknown to the grid, or if it lists its ranks.
        """
        reduced = (summed,) if summed is not None and summed.size() > 1 else ()
        try:
            axes = layout_of(placement, self.grid).copied_axes
        except SpecError:
            return reduced
        listed = (d.name for d in self.grid.spec.definitions.values() if d.lists is not None)
        lists_ranks = reduced and any(
            self.grid.is_member(name) and self.grid.get_group(name) is summed for name in listed
        )
        along = self.along(axis for axis in axes if axis in self.used)
        return (*along, *reduced) if lists_ranks else along

    def unsummed(self, placement: Placement) -> list[str]:
        """The axes along which ranks have copies of a parameter whose gradients nothing sums."""
        with suppress(SpecError):
            layout = layout_of(placement, self.grid)
            data = self.axes_of(self._expert if placement.region == "expert" else self.dense)
            whole = {axis for axis, kind in layout.grad.items() if isinstance(kind, Replicate)}
            return [a for a in layout.copied_axes if a in self.used and a in whole - data]
        return []

    def along(self, axes: Iterable[str]) -> tuple[ProcessGroup, ...]:
        """Groups in which ranks differ along some axes only, as `replicas.groups_along`."""
        return groups_along(axes, self.grid, (self.dense, self._expert))

    def stage(self, used: set[str] | None = None) -> ProcessGroup | None:
        """The ranks of this one's pipeline stage; None: it is alone, or no such group was created.

        Args:
            used: only ranks along these axes; None: along all.
        """
        dense = self.grid.spec.regions[0].axes
        axes = [axis for axis in dense if axis != "pp" and self.grid.size(axis) > 1]
        axes = [axis for axis in axes if used is None or axis in used]
        try:
            return self._common(self.grid.get_group(*axes)) if axes else None
        except UnknownGroupError:
            return None

    @property
    def everyone(self) -> list[ProcessGroup]:
        """Groups that together reach all ranks that train the model."""
        return [group for group in (self.stage(), self.stages) if group is not None]

    def cut_over(self, placement: Placement) -> str | None:
        """The group whose ranks each keep a part of a parameter's gradient; None: all keep it."""
        return self.of(placement)[1] if self.shard else None

    def num_distinct(self, placement: Placement) -> float:
        """Number of distinct pieces of this gradient across the grid."""
        parts = self.of(placement)[0].size() if self.shard else 1
        return num_distinct(placement, self.grid) * parts

    def axes_of(self, name: str) -> set[str]:
        """The axes of a group of ranks that saw different data; all, for listed ranks and parts."""
        spec = self.grid.spec
        definition = spec.definitions[spec.resolve_name(name)]
        if not definition.is_whole:
            return {axis for region in spec.regions for axis in region.axes}
        return set(definition.axes)

    def coordinate(self) -> dict[str, int]:
        """This rank's place along the axes on which ranks keep different gradients."""
        spec = self.grid.spec
        alike: set[str] = set()
        for name in () if self.shard else (self.dense, self._expert):
            with suppress(UnknownGroupError):
                alike |= set(spec.definitions[spec.resolve_name(name)].axes)
        axes = [a for region in spec.regions if region.name in self._regions for a in region.axes]
        return {axis: self.grid.coordinate[axis] for axis in axes if axis not in alike}
