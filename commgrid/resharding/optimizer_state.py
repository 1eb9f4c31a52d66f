"""An optimizer's state as items of a checkpoint, by the names of the parameters it is of.

The keys are torch's for flattened optimizer state: `state.<parameter>.exp_avg`, and
`param_groups.<parameter>.lr` for every option of the group that a parameter is in. Where half-
precision parameters are updated in an fp32 copy, that is `state.<parameter>.master`. A key that is
no such word stands as Python writes it: `state.<parameter>.[0]`, and `['master']` of an optimizer
that has one of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from commgrid.data_parallel.optimizer import ShardedOptimizer
from commgrid.equality.comparison import ByRank, Error, Fact, compare, ends_of
from commgrid.equality.lost_numbers import Lost, lost_numbers
from commgrid.equality.values import exact_number_of, tensors_in
from commgrid.errors import CheckpointError, GridMismatchError, SpecError
from commgrid.replicas import groups_along
from commgrid.resharding.holders import (
    SavedParameter,
    Turns,
    UpdatedPart,
    check_optimizer,
    class_of,
    inner_of,
)
from commgrid.resharding.item import Item, Path, Value, key_of, local_part, whole
from commgrid.resharding.layouts import Form
from commgrid.resharding.model_state import ModelState
from commgrid.resharding.naming import MASTER, key_of_text, split_name, text_of

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
"""An optimizer; or several, each of which updates other parameters."""
CLASS = "optimizer_class"
"""The name of its class; of several optimizers an option of each parameter."""
OF_SCHEDULERS = {"base_momentum", "initial_lr", "max_lr", "max_momentum", "min_lr"}
"""Options that torch's learning rate schedulers add."""
NO_OPTIONS = {"params", "param_names"}  # of which every rank has others


class OptimizerState:
    """This rank's part of the state of an optimizer, or of several with other parameters each.

    Args:
        optimizer: of torch.optim, or a ShardedOptimizer, over the model's parameters; or a list.
        model: whose parameters they are.

    Raises:
        SpecError: the optimizer has parameters that the model has not.
    """

    def __init__(self, optimizer: Optimizers, model: ModelState) -> None:
        self._several = isinstance(optimizer, Sequence)
        self.optimizers: list[torch.optim.Optimizer]
        self.optimizers = [*optimizer] if isinstance(optimizer, Sequence) else [optimizer]
        self.grid, self._model = model.grid, model
        boxes = {id(p.parameter): model.boxes[name] for name, p in model.placements.items()}
        self.groups: list[list[SavedParameter]] = []
        self.parts: list[list[UpdatedPart]] = []
        self._owners: list[torch.optim.Optimizer] = []  # of each group
        for one in self.optimizers:
            check_optimizer(one)
            for group in one.param_groups:
                for parameter in group["params"]:
                    if id(parameter) not in boxes:
                        raise SpecError(
                            f"the optimizer updates a parameter of shape {tuple(parameter.shape)} "
                            "that the model does not have; give the model that it was made for"
                        )
                self.groups.append([boxes[id(parameter)] for parameter in group["params"]])
                self._owners.append(one)
            known = dict(_parts(one, model))
            for group in inner_of(one).param_groups:
                self.parts.append([known[id(tensor)] for tensor in group["params"]])
        twice = [name for name, times in Counter(self.updated).items() if times > 1]
        if twice or not self.optimizers:
            raise SpecError(
                f"optimizer={[*map(class_of, self.optimizers)]}: "
                f"{f'two update {twice[0]}' if twice else 'there is none in it'}; expected one of "
                "torch.optim, or a list of some that update other parameters each"
            )

    # -- writing ------------------------------------------------------------------------

    def items(self, turns: Turns) -> Iterator[Item | Value]:
        """Every entry of every parameter's state, and the options of its group."""
        for part in chain(*self.parts):
            box = part.box
            entries = {text_of(part.box.name, key): held for key, held in part.state.items()}
            if part.has_copy:
                entries[MASTER] = part.tensor
            for text, held in entries.items():
                size = held.nbytes if isinstance(held, Tensor) else 0
                mine = turns.is_mine(box.copies, size) and box.is_owner
                yield self._entry(part, text, held, mine)
        everywhere = tuple(axis for axis in self.grid.spec.regions[0].axes if axis != "pp")
        mine = turns.is_mine(everywhere, 0)
        if not self._several:
            yield Value((CLASS,), class_of(self.optimizers[0]), mine, repeats=True)
        every = chain.from_iterable(one.param_groups for one in self.optimizers)
        for group, boxes, owner in zip(every, self.groups, self._owners, strict=True):
            options = {key: value for key, value in group.items() if key not in NO_OPTIONS}
            options |= {CLASS: class_of(owner)} if self._several else {}
            alike = _by_axes(boxes)
            for box in boxes:
                mine = turns.is_mine(box.copies, 0) and box.is_owner and box.is_first
                names = alike[box.parts]  # compared for all of them with the first
                axes, of = (box.parts, names) if box.name == names[0] else ((), ())
                for key, value in options.items():
                    yield Value(_option(box, key), value, mine, copies=axes, of=tuple(of))

    def _entry(self, part: UpdatedPart, text: str, held: Any, mine: bool) -> Item | Value:
        # Of other than a number for each element, all parts say the same (`check_values`).
        path, copies = part.path(text), part.box.copies
        if not isinstance(held, Tensor):
            part.refuse_slices(text, held)
            return Value(path, held, mine and part.is_first, copies=copies)
        if part.is_like(held):
            return Item(path, part.box.shape, part.chunks(held), held.dtype, mine, copies=copies)
        if held.dim() == 0 or self._is_whole(part):
            return whole(path, local_part(held), writes=mine and part.is_first, copies=copies)
        raise SpecError(
            f"{part.box.name}: the optimizer's {text!r} of shape {tuple(held.shape)} belongs to "
            f"a part of shape {tuple(part.tensor.shape)}; expected that shape (with FSDP2 a "
            "DTensor, as of zeros_like(parameter)), or one number, or a parameter that is not cut"
        )

    def _is_whole(self, part: UpdatedPart) -> bool:
        """Whether a parameter is not cut, so that state of any shape is of all of it.

        LBFGS has its state of all parameters with the first.
        """
        cut = any(self.grid.size(axis) > 1 for axis in part.box.slices)
        of_all = tuple(local_part(part.tensor).shape) == part.box.shape and part.stop is None
        return of_all and not cut and "lbfgs" not in class_of(part.optimizer).lower()

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
                for key, held in part.state.items()
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
        for owner, boxes in zip(self._owners, self.groups, strict=True):
            for box in boxes:
                if isinstance(owner, ShardedOptimizer):
                    placement = self._model.placements[box.name]
                    box = self._model.box_of(placement, owner.cut_over(placement))
                found.setdefault(box.slices, []).append(box.name)
        return found

    # -- reading ------------------------------------------------------------------------

    def targets(
        self, stored: Mapping[str, Form | None], turns: Turns, strict: bool = True
    ) -> Iterator[Item | Value]:
        """Yield the items to read, with new tensors, which `take` puts in place.

        Args:
            stored: forms of a checkpoint's tensors by key; None: a value.
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
        each = zip(self._owners, self.groups, strict=True)
        for owner, box in ((owner, box) for owner, boxes in each for box in boxes):
            expected = set(inner_of(owner).defaults)  # another version of torch may have some more
            options = keys["param_groups"].get(box.name, set()) - NO_OPTIONS
            if not options and not strict:
                continue
            if not options or (expected - options and options - expected - OF_SCHEDULERS):
                raise CheckpointError(
                    f"its optimizer has {_listed(options)} for {box.name}, but "
                    f"{class_of(owner)} needs {_listed(expected)}; it was saved with "
                    "another optimizer, or this parameter was not trained; strict=False of load "
                    "leaves parameters that were not trained as they are"
                )
            self._options[box.name] = {key: Value(_option(box, key)) for key in sorted(options)}
            yield from self._options[box.name].values()
            if CLASS in keys["param_groups"][box.name]:
                yield Value(_option(box, CLASS))
        for part in chain(*self.parts):
            name, state = part.box.name, keys["state"].get(part.box.name, set())
            found = self._found[name] = {}
            self._saved_as[name] = part.tensor.dtype
            if name not in self._options and key_of(("model", name)) not in stored:
                continue
            own = {str(key): key for key in part.state}
            copied = MASTER in state and not self._keeps_master(part, stored)
            path = part.path(MASTER) if copied else ("model", name)
            weight = stored.get(key_of(path))
            if weight is not None:
                self._saved_as[name] = weight.torch_dtype
            for text in sorted(state - {MASTER} if copied else state):
                target = self._target(part, text, stored[key_of(part.path(text))], turns)
                key = key_of_text(text, own, is_torchs=not self._is_ours(part, stored))
                found[key] = target if isinstance(target, Value) else target[1]
                yield target if isinstance(target, Value) else target[0]
            if part.has_copy:
                item, self._copies[name] = part.made(path, part.tensor.dtype, turns)
                yield item

    def _keeps_master(self, part: UpdatedPart, stored: Mapping[str, Form | None]) -> bool:
        """Whether `master` is state of an optimizer; not where commgrid has saved a wider copy."""
        if self._is_ours(part, stored):
            paths = part.path(MASTER), ("model", part.box.name)
            forms = [stored.get(key_of(path)) for path in paths]
            sizes = [form.itemsize for form in forms if form is not None]
            if len(sizes) == 2 and sizes[0] > sizes[1]:
                return False
        own = part.optimizer
        return own in self.optimizers and not type(own).__module__.startswith("torch.optim")

    def _is_ours(self, part: UpdatedPart, stored: Mapping[str, Any]) -> bool:
        """Whether commgrid has saved a part's state, as the class of its optimizer says."""
        return CLASS in stored or key_of(_option(part.box, CLASS)) in stored

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
        self, part: UpdatedPart, text: str, stored: Form | None, turns: Turns
    ) -> Value | tuple[Item, Tensor]:
        mine = turns.is_mine(part.box.copies, 0) and part.box.is_owner and part.is_first
        if stored is None:
            return Value(part.path(text), writes=mine)
        dtype = stored.torch_dtype
        if text != "step":
            dtype = part.dtype_for(dtype, self._saved_as[part.box.name])
        if stored.shape == part.box.shape:
            return part.made(part.path(text), dtype, turns)
        if not stored.shape or self._is_whole(part):
            made = torch.zeros(stored.shape, dtype=dtype)
            return whole(part.path(text), made, writes=mine), made
        raise CheckpointError(
            f"its {key_of(part.path(text))} has shape {stored.shape}, but the parameter has "
            f"{part.box.shape}, and ranks have slices of it"
        )

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
        for owner, group in zip(self._owners, self.groups, strict=True):
            boxes, mine = self._trained(group), class_of(owner)
            for box in boxes:
                saved = read.get(key_of(_option(box, CLASS)), read.get(CLASS, mine))
                if saved != mine:
                    raise CheckpointError(
                        f"its optimizer is {saved}, and here is {mine}, which updates {box.name}"
                    )
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
        groups = zip(self.groups, self.parts, strict=True)
        for one in self.optimizers:
            self._give(one, [next(groups) for _ in one.param_groups], read)

    def _give(
        self,
        optimizer: torch.optim.Optimizer,
        held: Sequence[tuple[list[SavedParameter], list[UpdatedPart]]],
        read: Mapping[str, Any],
    ) -> None:
        """Give one optimizer its state.

        Args:
            held: of each of its groups, the parameters, and the parts that this rank updates.
            read: the values that were read, by key.
        """
        state: dict[int, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        index = 0
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.reload()
        for outer, (boxes, parts) in zip(optimizer.param_groups, held, strict=True):
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
                    entries = dict(part.state)
                if entries:
                    state[index] = entries
                index += 1
        inner, updated = inner_of(optimizer), [part for _, parts in held for part in parts]
        for group, mine in zip(groups, inner.param_groups, strict=True):
            group.update({key: mine[key] for key in ("param_names",) if key in mine})
        state = {
            number: {key: self._beside(updated[number], key, one) for key, one in entries.items()}
            for number, entries in state.items()
        }
        inner.load_state_dict({"state": state, "param_groups": groups})
        if type(inner).load_state_dict is torch.optim.Optimizer.load_state_dict:
            for number, part in enumerate(updated):  # torch has converted them
                entries = {k: held for k, held in state.get(number, {}).items() if k != "step"}
                if entries:
                    inner.state[part.tensor].update(entries)
        if inner is not optimizer:
            for outer, mine in zip(optimizer.param_groups, inner.param_groups, strict=True):
                outer.update({key: value for key, value in mine.items() if key not in NO_OPTIONS})

    def lost_in_values(self, read: Mapping[str, Any]) -> Iterator[tuple[str, Lost]]:
        """Count what tensors within values lose in their parameters' dtypes, on one rank of all.

        Args:
            read: the values that were read, by key.
        """
        for part in chain(*self.parts):
            for key, held in self._found[part.box.name].items():
                if isinstance(held, Value) and held.writes:
                    before, after = read[held.key], self._beside(part, key, read[held.key])
                    total = sum(tensor.numel() for tensor in tensors_in(before))
                    for one, other in zip(tensors_in(before), tensors_in(after), strict=True):
                        yield held.key, lost_numbers(one, other.dtype, total)

    def _beside(self, part: UpdatedPart, key: Any, held: Any) -> Any:
        """State on its parameter's device, in its dtype where it was saved in this."""
        return held if key == "step" else part.beside(held, self._saved_as[part.box.name])


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
            parameter = placement.parameter
            yield id(parameter), UpdatedPart(model.boxes[name], parameter, optimizer)
        return
    by_id, inner = {id(p.parameter): p for p in model.placements.values()}, optimizer.inner
    for piece, tensor, cut_over in optimizer.parts():
        parameter = piece.slot.parameter
        box = model.box_of(by_id[id(parameter)], cut_over)
        start, stop = (0, None) if piece.is_whole else (piece.start, piece.stop)
        has_copy = tensor.dtype != parameter.dtype
        yield id(tensor), UpdatedPart(box, tensor, inner, start, stop, has_copy)


def _option(box: SavedParameter, key: str) -> Path:
    """The name of an option of the group that a parameter is in."""
    return "optimizer", f"param_groups.{box.name}.{key}"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def _listed(keys: set[str]) -> str:
    return ", ".join(sorted(keys)) or "nothing"
