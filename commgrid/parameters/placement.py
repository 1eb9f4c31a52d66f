"""Placement: a parameter or buffer, and the slices and partial gradients its module declares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from commgrid.collectives.group_ref import GroupRef, name_of
from commgrid.errors import SpecError
from commgrid.parameters.marks import BufferMark, Mark, buffer_marks, mark_of
from commgrid.parameters.sharded_module import (
    ShardedModule,
    Slice,
    check_declared,
    check_mesh,
    check_unwrapped,
)


@dataclass(frozen=True)
class Placement(Slice):
    """A parameter and its layout on the grid.

    Args:
        name, parameter, shards: as for `Slice`.
        partial: the group over which its gradients are parts of a sum; None: none.
        region: "dense" or "expert": selects the data-parallel group that holds copies of it.
        shape: of the full parameter.
        shared: the group whose ranks each use a copy of it differently, as first and last stage
            use tied embeddings, so that its gradient is the sum over them; None: none.
    """

    partial: GroupRef | None
    region: str
    shape: tuple[int, ...]
    shared: GroupRef | None = None

    @property
    def sharers(self) -> ProcessGroup | None:
        """The group `shared`, if it has more than one rank."""
        return self.shared.group if self.shared is not None and self.shared.size > 1 else None


@dataclass(frozen=True)
class BufferPlacement(Placement):
    """A buffer and its layout on the grid; a buffer per rank is a slice of all, stacked.

    Args:
        buffer: itself; `parameter` has a first dim more where ranks have their own.
        is_persistent: whether a state_dict has it.
        mark: what `mark_buffers` says of it.
    """

    buffer: Tensor = field(kw_only=True)
    is_persistent: bool = field(kw_only=True)
    mark: BufferMark = field(kw_only=True)

    @property
    def is_stacked(self) -> bool:
        """Whether several ranks have their own, stacked along a first dim."""
        return self.mark.own is not None and self.mark.own.size > 1


def buffer_placements(model: nn.Module) -> Iterator[BufferPlacement]:
    """Layout of every buffer of the model; one shared by modules comes under each of its names.

    Raises:
        SpecError: a module declares dims or groups that a buffer does not have.
    """
    marks: dict[str, Mark] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, ShardedModule):
            check_declared(prefix, module)
        mark = marks[prefix] = mark_of(prefix, module, marks)
        for name, buffer in module.named_buffers(recurse=False):
            said = buffer_marks(module).get(name, BufferMark())
            shards, one, shape = said.cut, buffer, list(buffer.shape)
            if isinstance(module, ShardedModule) and name in module.sliced_names and not said.cut:
                shards, shape = module.shards_of(name), list(module.full_shape(name))
            else:
                for dim, group in shards:
                    shape[dim] *= group.size
            region = mark.region if shards or said.own is not None else "dense"
            if said.own is not None and said.own.size > 1:
                shards = ((0, said.own), *((dim + 1, group) for dim, group in shards))
                one, shape = buffer.unsqueeze(0), [said.own.size, *shape]
            full = f"{prefix}.{name}" if prefix else name
            yield BufferPlacement(
                full, cast("nn.Parameter", one), shards, None, region, tuple(shape), buffer=buffer,
                is_persistent=name not in module._non_persistent_buffers_set, mark=said,
            )  # fmt: skip


def placements(model: nn.Module) -> Iterator[Placement]:
    """Layout of every parameter of the model; a parameter shared by modules comes once.

    Raises:
        SpecError: modules that share a parameter declare different layouts, or a slice was
            replaced by a parametrization, weight_norm or pruning.
    """
    found: dict[int, Placement] = {}
    marks: dict[str, Mark] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, ShardedModule):
            check_declared(prefix, module)
            check_unwrapped(prefix, module)
        mark = marks[prefix] = mark_of(prefix, module, marks)
        for name, parameter in module.named_parameters(recurse=False):
            shards: tuple[tuple[int, GroupRef], ...] = ()
            partial, shape = mark.partial, tuple(parameter.shape)
            if isinstance(module, ShardedModule):
                shards, shape = module.shards_of(name), module.full_shape(name)
                own = (module.group, *(group for _, group in shards))
                if name in module.partial:
                    partial = module.group
                elif partial is not None and partial.name in {g.name for g in own}:
                    partial = None  # the layer's declaration wins over a mark on its parent
            full = f"{prefix}.{name}" if prefix else name
            placement = Placement(full, parameter, shards, partial, mark.region, shape, mark.shared)
            check_mesh(placement)
            first = found.setdefault(id(parameter), placement)
            if _layout(first) != _layout(placement):
                told = [(p.shards, p.partial, p.region, p.shared) for p in (first, placement)]
                raise SpecError(
                    f"{first.name} and {full} are one parameter, but their modules say {told[0]} "
                    f"and {told[1]} of its slices, partial sums, region and copies; make both say "
                    "the same"
                )
    yield from found.values()


def shared_last(found: Iterable[Placement]) -> list[Placement]:
    """Placements used on one stage only, then those shared between stages, sorted by group.

    Stages register shared parameters in different orders. Collectives over several groups need one
    order on all ranks.
    """

    def by_group(placement: Placement) -> tuple[list[int], str]:
        group = placement.sharers
        return ([], "") if group is None else (dist.get_process_group_ranks(group), name_of(group))

    return sorted(found, key=by_group)


def _layout(placement: Placement) -> tuple[Any, ...]:
    """A parameter's layout with the groups' ranks: a group may have several names."""
    shards = tuple((dim, _ranks(group)) for dim, group in placement.shards)
    return shards, _ranks(placement.partial), placement.region, _ranks(placement.shared)


def _ranks(group: GroupRef | None) -> list[int] | None:
    return dist.get_process_group_ranks(group.group) if group is not None else None


def own_slice(full: Tensor, dim: int, group: GroupRef, size: int) -> Tensor:
    """This rank's slice of `full` of length `size` along `dim`, zero past the end of `full`."""
    shape = list(full.shape)
    start = min(group.rank * size, shape[dim])
    real = min(size, shape[dim] - start)
    if real == size:
        return full.narrow(dim, start, size)
    shape[dim] = size
    part = full.new_zeros(shape)
    part.narrow(dim, 0, real).copy_(full.narrow(dim, start, real))
    return part
