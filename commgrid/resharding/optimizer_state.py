"""An optimizer's state as items of a checkpoint, by the names of the parameters it is of.

The keys are torch's for flattened optimizer state: `state.<parameter>.exp_avg`, and
`param_groups.<parameter>.lr` for every option of the group that a parameter is in. Where half-
precision parameters are updated in an fp32 copy, that is `state.<parameter>.master`. A key that is
no such word stands as Python writes it: `state.<parameter>.[0]`, and `['master']` of an optimizer
that has one of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from commgrid.data_parallel.optimizer import ShardedOptimizer
from commgrid.equality.comparison import ByRank, Error, Fact, compare, ends_of
from commgrid.equality.lost_numbers import Lost, lost_numbers, refuse_lost
from commgrid.equality.values import exact_number_of
from commgrid.errors import CheckpointError, GridMismatchError, SpecError
from commgrid.replicas import groups_along
from commgrid.resharding.holders import SavedParameter, Turns, UpdatedPart
from commgrid.resharding.item import Item, Path, Shared, Value, key_of, local_part, whole
from commgrid.resharding.model_state import ModelState
from commgrid.resharding.naming import (
    MASTER,
    key_of_text,
    refuse_further_state,
    split_name,
    text_of,
)

CLASS = "optimizer_class"
OF_SCHEDULERS = {"base_momentum", "initial_lr", "max_lr", "max_momentum", "min_lr"}
"""Options that torch's learning rate schedulers add."""
NO_OPTIONS = {"params", "param_names"}  # of which every rank has others


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
        refuse_further_state(self.inner)
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
            box = part.box
            entries = {
                text_of(part.box.name, key): held for key, held in self._state_of(part).items()
            }
            if part.has_copy:
                entries[MASTER] = part.tensor
            for text, held in entries.items():
                size = held.nbytes if isinstance(held, Tensor) else 0
                mine = turns.is_mine(box.copies, size) and box.is_owner
                yield self._entry(part, text, held, mine)
        everywhere = tuple(axis for axis in self.grid.spec.regions[0].axes if axis != "pp")
        mine = turns.is_mine(everywhere, 0)
        yield Value((CLASS,), type(self.inner).__name__, mine, repeats=True)
        for group, boxes in zip(self.optimizer.param_groups, self.groups, strict=True):
            options = {key: value for key, value in group.items() if key not in NO_OPTIONS}
            values = {key: Shared(value) for key, value in options.items()}
            alike = _by_axes(boxes)
            for box in boxes:
                mine = turns.is_mine(box.copies, 0) and box.is_owner and box.is_first
                names = alike[box.parts]  # compared for all of them with the first
                axes, of = (box.parts, names) if box.name == names[0] else ((), ())
                for key, value in values.items():
                    yield Value(_option(box, key), value, mine, copies=axes, of=tuple(of))

    def _state_of(self, part: UpdatedPart) -> Mapping[Any, Any]:
        found: Mapping[Any, Any] = self.inner.state.get(part.tensor, {})
        return found

    def _entry(self, part: UpdatedPart, text: str, held: Any, mine: bool) -> Item | Value:
        # Of other than a number for each element, all parts say the same (`check_values`).
        first, path = part.start == 0 and part.box.is_first, part.path(text)
        copies = part.box.copies
        if not isinstance(held, Tensor):
            part.refuse_slices(text, held)
            return Value(path, held, mine and first, copies=copies)
        if part.is_like(held):
            return Item(path, part.box.shape, part.chunks(held), held.dtype, mine, copies=copies)
        if held.dim() == 0 or self._is_whole(part):
            return whole(path, local_part(held), writes=mine and first, copies=copies)
        raise SpecError(
            f"{part.box.name}: the optimizer's {text!r} of shape {tuple(held.shape)} belongs to "
            f"a part of shape {tuple(part.tensor.shape)}; expected that shape, or one number, as "
            "element-wise optimizers have, or a parameter of which every rank has all"
        )

    def _is_whole(self, part: UpdatedPart) -> bool:
        """Whether a parameter is not cut, so that state of any shape is of all of it.

        LBFGS has its state of all parameters with the first.
        """
        cut = any(self.grid.size(axis) > 1 for axis in part.box.slices)
        of_all = tuple(local_part(part.tensor).shape) == part.box.shape and part.stop is None
        return of_all and not cut and "lbfgs" not in type(self.inner).__name__.lower()

    def check_values(self, copies: bool = True) -> None:
        """Refuse state of one parameter that is one for all of its parts, and differs.

        Collective over the ranks that have parts of the same parameters.

        Args:
            copies: False: ranks with copies of a parameter are not compared, but those with slices.

        Raises:
            GridMismatchError: names the parameter and two ranks.
        """
        said: dict[str, dict[str, Any]] = {}
        for part in chain(*self.parts):
            said[part.box.name] = {
                text_of(part.box.name, key): held
                for key, held in self._state_of(part).items()
                if not (isinstance(held, Tensor) and (held.dim() or part.is_like(held)))
            }
        facts = []
        by_axes = _by_axes(chain(*self.groups)) if copies else self._by_slices()
        for axes, names in by_axes.items():
            numbers = [exact_number_of(said[n]) if n in said else math.nan for n in names]
            for group in groups_along(axes, self.grid):
                facts.append(Fact(group, numbers, _differing(names, said)))
        wrong, _ = compare(facts, ())
        if wrong is not None:
            raise wrong

    def _by_slices(self) -> dict[tuple[str, ...], list[str]]:
        """The parameters' names by the axes along which ranks update other parts of them."""
        found: dict[tuple[str, ...], list[str]] = {}
        for box in chain(*self.groups):
            if isinstance(self.optimizer, ShardedOptimizer):
                placement = self._model.placements[box.name]
                box = self._model.box_of(placement, self.optimizer.cut_over(placement))
            found.setdefault(box.slices, []).append(box.name)
        return found

    # -- reading ------------------------------------------------------------------------

    def targets(
        self, stored: Mapping[str, Any], turns: Turns, strict: bool = True
    ) -> Iterator[Item | Value]:
        """Yield the items to read, with new tensors, which `take` puts in place.

        Args:
            stored: torch's metadata by key.
            turns: which of the ranks that read something compares its checksum.
            strict: False: parameters that were not trained before keep what they have.

        Raises:
            CheckpointError: no optimizer was saved, another one, or with other groups.
        """
        if CLASS in stored:
            yield Value((CLASS,))
        if not any(key.startswith("optimizer.") for key in stored):
            raise CheckpointError(
                "it has no optimizer state; load the model alone, or save with optimizer="
            )
        self._found: dict[str, dict[Any, Tensor | Value]] = {}
        self._copies: dict[str, Tensor] = {}
        self._options: dict[str, dict[str, Value]] = {}
        self._saved_as: dict[str, torch.dtype] = {}
        keys = self._keys_by_parameter(stored)
        expected = set(self.inner.defaults)  # another version of torch may have some more
        for box in chain(*self.groups):
            options = keys["param_groups"].get(box.name, set()) - NO_OPTIONS
            if not options and not strict:
                continue
            if not options or (expected - options and options - expected - OF_SCHEDULERS):
                raise CheckpointError(
                    f"its optimizer has {_listed(options)} for {box.name}, but "
                    f"{type(self.inner).__name__} needs {_listed(expected)}; it was saved with "
                    "another optimizer, or this parameter was not trained; strict=False of load "
                    "leaves parameters that were not trained as they are"
                )
            self._options[box.name] = {key: Value(_option(box, key)) for key in sorted(options)}
            yield from self._options[box.name].values()
        for part in chain(*self.parts):
            name, state = part.box.name, keys["state"].get(part.box.name, set())
            found = self._found[name] = {}
            if name not in self._options and key_of(("model", name)) not in stored:
                continue
            own = {str(key): key for key in self._state_of(part)}
            copied = MASTER in state and not self._has_own_master
            path = part.path(MASTER) if copied else ("model", name)
            weight = stored.get(key_of(path))
            if isinstance(weight, TensorStorageMetadata):
                self._saved_as[name] = weight.properties.dtype
            for text in sorted(state - {MASTER} if copied else state):
                target = self._target(part, text, stored[key_of(part.path(text))], turns)
                key = key_of_text(text, own)
                found[key] = target if isinstance(target, Value) else target[1]
                yield target if isinstance(target, Value) else target[0]
            if part.has_copy:
                item, self._copies[name] = self._made(part, path, part.tensor.dtype, turns)
                yield item

    @property
    def _has_own_master(self) -> bool:
        """Whether `master` of others' files is state of this optimizer, which makes no copies."""
        ours = isinstance(self.optimizer, ShardedOptimizer)
        return not ours and not type(self.inner).__module__.startswith("torch.optim")

    def _keys_by_parameter(self, stored: Mapping[str, Any]) -> dict[str, dict[str, set[str]]]:
        """The last names of the keys of this rank's parameters, by kind and parameter."""
        found: dict[str, dict[str, set[str]]] = {"state": {}, "param_groups": {}}
        names = {box.name for box in chain(*self.groups)}
        for key in stored:
            for kind, by_name in found.items():
                prefix = f"optimizer.{kind}."
                if key.startswith(prefix):
                    name, last = split_name(key[len(prefix) :], names)
                    by_name.setdefault(name, set()).add(last)
        return found

    def _target(
        self, part: UpdatedPart, text: str, stored: Any, turns: Turns
    ) -> Value | tuple[Item, Tensor]:
        if not isinstance(stored, TensorStorageMetadata):
            return Value(part.path(text))
        dtype = stored.properties.dtype
        if tuple(stored.size) == part.box.shape:
            return self._made(part, part.path(text), dtype, turns)
        if len(stored.size) == 0 or self._is_whole(part):
            made = torch.zeros(stored.size, dtype=dtype)
            return whole(part.path(text), made), made
        raise CheckpointError(
            f"its {key_of(part.path(text))} has shape {tuple(stored.size)}, but the parameter has "
            f"{part.box.shape}, and ranks have slices of it"
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
    def updated(self) -> list[str]:
        """Names of the parameters that it updates."""
        return [box.name for box in chain(*self.groups)]

    @property
    def untrained(self) -> list[str]:
        """Of those that `targets` leaves as they are, names that a checkpoint would have."""
        left = [name for name in self.updated if name not in self._options]
        return [f"optimizer.param_groups.{name}" for name in left]

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
        for group in self.groups:
            boxes = self._trained(group)
            for box in boxes[1:]:
                first, other = (self._options_of(one, read) for one in (boxes[0], box))
                for key in sorted(first.keys() | other.keys()):
                    if not _same(first.get(key), other.get(key)):
                        raise CheckpointError(
                            f"its optimizer has {key}={first.get(key)} for {boxes[0].name} and "
                            f"{other.get(key)} for {box.name}, which here are in one group; "
                            "make the groups that it was saved with"
                        )

    def _trained(self, boxes: Iterable[SavedParameter]) -> list[SavedParameter]:
        """Those of whose optimizer state something is read."""
        return [box for box in boxes if box.name in self._options]

    def _options_of(self, box: SavedParameter, read: Mapping[str, Any]) -> dict[str, Any]:
        return {key: read[value.key] for key, value in self._options[box.name].items()}

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
            trained = self._trained(boxes)
            options = self._options_of(trained[0], read) if trained else {}
            for key, value in options.items():
                if isinstance(value, Tensor) and isinstance(own.get(key), Tensor):
                    options[key] = value.to(own[key].device)
            groups.append({**own, **options, "params": list(range(index, index + len(parts)))})
            for part in parts:
                if part.box.name in self._copies:
                    part.tensor.data.copy_(self._copies[part.box.name])
                entries = {
                    key: read[held.key] if isinstance(held, Value) else held
                    for key, held in self._found[part.box.name].items()
                }
                if part.box.name not in self._options:
                    entries = dict(self._state_of(part))
                if entries:
                    state[index] = entries
                index += 1
        for group, inner in zip(groups, self.inner.param_groups, strict=True):
            group.update({key: inner[key] for key in ("param_names",) if key in inner})
        state = self._as_saved(state)
        self.inner.load_state_dict({"state": state, "param_groups": groups})
        self._keep_dtypes(state)
        if self.inner is not self.optimizer:
            pairs = zip(self.optimizer.param_groups, self.inner.param_groups, strict=True)
            for outer, inner in pairs:
                outer.update({key: value for key, value in inner.items() if key not in NO_OPTIONS})

    def _as_saved(self, state: Mapping[int, Mapping[Any, Any]]) -> dict[int, dict[Any, Any]]:
        """State on its parameters' devices, in their dtypes where it was saved in these.

        Raises:
            CheckpointError: numbers are too large or too small for a parameter's dtype.
        """
        found: dict[int, dict[Any, Any]] = {}
        lost: dict[str, Lost] = {}
        for index, part in enumerate(chain(*self.parts)):
            before = self._saved_as.get(part.box.name, part.tensor.dtype)
            for key, held in state.get(index, {}).items():
                now = held if key == "step" else _beside(part.tensor, held, before)
                found.setdefault(index, {})[key] = now
                if isinstance(held, Tensor) and now.dtype != held.dtype:
                    name = key_of(part.path(text_of(part.box.name, key)))
                    lost[name] = lost_numbers(held, now.dtype, held.numel())
        refuse_lost(lost, CheckpointError)
        return found

    def _keep_dtypes(self, state: Mapping[int, Mapping[Any, Any]]) -> None:
        """Undo torch's conversion of state to its parameter's dtype."""
        if type(self.inner).load_state_dict is not torch.optim.Optimizer.load_state_dict:
            return  # which says itself what it converts
        for index, part in enumerate(chain(*self.parts)):
            entries = {key: held for key, held in state.get(index, {}).items() if key != "step"}
            if entries:
                self.inner.state[part.tensor].update(entries)


def _beside(parameter: Tensor, held: Any, before: torch.dtype) -> Any:
    """Move state to its parameter's device; convert it if it had the parameter's dtype before.

    Args:
        before: the dtype that the parameter was saved in.
    """
    if isinstance(held, Tensor):
        return held.to(parameter.device, parameter.dtype if held.dtype == before else held.dtype)
    if isinstance(held, dict):
        return {key: _beside(parameter, each, before) for key, each in held.items()}
    if type(held) in (list, tuple):
        return type(held)(_beside(parameter, each, before) for each in held)
    return held


def _by_axes(boxes: Iterable[SavedParameter]) -> dict[tuple[str, ...], list[str]]:
    """The parameters' names by the axes along which ranks have parts or copies of them."""
    found: dict[tuple[str, ...], list[str]] = {}
    for box in boxes:
        found.setdefault(box.parts, []).append(box.name)
    return found


def _differing(names: Sequence[str], said: Mapping[str, Mapping[str, Any]]) -> Error:
    def told(place: int, by_rank: ByRank) -> GridMismatchError:
        one, other = sorted(rank for _, rank in ends_of(by_rank, place))
        entries = ", ".join(said.get(names[place], {})) or "an entry"
        return GridMismatchError(
            f"the optimizer's state of {names[place]}, in {entries}, differs between ranks {one} "
            f"and {other}, which have parts or copies of it; what is no tensor of the parameter's "
            "shape is saved once for all of them, and has to be equal"
        )

    return told


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


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def _listed(keys: set[str]) -> str:
    return ", ".join(sorted(keys)) or "nothing"
