"""A model's parameters and buffers as items of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from commgrid.data_parallel.slot import Reducer, slot_of
from commgrid.errors import SpecError
from commgrid.parameters import Placement, foreign_slice, placements
from commgrid.parameters.foreign import ForeignCut, foreign_cut
from commgrid.parameters.layout import axes_in_use
from commgrid.parameters.placement import BufferPlacement, buffer_placements
from commgrid.planning.region import AXES
from commgrid.resharding.holders import SavedParameter, Turns, saved_parameter
from commgrid.resharding.item import Item, Own, Value, key_of, local_part, refuse_unreadable
from commgrid.runtime.grid import HyperCommGrid

_EXTRA = "_extra_state"
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}


class ModelState:
    """This rank's part of a model, under the names of the full model.

    Args:
        model: a module, or a pipeline stage's chunks, whose modules are named as in the full model.
        grid: the grid that it is sharded over.
        foreign: whether it may have parameters sharded by another library's layers that describe
            their sharding.
        rows: how many entries along dim 0 of a tensor are no padding, by its name; None: all.
        apart: axes along which ranks have other modules, such as members of an ensemble.

    Raises:
        SpecError: two chunks have different parameters of one name, or a parameter is sliced over
            a group outside the grid.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        grid: HyperCommGrid,
        foreign: bool = False,
        rows: Callable[[str], int | None] = lambda _: None,
        apart: Collection[str] = (),
    ) -> None:
        self.grid, self._rows, self._apart = grid, rows, apart
        self._cuts: dict[int, ForeignCut] = {}
        self.chunks = chunks_of(model)
        self._by_fsdp: list[FSDPModule] = []
        for chunk in self.chunks:
            for name, module in chunk.named_modules():
                if isinstance(module, FSDPModule):
                    self._by_fsdp.append(module)
                    module.reshard()  # so that parameters are the sharded ones
                if isinstance(module, FullyShardedDataParallel):
                    raise SpecError(
                        f"{_clean(name) or 'the model'} is a FullyShardedDataParallel, whose flat "
                        "parameters are not known here; shard it with fully_shard instead"
                    )
                for key, parameter in module.named_parameters(recurse=False):
                    self._look_at(module, _join(_clean(name), key), parameter, foreign)
        for chunk in self.chunks:
            _refuse_further_state(chunk)
        self.placements: dict[str, Placement] = {}
        known: set[int] = set()
        for chunk in self.chunks:
            for found in placements(chunk):
                placement = replace(found, name=_clean(found.name))
                name = placement.name
                if id(placement.parameter) in known:
                    continue
                if name in self.placements:
                    raise SpecError(
                        f"two chunks have different parameters named {name!r}; name their modules "
                        "as in the full model"
                    )
                known.add(id(placement.parameter))
                self.placements[name] = placement
        self.boxes = {name: self.box_of(each, None) for name, each in self.placements.items()}
        self.settle()

    def _look_at(
        self, module: nn.Module, name: str, parameter: nn.Parameter, foreign: bool
    ) -> None:
        """Refuse what looks like a whole parameter and is not, or has no numbers."""
        refuse_unreadable(name, parameter)
        cut_by = foreign_slice(module, parameter, self.grid)
        if cut_by is not None and not (foreign and cut_by.says_how):
            told = f"{cut_by.what}; {cut_by.instead_of_saving}"
            raise SpecError(f"{name} of shape {tuple(parameter.shape)} {told}")
        if foreign and (cut := foreign_cut(module, parameter, self.grid)) is not None:
            self._cuts[id(parameter)] = cut

    def settle(self) -> None:
        """Reshard FSDP's modules, and wait for weights that are being gathered."""
        for module in self._by_fsdp:
            module.reshard()
        for reducer in self._reducers():
            reducer.wait_for_weights()

    @property
    def aliases(self) -> list[set[str]]:
        """The names of each parameter and each persistent buffer that modules share."""
        names: dict[int, set[str]] = {}
        for chunk in self.chunks:
            for name, parameter in chunk.named_parameters(remove_duplicate=False):
                names.setdefault(id(parameter), set()).add(_clean(name))
        for placement in self._buffers():
            names.setdefault(id(placement.buffer), set()).add(placement.name)
        return [each for each in names.values() if len(each) > 1]

    @property
    def has_foreign(self) -> bool:
        """Whether another library's layers have cut some of its parameters."""
        return bool(self._cuts)

    @property
    def own_axes(self) -> list[str]:
        """The user's axes that no layer or reducer uses, so that ranks may have other models."""
        used = axes_in_use(self.placements.values(), self.grid)
        for reducer in self._reducers():
            used |= reducer.groups.used
        named = dict.fromkeys(axis for region in self.grid.spec.regions for axis in region.axes)
        used |= {*AXES, *self._apart}
        return [axis for axis in named if axis not in used and self.grid.size(axis) > 1]

    def box_of(self, placement: Placement, cut_over: str | None) -> SavedParameter:
        """This rank's boxes of a parameter, which a sharded optimizer may have cut further."""
        foreign = self._cuts.get(id(placement.parameter))
        rows = self._rows(placement.name)
        box = saved_parameter(placement, self.grid, cut_over, foreign, rows)
        if not self._apart:
            return box
        copies = tuple(axis for axis in box.copies if axis not in self._apart)
        parts = tuple(axis for axis in box.parts if axis not in self._apart)
        return replace(box, copies=copies, parts=parts)

    def clear_padding(self, names: Container[str]) -> None:
        """Zero the tensors that have padding; their other numbers are loaded afterwards.

        Args:
            names: of the tensors that are loaded.
        """
        for each in (*self.placements.values(), *self._buffers()):
            if each.name in names and self._rows(each.name) is not None:
                local_part(each.parameter).zero_()

    def items(self, turns: Turns) -> Iterator[Item | Value]:
        """Every parameter, persistent buffer and extra state."""
        seen: set[str] = set()
        for placement in (*self.placements.values(), *self._buffers()):
            name, tensor, own, is_first = placement.name, placement.parameter, None, True
            if isinstance(placement, BufferPlacement):
                box, is_first = self.box_of(placement, None), name not in seen
                seen.add(name)
                if placement.mark.own is not None:
                    own = Own(placement.mark.merge, placement.is_stacked)
            else:
                box = self.boxes[name]
            chunks = box.chunks(tensor)
            size = sum(chunk.data.nbytes for chunk in chunks)
            mine = turns.is_mine(box.copies, size) and box.is_owner and is_first
            yield Item(
                ("model", name), box.shape, chunks, tensor.dtype, mine, copies=box.copies, own=own,
                repeats=isinstance(placement, BufferPlacement), shared=placement.sharers,
            )  # fmt: skip
        other = {"pp", *self._apart}
        everywhere = tuple(axis for axis in self.grid.spec.regions[0].axes if axis not in other)
        for name, module in self._stateful():
            mine = turns.is_mine(everywhere, 0) and name not in seen
            seen.add(name)
            yield Value(("model", name), module.get_extra_state(), mine, copies=everywhere)

    def set_values(self, read: Mapping[str, Any]) -> None:
        """Give modules their extra states.

        Args:
            read: by key; a module whose state is not there keeps its own.
        """
        for name, module in self._stateful():
            key = key_of(("model", name))
            if key in read:
                module.set_extra_state(read[key])

    def tell_loaded(self) -> None:
        """Tell optimizers that have copies of the weights, unless one is loaded itself."""
        for reducer in self._reducers():
            reducer.weights_loaded()

    def _reducers(self) -> Iterator[Reducer]:
        """Yield the reducers of the model's gradients, without duplicates."""
        slots = (slot_of(placement.parameter) for placement in self.placements.values())
        found = (slot.reducer for slot in slots if slot is not None)
        yield from dict.fromkeys(reducer for reducer in found if reducer is not None)

    def _buffers(self) -> Iterator[BufferPlacement]:
        """Yield the persistent buffers of all chunks."""
        for chunk in self.chunks:
            for found in buffer_placements(chunk):
                if found.is_persistent:
                    yield replace(found, name=_clean(found.name))

    def _stateful(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules with extra state, by the name that torch gives it."""
        for chunk in self.chunks:
            for name, module in chunk.named_modules():
                if _has_extra_state(module):
                    yield _join(_clean(name), _EXTRA), module


def chunks_of(model: object) -> list[nn.Module]:
    """Return the chunks of a model.

    Raises:
        SpecError: it is neither a module nor a list of modules.
    """
    chunks = [model] if isinstance(model, nn.Module) else model
    modules = [*chunks] if isinstance(chunks, Sequence) else []
    if not modules or not all(isinstance(chunk, nn.Module) for chunk in modules):
        raise SpecError(f"model={model!r:.60}: expected a module, or a list of a stage's chunks")
    return [_unwrapped(chunk) for chunk in modules]


def _unwrapped(chunk: nn.Module) -> nn.Module:
    """Return a chunk without DistributedDataParallel, which torch.compile may be around."""
    inner = chunk
    while len(child := dict(inner.named_children())) == 1 and {*child} <= _WRAPPERS:
        (inner,) = child.values()
    return _unwrapped(inner.module) if isinstance(inner, DistributedDataParallel) else chunk


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _clean(name: str) -> str:
    """A name without what torch.compile and activation checkpointing put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _refuse_further_state(model: nn.Module) -> None:
    """Refuse a state_dict that has more than parameters, buffers and extra states.

    Raises:
        SpecError: names the entry and its module.
    """
    own = (
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    )
    known = {_clean(name): tensor for named in own for name, tensor in named}
    extra = {
        _join(_clean(name), _EXTRA)
        for name, module in model.named_modules(remove_duplicate=False)
        if _has_extra_state(module)
    }
    for key, value in model.state_dict().items():
        if (tensor := known.get(_clean(key))) is not None:
            refuse_unreadable(_clean(key), tensor)
        if tensor is not None and _differs(value, tensor):
            raise SpecError(
                f"{_clean(key)} differs between state_dict() and the module, whose numbers would "
                "be saved; change them in the module instead of in a hook"
            )
        if tensor is not None or _clean(key) in extra:
            continue
        place, at = key.rpartition(".")[0], model
        for part in place.split("."):
            at = getattr(at, part) if isinstance(getattr(at, part, None), nn.Module) else at
        raise SpecError(
            f"{_clean(key)} is in the state_dict of {type(at).__name__}, and no "
            "parameter, buffer or get_extra_state() of a module, so that it would be lost; "
            "register it as a buffer, or return it from get_extra_state()"
        )


def _differs(value: Any, tensor: Tensor) -> bool:
    """Whether a state_dict has other numbers than a tensor; hooks may give copies."""
    if not isinstance(value, Tensor) or value.shape != tensor.shape:
        return value is not None
    mine, theirs = local_part(tensor), local_part(value)
    same = [(each.data_ptr(), each.stride(), each.dtype) for each in (mine, theirs)]
    if same[0] == same[1]:
        return False
    both = theirs.to(mine.device, mine.dtype), mine
    one, other = (tensor.flatten().contiguous().view(torch.uint8) for tensor in both)
    return not torch.equal(one, other)  # by bits, so that NaNs are equal


def _join(*names: str) -> str:
    return ".".join(name for name in names if name)
