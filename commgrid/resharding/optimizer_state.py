"""An optimizer's state as items of a checkpoint, by the names of the parameters it is of.

The keys are torch's for flattened optimizer state: `state.<parameter>.exp_avg`, and
`param_groups.<parameter>.lr` for every option of the group that a parameter is in. Where half-
precision parameters are updated in an fp32 copy, that is `state.<parameter>.master`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from commgrid.data_parallel.optimizer import ShardedOptimizer
from commgrid.errors import CheckpointError, SpecError
from commgrid.resharding.holders import SavedParameter, Turns
from commgrid.resharding.item import Chunk, Item, Path, Shared, Value, key_of, local_part, whole
from commgrid.resharding.model_state import ModelState

MASTER, CLASS = "master", "optimizer_class"
OF_SCHEDULERS = {"base_momentum", "initial_lr", "max_lr", "max_momentum", "min_lr"}
"""Options that torch's learning rate schedulers add."""
NO_OPTIONS = {"params", "param_names"}  # of which every rank has others


def copy_of(path: Path) -> Path:
    """The name of the fp32 copy of a parameter of the model."""
    return "optimizer", f"state.{path[-1]}.{MASTER}"


@dataclass(frozen=True)
class UpdatedPart:
    """The part of one parameter that the optimizer updates on this rank.

    Args:
        box: where the parameter's part lies.
        tensor: what the optimizer has of it.
        start, stop: which of its elements; None: all.
        has_copy: whether `tensor` is a copy in a higher precision.
    """

    box: SavedParameter
    tensor: Tensor
    start: int = 0
    stop: int | None = None
    has_copy: bool = False

    def chunks(self, data: Tensor) -> list[Chunk]:
        """The boxes of a tensor that is as the part."""
        return self.box.chunks(data, self.start, self.stop)

    def path(self, key: str) -> tuple[str, str]:
        """The name of an entry of its state."""
        return "optimizer", f"state.{self.box.name}.{key}"


class OptimizerState:
    """This rank's part of an optimizer's state.

    Args:
        optimizer: of torch.optim, or a ShardedOptimizer, over the model's parameters.
        model: whose parameters they are.

    Raises:
        SpecError: the optimizer has parameters that the model has not.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: ModelState) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise SpecError(f"optimizer={str(optimizer)[:60]}: expected one of torch.optim")
        if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
            raise SpecError(
                "ZeroRedundancyOptimizer keeps its state to itself; use "
                "commgrid.data_parallel.ShardedOptimizer"
            )
        self.optimizer, self._model = optimizer, model
        self.inner = optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.wait()
        self.grid = model.grid
        boxes = {id(p.parameter): model.boxes[name] for name, p in model.placements.items()}
        self.groups: list[list[SavedParameter]] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in boxes:
                    raise SpecError(
                        f"the optimizer updates a parameter of shape {tuple(parameter.shape)} that "
                        "the model does not have; give the model that it was made for"
                    )
            self.groups.append([boxes[id(parameter)] for parameter in group["params"]])
        known = dict(_parts(optimizer, model))
        self.parts = [
            [known[id(tensor)] for tensor in group["params"]] for group in self.inner.param_groups
        ]

    # -- writing ------------------------------------------------------------------------

    def items(self, turns: Turns) -> Iterator[Item | Value]:
        """Every entry of every parameter's state, and the options of its group."""
        for part in chain(*self.parts):
            box, state = part.box, dict(self.inner.state.get(part.tensor, {}))
            if part.has_copy:
                state[MASTER] = part.tensor
            for key, held in state.items():
                size = held.nbytes if isinstance(held, Tensor) else 0
                mine = turns.is_mine(box.copies, size) and box.is_owner
                yield self._entry(part, key, held, mine)
        everywhere = tuple(axis for axis in self.grid.spec.regions[0].axes if axis != "pp")
        mine = turns.is_mine(everywhere, 0)
        yield Value((CLASS,), type(self.inner).__name__, mine, repeats=True)
        for group, boxes in zip(self.optimizer.param_groups, self.groups, strict=True):
            options = {key: value for key, value in group.items() if key not in NO_OPTIONS}
            values = {key: Shared(value) for key, value in options.items()}
            alike = self._compared_along(boxes)
            for box in boxes:
                mine = turns.is_mine(box.copies, 0) and box.is_owner and box.is_first
                axes, names = alike.get(box.name, ((), ()))
                for key, value in values.items():
                    yield Value(_option(box, key), value, mine, copies=axes, of=names)

    def _compared_along(
        self, boxes: Sequence[SavedParameter]
    ) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
        """Choose a parameter of a group, whose options are compared for all, and the axes to do it.

        Slices of one parameter have equal options too, so these are all axes but those along which
        ranks have other parameters.

        Returns:
            By the first parameter of each region, the axes, and the region's parameters.
        """
        by_region: dict[str, list[str]] = {}
        for box in boxes:
            region = self._model.placements[box.name].region
            by_region.setdefault(region, []).append(box.name)
        others, layouts = {"pp", "ep"}, self.grid.spec.layouts
        dense = layouts["dense"]
        return {
            names[0]: (
                tuple(axis for axis in layouts.get(region, dense).shape if axis not in others),
                tuple(names),
            )
            for region, names in by_region.items()
        }

    def _entry(self, part: UpdatedPart, key: str, held: Any, mine: bool) -> Item | Value:
        # Of a parameter that is cut every part says the same; the first one does for all.
        first = part.start == 0 and part.box.is_first
        if not isinstance(held, Tensor):
            return Value(part.path(key), held, mine and first, copies=part.box.copies)
        if held.shape == part.tensor.shape and (held.dim() or not part.box.shape):
            chunks, copies = part.chunks(held), part.box.copies
            return Item(part.path(key), part.box.shape, chunks, held.dtype, mine, copies=copies)
        if held.dim() == 0:
            copies = part.box.copies
            return whole(part.path(key), local_part(held), writes=mine and first, copies=copies)
        raise SpecError(
            f"{part.box.name}: the optimizer's {key!r} of shape {tuple(held.shape)} belongs to "
            f"a part of shape {tuple(part.tensor.shape)}; expected that shape, or one number, as "
            "element-wise optimizers have"
        )

    # -- reading ------------------------------------------------------------------------

    def targets(self, stored: Mapping[str, Any], turns: Turns) -> Iterator[Item | Value]:
        """Yield the items to read, with new tensors, which `take` puts in place.

        Args:
            stored: torch's metadata by key.
            turns: which of the ranks that read something compares its checksum.

        Raises:
            CheckpointError: no optimizer was saved, another one, or with other groups.
        """
        if CLASS in stored:
            yield Value((CLASS,))
        if not any(key.startswith("optimizer.") for key in stored):
            raise CheckpointError(
                "it has no optimizer state; load the model alone, or save with optimizer="
            )
        self._found: dict[str, dict[str, Tensor | Value]] = {}
        self._options: dict[str, list[Value]] = {}
        keys = _keys_by_parameter(stored)
        expected = set(self.inner.defaults)  # another version of torch may have some more
        for box in chain(*self.groups):
            options = keys["param_groups"].get(box.name, set()) - NO_OPTIONS
            if not options or (expected - options and options - expected - OF_SCHEDULERS):
                raise CheckpointError(
                    f"its optimizer has {_listed(options)} for {box.name}, but "
                    f"{type(self.inner).__name__} needs {_listed(expected)}; it was saved with "
                    "another optimizer, or this parameter was not trained"
                )
            self._options[box.name] = [Value(_option(box, key)) for key in sorted(options)]
            yield from self._options[box.name]
        for part in chain(*self.parts):
            state = keys["state"].get(part.box.name, set())
            found = self._found[part.box.name] = {}
            for key in sorted(state - {MASTER}):
                target = self._target(part, key, stored[key_of(part.path(key))], turns)
                found[key] = target if isinstance(target, Value) else target[1]
                yield target if isinstance(target, Value) else target[0]
            if part.has_copy:
                path = part.path(MASTER) if MASTER in state else ("model", part.box.name)
                item, found[MASTER] = self._made(part, path, part.tensor.dtype, turns)
                yield item

    def _target(
        self, part: UpdatedPart, key: str, stored: Any, turns: Turns
    ) -> Value | tuple[Item, Tensor]:
        if not isinstance(stored, TensorStorageMetadata):
            return Value(part.path(key))
        dtype = stored.properties.dtype
        if tuple(stored.size) == part.box.shape:
            return self._made(part, part.path(key), dtype, turns)
        if len(stored.size) == 0:
            made = torch.zeros((), dtype=dtype)
            return whole(part.path(key), made), made
        raise CheckpointError(
            f"its {key_of(part.path(key))} has shape {tuple(stored.size)}, but the parameter has "
            f"{part.box.shape}"
        )

    @staticmethod
    def _made(
        part: UpdatedPart, path: tuple[str, ...], dtype: torch.dtype, turns: Turns
    ) -> tuple[Item, Tensor]:
        """A new tensor of a part's shape, and the item that fills it."""
        made = torch.empty_like(part.tensor, dtype=dtype, requires_grad=False)
        chunks = part.chunks(made)
        if sum(chunk.data.numel() for chunk in chunks) < made.numel():
            made.zero_()  # as is what pads a vocabulary, which is not saved
        mine = turns.is_mine(part.box.copies, made.nbytes)
        return Item(path, part.box.shape, chunks, dtype, mine), made

    @property
    def keys(self) -> list[str]:
        """One for each parameter that it updates."""
        return [key_of(_option(box, "")) for box in chain(*self.groups)]

    def check_options(self, read: Mapping[str, Any]) -> None:
        """Refuses another optimizer's state, and groups whose parameters were in different ones.

        Args:
            read: the values that were read, by key.

        Raises:
            CheckpointError: names the class, or two parameters and the option.
        """
        saved, mine = read.get(CLASS), type(self.inner).__name__
        if saved not in (None, mine):
            raise CheckpointError(f"its optimizer is {saved}, and here is {mine}")
        for boxes in self.groups:
            for box in boxes[1:]:
                first, other = (self._options_of(one, read) for one in (boxes[0], box))
                for key in sorted(first.keys() | other.keys()):
                    if not _same(first.get(key), other.get(key)):
                        raise CheckpointError(
                            f"its optimizer has {key}={first.get(key)} for {boxes[0].name} and "
                            f"{other.get(key)} for {box.name}, which here are in one group; "
                            "make the groups that it was saved with"
                        )

    def _options_of(self, box: SavedParameter, read: Mapping[str, Any]) -> dict[str, Any]:
        found = self._options[box.name]
        return {value.path[1].rpartition(".")[2]: read[value.key] for value in found}

    def take(self, read: Mapping[str, Any]) -> None:
        """Puts what was read in place; the model's weights are there already."""
        state: dict[int, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        index = 0
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.reload()
        for outer, boxes, parts in zip(
            self.optimizer.param_groups, self.groups, self.parts, strict=True
        ):
            own = {key: value for key, value in outer.items() if key not in NO_OPTIONS}
            options = self._options_of(boxes[0], read) if boxes else {}
            for key, value in options.items():
                if isinstance(value, Tensor) and isinstance(own.get(key), Tensor):
                    options[key] = value.to(own[key].device)
            groups.append({**own, **options, "params": list(range(index, index + len(parts)))})
            for part in parts:
                found = dict(self._found[part.box.name])
                master = found.pop(MASTER, None)
                if isinstance(master, Tensor):
                    part.tensor.data.copy_(master)
                entries = {
                    key: read[held.key] if isinstance(held, Value) else held
                    for key, held in found.items()
                }
                if entries:
                    state[index] = entries
                index += 1
        for group, inner in zip(groups, self.inner.param_groups, strict=True):
            group.update({key: inner[key] for key in ("param_names",) if key in inner})
        self.inner.load_state_dict({"state": state, "param_groups": groups})
        if self.inner is not self.optimizer:
            pairs = zip(self.optimizer.param_groups, self.inner.param_groups, strict=True)
            for outer, inner in pairs:
                outer.update({key: value for key, value in inner.items() if key not in NO_OPTIONS})


def _parts(
    optimizer: torch.optim.Optimizer, model: ModelState
) -> Iterator[tuple[int, UpdatedPart]]:
    """The parts of parameters, by the id of the optimizer's tensor."""
    if not isinstance(optimizer, ShardedOptimizer):
        for name, placement in model.placements.items():
            yield id(placement.parameter), UpdatedPart(model.boxes[name], placement.parameter)
        return
    by_id = {id(p.parameter): p for p in model.placements.values()}
    for piece, tensor, cut_over in optimizer.parts():
        parameter = piece.slot.parameter
        box = model.box_of(by_id[id(parameter)], cut_over)
        start, stop = (0, None) if piece.is_whole else (piece.start, piece.stop)
        yield id(tensor), UpdatedPart(box, tensor, start, stop, tensor.dtype != parameter.dtype)


def _option(box: SavedParameter, key: str) -> Path:
    """The name of an option of the group that a parameter is in."""
    return "optimizer", f"param_groups.{box.name}.{key}"


def _keys_by_parameter(stored: Mapping[str, Any]) -> dict[str, dict[str, set[str]]]:
    """The last names of the keys, by kind and parameter."""
    found: dict[str, dict[str, set[str]]] = {"state": {}, "param_groups": {}}
    for key in stored:
        for kind, names in found.items():
            prefix = f"optimizer.{kind}."
            if key.startswith(prefix):
                name, _, last = key[len(prefix) :].rpartition(".")
                names.setdefault(name, set()).add(last)
    return found


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def _listed(keys: set[str]) -> str:
    return ", ".join(sorted(keys)) or "nothing"
