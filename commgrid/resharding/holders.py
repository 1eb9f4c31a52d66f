"""Boxes of parameters that this rank holds, and the choice of a rank to write each copy.

Every part is a list of boxes with their offsets, which is what torch.distributed.checkpoint
stores. Copies are written once, each by the rank that so far has least to write.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from commgrid.data_parallel.optimizer import ShardedOptimizer
from commgrid.equality.values import tensors_in
from commgrid.errors import SpecError
from commgrid.parameters import Placement, layout_of
from commgrid.parameters.foreign import ForeignCut
from commgrid.resharding.item import (
    Chunk,
    HeldBoxes,
    Item,
    Path,
    held_boxes,
    local_part,
    true_shape,
)
from commgrid.resharding.naming import refuse_further_state
from commgrid.runtime.grid import HyperCommGrid


@dataclass(frozen=True)
class SavedParameter(HeldBoxes):
    """A parameter, the boxes of it that this rank holds, and where copies of them are.

    Args:
        shape, held, boxes: as HeldBoxes'.
        name: in the whole model.
        copies: the axes along which ranks have copies of it.
        parts: these, and those along which they have other slices of it.
        is_owner: False on stages whose copy another stage writes.
    """

    name: str
    copies: tuple[str, ...]
    parts: tuple[str, ...]
    is_owner: bool = True

    @property
    def slices(self) -> tuple[str, ...]:
        """The axes along which ranks have other slices of it."""
        return tuple(axis for axis in self.parts if axis not in self.copies)


@dataclass(frozen=True)
class UpdatedPart:
    """The part of one parameter that the optimizer updates on this rank.

    Args:
        box: where the parameter's part lies.
        tensor: what the optimizer has of it.
        start, stop: which of its elements; None: all.
        has_copy: whether `tensor` is a copy in a higher precision.
        optimizer: whose state of the tensor it is.
    """

    box: SavedParameter
    tensor: Tensor
    optimizer: torch.optim.Optimizer
    start: int = 0
    stop: int | None = None
    has_copy: bool = False

    @property
    def state(self) -> Mapping[Any, Any]:
        """What the optimizer keeps of it, by key."""
        found: Mapping[Any, Any] = self.optimizer.state.get(self.tensor, {})
        return found

    @property
    def is_first(self) -> bool:
        """Whether it begins where the parameter does."""
        return self.start == 0 and self.box.is_first

    def chunks(self, data: Tensor) -> list[Chunk]:
        """The boxes of a tensor that is as the part."""
        return self.box.chunks(data, self.start, self.stop)

    def path(self, text: str) -> tuple[str, str]:
        """The name of an entry of its state, by the text of its key."""
        return "optimizer", f"state.{self.box.name}.{text}"

    def refuse_slices(self, text: str, held: Any) -> None:
        """Refuse tensors of a slice's shape within a value, which is saved once for all slices."""
        local = tuple(local_part(self.tensor).shape)
        cut = math.prod(local) < math.prod(self.box.shape)
        for each in tensors_in(held):
            if isinstance(each, DTensor) or (cut and tuple(each.shape) == local):
                raise SpecError(
                    f"{self.box.name}: the optimizer's {text!r} is a {type(held).__name__} with a "
                    f"tensor of shape {tuple(each.shape)}, as this rank's slice is of "
                    f"{self.box.shape}; keep such tensors under keys of their own, as "
                    f"state[parameter]['{text}.0']"
                )

    def is_like(self, held: Tensor) -> bool:
        """Whether a tensor of the state has a number for each of the part's."""
        return held.shape == self.tensor.shape and (held.dim() > 0 or not self.box.shape)

    def made(self, path: Path, dtype: torch.dtype, turns: Turns) -> tuple[Item, Tensor]:
        """A new tensor of a part's shape, and the item that fills it."""
        made = torch.empty_like(self.tensor, dtype=dtype, requires_grad=False)
        chunks = self.chunks(made)
        if sum(chunk.data.numel() for chunk in chunks) < made.numel():
            made.zero_()  # as is what pads a vocabulary, which is not saved
        mine = turns.is_mine(self.box.copies, made.nbytes)
        return Item(path, self.box.shape, chunks, dtype, mine), made

    def dtype_for(self, saved: torch.dtype, before: torch.dtype) -> torch.dtype:
        """The dtype of state that was saved in one; the part's, if the parameter was in it too.

        Args:
            before: the dtype that the parameter was saved in.
        """
        return self.tensor.dtype if saved == before else saved

    def beside(self, held: Any, before: torch.dtype) -> Any:
        """State on the part's device; in its dtype, if it had the parameter's before.

        Args:
            before: the dtype that the parameter was saved in.
        """
        if isinstance(held, Tensor):
            return held.to(self.tensor.device, self.dtype_for(held.dtype, before))
        if isinstance(held, dict):
            return {key: self.beside(each, before) for key, each in held.items()}
        if type(held) in (list, tuple):
            return type(held)(self.beside(each, before) for each in held)
        return held


def saved_parameter(
    placement: Placement,
    grid: HyperCommGrid,
    cut_over: str | None = None,
    foreign: ForeignCut | None = None,
    rows: int | None = None,
) -> SavedParameter:
    """The boxes of a parameter that this rank holds, and where copies of them are.

    Args:
        placement: the parameter, which may be a DTensor, such as FSDP2 makes of it.
        grid: with the axes that cut it.
        cut_over: the group over which a sharded optimizer has cut it further.
        foreign: how another library's layer has cut it; its copies are not known then.
        rows: how many entries along dim 0 are no padding; None: all.

    Raises:
        SpecError: slices over a group that is not one of the grid's, or of another region.
    """
    boxes = held_boxes(placement, foreign)
    shape = boxes.shape if rows is None else true_shape(placement.name, boxes.shape, rows)
    layout = layout_of(placement, grid, _cut_further(placement, cut_over))
    _check_experts(placement, grid)
    is_owner = placement.shared is None or placement.shared.rank == 0
    return SavedParameter(
        shape, boxes.held, boxes.boxes, placement.name,
        layout.copied_axes, layout.own_axes, is_owner,
    )  # fmt: skip


def _cut_further(placement: Placement, cut_over: str | None) -> Iterator[tuple[str, int]]:
    """By FSDP2, and by a sharded optimizer, which cuts a parameter's elements in their order."""
    parameter = placement.parameter
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        names = mesh.mesh_dim_names or ()
        if not names and not all(kind.is_replicate() for kind in parameter.placements):
            raise SpecError(
                f"{placement.name}: a DTensor on {mesh}, whose dims have no names; take meshes "
                "from grid.device_mesh"
            )
        for name, kind in zip(names, parameter.placements, strict=False):
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
    _place: dict[tuple[str, ...], int] = field(default_factory=dict)

    def is_mine(self, copies: tuple[str, ...], amount: int) -> bool:
        """Whether this rank writes something of which ranks along `copies` have copies.

        Args:
            copies: axes.
            amount: bytes.
        """
        if copies not in self._loads:
            shape, coordinate = self.grid.shape, self.grid.coordinate
            place, count = 0, 1
            for axis in copies:
                place, count = place * shape[axis] + coordinate[axis], count * shape[axis]
            self._loads[copies], self._place[copies] = [0] * count, place
        loads, place = self._loads[copies], self._place[copies]
        if self.first:
            return place == 0
        chosen = loads.index(min(loads))
        loads[chosen] += amount
        return chosen == place


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what is no optimizer, or keeps state to itself; wait for weights under way."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SpecError(
            f"optimizer={str(optimizer)[:60]}: expected one of torch.optim, or a list of them"
        )
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        raise SpecError(
            "ZeroRedundancyOptimizer keeps its state to itself; use "
            "commgrid.data_parallel.ShardedOptimizer"
        )
    refuse_further_state(inner_of(optimizer))
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.wait()


def inner_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that has the state, which of a ShardedOptimizer is another one."""
    return optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer


def class_of(optimizer: torch.optim.Optimizer) -> str:
    """The name of its class."""
    return type(inner_of(optimizer)).__name__
