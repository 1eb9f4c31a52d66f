"""Where this rank's part of a tensor lies in the full one, and which rank writes it.

    full (6, 4) = tp 2 by rows, then fsdp 2 by rows; rank (fsdp 1, tp 0) has row 2 of 6:

        tp 0 ┌ fsdp 0   rows 0, 1          the module says: dim 0, tp         offset 0 of 6
             └ fsdp 1   row  2        ◄─   FSDP's DTensor: dim 0, fsdp        offset 2 of 3
        tp 1 ┌ fsdp 0   rows 3, 4
             └ fsdp 1   row  5

Every part is a list of boxes with their offsets, which is what torch.distributed.checkpoint
stores. A DTensor's part is one box; what a sharded optimizer keeps of a parameter is a range of its
elements, which up to 2 n - 1 boxes of n dims hold. Copies are written once, each by the rank
that so far has least to write.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from commgrid.errors import SpecError
from commgrid.parameters import Placement, layout_of
from commgrid.planning.boxes import Shape, boxes_of_range

if TYPE_CHECKING:
    from commgrid.runtime.grid import HyperCommGrid


@dataclass(frozen=True)
class Chunk:
    """A box of a full tensor.

    Args:
        offset: of its first element in the full tensor.
        data: this rank's tensor of it, of the box's size; writing to it sets what it is a view of.
    """

    offset: Shape
    data: Tensor


@dataclass(frozen=True)
class HeldBox:
    """The box of a full parameter that this rank holds.

    Args:
        name: in the whole model.
        shape: of the full parameter.
        held: of this rank's tensor, which where slices are padded reaches beyond `shape`.
        offset: of this rank's tensor in the full parameter.
        copies: the axes along which ranks have copies of it.
        is_owner: False on stages whose copy another stage writes.
    """

    name: str
    shape: Shape
    held: Shape
    offset: Shape
    copies: tuple[str, ...]
    is_owner: bool = True

    @property
    def is_first(self) -> bool:
        """Whether this rank's part begins where the parameter does."""
        return not any(self.offset)

    def chunks(self, data: Tensor, start: int = 0, stop: int | None = None) -> list[Chunk]:
        """The boxes of a tensor that holds elements start … stop - 1 of this rank's part.

        Args:
            data: of as many elements, in their order.
            start, stop: with `stop`, `data` has one dim; None: it is all of this rank's part.
        """
        found = []
        for within, part in _split(local_part(data), start, stop, self.held):
            place = tuple(own + inner for own, inner in zip(self.offset, within, strict=True))
            for dim, (begin, whole) in enumerate(zip(place, self.shape, strict=True)):
                part = part.narrow(dim, 0, min(max(whole - begin, 0), part.shape[dim]))
            if part.numel() or not math.prod(self.shape):
                found.append(Chunk(place, part))
        return found


def _split(
    data: Tensor, start: int, stop: int | None, shape: Shape
) -> Iterator[tuple[Shape, Tensor]]:
    if stop is None:
        yield (0,) * len(shape), data
        return
    done = 0
    for offset, size in boxes_of_range(start, stop, shape):
        count = math.prod(size)
        yield offset, data[done : done + count].view(size)
        done += count


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor, without its graph."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def held_box(placement: Placement, grid: HyperCommGrid, cut_over: str | None = None) -> HeldBox:
    """The box of a parameter that this rank holds.

    Args:
        placement: the parameter, which may be a DTensor, such as FSDP2 makes of it.
        grid: with the axes that cut it.
        cut_over: the group over which a sharded optimizer has cut it further.

    Raises:
        SpecError: slices over a group that is not one of the grid's, or of another region.
    """
    parameter = placement.parameter
    slice_shape = parameter.shape  # of FSDP's DTensor: before FSDP cut it
    offset, held = [0] * parameter.dim(), tuple(parameter.shape)
    if isinstance(parameter, DTensor):
        chunk = parameter.__create_chunk_list__()[0]  # type: ignore[no-untyped-call]
        offset, held = list(chunk.offsets), tuple(chunk.sizes)
    for dim, group in placement.shards:
        offset[dim] += group.rank * slice_shape[dim]
    layout = layout_of(placement, grid, _cut_further(placement, cut_over))
    _check_experts(placement, grid)
    return HeldBox(
        placement.name, placement.shape, held, tuple(offset), layout.copied_axes,
        placement.shared is None or placement.shared.rank == 0,
    )  # fmt: skip


def _cut_further(placement: Placement, cut_over: str | None) -> Iterator[tuple[str, int]]:
    """By FSDP2, and by a sharded optimizer, which cuts a parameter's elements in their order."""
    parameter = placement.parameter
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        if not mesh.mesh_dim_names:
            raise SpecError(
                f"{placement.name}: a DTensor on {mesh}, whose dims have no names; take meshes "
                "from grid.device_mesh"
            )
        for name, kind in zip(mesh.mesh_dim_names, parameter.placements, strict=False):
            if not isinstance(kind, Replicate):
                yield name, getattr(kind, "dim", 0)
    if cut_over is not None:
        yield cut_over, 0


def _check_experts(placement: Placement, grid: HyperCommGrid) -> None:
    """Refuses experts that have one name on all ranks of ep."""
    if placement.region != "expert" or "ep" not in grid.shape or grid.size("ep") == 1:
        return
    cut = layout_of(placement, grid).weight["ep"]
    if not isinstance(cut, Shard):
        raise SpecError(
            f"{placement.name} is marked as of the expert region, where other ranks of ep have "
            "others, but not as sliced over ep, so that all have one name; use GroupedExperts, or "
            "a ShardedModule whose shards_of says which experts a rank has"
        )


@dataclass
class Turns:
    """Shares out what ranks have copies of; all of them come to the same answer by themselves.

    Args:
        grid: whose ranks.
        first: whether the first of the ranks with copies writes all of them, so that what is
            written is one rank's where copies differ.
    """

    grid: HyperCommGrid
    first: bool = False
    _loads: dict[tuple[str, ...], list[int]] = field(default_factory=dict)

    def is_mine(self, copies: tuple[str, ...], amount: int) -> bool:
        """Whether this rank writes something of which ranks along `copies` have copies.

        Args:
            copies: axes.
            amount: bytes.
        """
        shape, coordinate = self.grid.shape, self.grid.coordinate
        mine, count = 0, 1
        for axis in copies:
            mine, count = mine * shape[axis] + coordinate[axis], count * shape[axis]
        if self.first:
            return mine == 0
        loads = self._loads.setdefault(copies, [0] * count)
        chosen = loads.index(min(loads))
        loads[chosen] += amount
        return chosen == mine
