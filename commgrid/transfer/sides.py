"""The two sides of a transfer on this rank, made anew for every run: models and optimizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from commgrid.checkpoint.agreement import compare_members, members_of
from commgrid.equality.digest import digest
from commgrid.equality.lost_numbers import refuse_lost, summed
from commgrid.errors import GridMismatchError, SpecError, TransferError
from commgrid.resharding.dtypes import scales_beside
from commgrid.resharding.holders import Turns
from commgrid.resharding.item import Item, Value, key_of, local_part, refuse_unwritable
from commgrid.resharding.layouts import Form
from commgrid.resharding.local_boxes import LocalBoxes, refuse_one_memory, refuse_overlaps
from commgrid.resharding.model_state import ModelState
from commgrid.resharding.naming import (
    Tied,
    copy_of,
    first_name,
    not_taken,
    read_from,
    shared_in,
    with_twins,
)
from commgrid.resharding.optimizer_state import Optimizers, OptimizerState
from commgrid.runtime.grid import HyperCommGrid
from commgrid.transfer.conversion import Convert
from commgrid.transfer.models import (
    Looked,
    Model,
    Names,
    Part,
    items_of,
    several,
    stateful,
    tensors_of,
)
from commgrid.transfer.sent_boxes import SentBoxes
from commgrid.transfer.shared_boxes import SharedBoxes

_OPTIONS, _STATE = "optimizer.param_groups.", "optimizer.state."


@dataclass
class OneSide(ABC):
    """This rank's part of one side.

    Args:
        model: None: nothing.
        grid: None: this rank is not on that side.
        optimizer: whose state is moved; None: none is.
        names: what is moved, and what it is called.

    Attributes:
        what: the side's name.
        held: since `hold` was called last; of a target's optimizer state, new tensors.
        ties: the names of each tied weight of either side, under the first of which it is moved.
    """

    what: ClassVar[str]
    model: Model | None
    grid: HyperCommGrid | None
    optimizer: Optimizers | None
    names: Names
    held: LocalBoxes | None = field(default=None, init=False)
    ties: Sequence[set[str]] = field(default=(), init=False)
    _looked: Looked | None = field(default=None, init=False)  # by `tied`, for the first `hold`
    _state: ModelState | None = field(default=None, init=False)
    _seen: list[Any] = field(default_factory=list, init=False)

    def tied(self) -> Tied:
        """The names of this rank's tied weights, as they are moved."""
        if self.grid is None or self.model is None or isinstance(self.model, Mapping):
            return {}, []
        self._looked = items_of(self.model, self.grid, self.names.rows_of(self.what))
        items, state = self._looked
        parts = [part for item in items for part in self.names.parts_of(self.what, item)]
        aliases = state.aliases if state is not None else []
        return shared_in(parts), self.names.tied(self.what, aliases)

    def hold(self) -> LocalBoxes | None:
        """Looks at the model and its optimizer, once more before every run.

        Without an optimizer a model is not looked at again while it has the same tensors.
        """
        if self.grid is None:
            return None
        if self.optimizer is None and self._is_as_seen():
            return self.held
        self._seen, self.held = [], LocalBoxes()
        if self.model is None:
            return self.held
        looked, self._looked = self._looked, None
        items, self._state = looked or items_of(
            self.model, self.grid, self.names.rows_of(self.what)
        )
        self._fill(self.held, items, self.grid)
        self._seen = tensors_of(self.model)
        return self.held

    def _is_as_seen(self) -> bool:
        """Whether the model has the tensors that it had at the last look, where they were."""
        if self.model is None or not self._seen:
            return False
        if self._state is not None:
            self._state.settle()
        return tensors_of(self.model) == self._seen

    @property
    def place(self) -> tuple[int, ...]:
        """Coordinates on the axes along which ranks are no replicas of one another."""
        if self.grid is None:
            return ()
        coordinate = self.grid.spec.layout("dense").coordinate(self.grid.rank)
        same = {axis for axis in coordinate if axis == "cp" or axis.startswith("dp")}
        return tuple(index for axis, index in coordinate.items() if axis not in same)

    @property
    def has_members(self) -> bool:
        """Whether its grid has an axis along which ranks may have other models."""
        return self._state is not None and bool(self._state.own_axes)

    @abstractmethod
    def _fill(self, held: LocalBoxes, items: Iterable[Item], grid: HyperCommGrid) -> None:
        """Adds the tensors of the model and its optimizer."""


@dataclass
class SourceSide(OneSide):
    """This rank's part of the source.

    Args:
        given: conversions; none: tensors are sent as they are.
        room: bytes of converted tensors that are kept.

    Attributes:
        sent: the boxes to send where some are converted; None: `held`.
        values: an optimizer's that are no tensors, which this rank tells.
        more: the keys of these; None: there is no optimizer.
        scales: by name of a tensor of eight bits that is moved the scales beside it, under the
            names that they are moved with, or that they have if they are not.
    """

    what = "source"
    given: Sequence[Convert] = ()
    room: int = 0
    sent: SentBoxes | None = field(default=None, init=False)
    values: dict[str, Any] = field(default_factory=dict, init=False)
    more: tuple[str, ...] | None = field(default=None, init=False)
    scales: dict[str, list[str]] = field(default_factory=dict, init=False)
    _optimizer_state: OptimizerState | None = field(default=None, init=False)
    _items: list[Item] = field(default_factory=list, init=False)

    def hold(self) -> LocalBoxes | None:
        before, held = self.held, super().hold()
        if held is not None and held is not before and self.given:
            self.sent = SentBoxes(held, self.given, self.names, self.room)
        return held

    @property
    def sending(self) -> LocalBoxes | None:
        """The boxes to send."""
        return self.held if self.sent is None else self.sent

    @property
    def has_twins(self) -> bool:
        """Whether this rank has two tensors that are one weight of the target."""
        return bool(self.ties) and any(True for _ in self._twins())

    def _twins(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        names = {min(tied) for tied in self.ties}
        twice = self.held.twice if self.held is not None else ()
        return (each for each in twice if first_name(each[0], self.ties) == each[0] in names)

    def compare_twins(self) -> None:
        """Refuse different numbers on this rank for one weight of the target.

        Raises:
            TransferError: names both of its names.
        """
        for name, one, other in self._twins():
            if int(digest(one)) != int(digest(other)):
                tied = " and ".join(sorted(next(each for each in self.ties if name in each)))
                raise TransferError(
                    f"{tied} are one weight of the target, and differ in the source; untie them, "
                    "or have rename= return None for one"
                )

    def compare_members(self) -> None:
        """As `agreement.compare_members`; collective over the source."""
        if self._state is not None:
            compare_members(self._items, self._state)

    def _fill(self, held: LocalBoxes, items: Iterable[Item], grid: HyperCommGrid) -> None:
        values: list[Value] = []
        self._items = list(items)
        items = self._items
        called: dict[str, str] = {}
        dtypes = {item.path[-1]: item.form.dtype for item in items}
        self.scales = {}
        for item in items:
            for part in self.names.parts_of(self.what, item):
                name = part.path[-1]
                other = called.setdefault(name, item.path[-1])
                first = first_name(name, self.ties)
                if other != item.path[-1] and not held.has(first, part.chunks):
                    raise SpecError(
                        f"rename= calls both {other} and {item.path[-1]} of the source {name}; "
                        "give each a name of its own"
                    )
                held.add(part, first)
        named: dict[str, list[str]] = {}
        for name, own in called.items():
            named.setdefault(own, []).append(name)
        for own, scales in scales_beside(dtypes).items():
            for name in named.get(own, ()):
                told = [to for each in scales for to in named.get(each, [each])]
                self.scales[first_name(name, self.ties)] = [first_name(t, self.ties) for t in told]
        if self.optimizer is not None:
            self._optimizer_state = OptimizerState(self.optimizer, stateful(self._state))
            for one in self._optimizer_state.items(Turns(grid)):
                if isinstance(one, Item):
                    held.add(one, first_name(one.key, self.ties))
                else:
                    values.append(one)
            self.more = tuple(value.key for value in values)
        self.values = {value.key: value.value for value in values if value.writes}

    def check_values(self) -> None:
        """As `OptimizerState.check_values`; collective over the source."""
        if self._optimizer_state is not None:
            self._optimizer_state.check_values()

    def compare_copies(self, shared: SharedBoxes) -> None:
        """Refuses to send one of several copies that differ.

        Collective over both sides.

        Raises:
            GridMismatchError: names tensor and ranks.
        """
        told = shared.differing(self.held)
        if told is not None:
            axes = self._state.own_axes if self._state is not None else ()
            advice = members_of(axes, 'where copies may differ, say copies="any"')
            raise GridMismatchError(
                f"{told}; these should be copies, of which any may be sent. Give slices in a "
                "mapping as Part(tensor, shape, offset), and tensors of different stages the names "
                f"that they have in the whole model; {advice}"
            )


@dataclass
class TargetSide(OneSide):
    """This rank's part of the target.

    Attributes:
        more: the parameters that its optimizer updates; None: there is none.
        wants: whether the source has an optimizer.
    """

    what = "target"
    more: tuple[str, ...] | None = field(default=None, init=False)
    wants: bool = field(default=False, init=False)
    _optimizer_state: OptimizerState | None = field(default=None, init=False)
    _stored: dict[str, Form | None] = field(default_factory=dict, init=False)
    _writable: tuple[LocalBoxes, bool] | None = field(default=None, init=False)  # when it was so
    _told: frozenset[str] = field(default=frozenset(), init=False)
    _merges: list[Callable[[], None]] = field(default_factory=list, init=False)

    def hold(self) -> LocalBoxes | None:
        held, mode = super().hold(), torch.is_inference_mode_enabled()
        if held is not None and self._writable != (held, mode):
            for part in held.parts:
                refuse_unwritable(part.name, part.tensor)
            self._writable = held, mode
        return held

    def take_offer(self, forms: Mapping[str, Form], values: Iterable[str]) -> None:
        """Hears what the source has.

        Args:
            forms: its tensors by the target's names.
            values: keys of its optimizers' values that are no tensors.
        """
        self._told = frozenset(values)
        stored: dict[str, Form | None] = {
            name if name.startswith(_STATE) else f"model.{name}": form
            for name, form in forms.items()
        }
        self._stored = with_twins(stored | dict.fromkeys(self._told), self.ties)
        self.wants = bool(self._told)

    def _fill(self, held: LocalBoxes, items: Iterable[Item], grid: HyperCommGrid) -> None:
        self._merges = []
        for item in items:
            for part in self.names.parts_of(self.what, item):
                name = part.path[-1]
                read = key_of(read_from(part, self._stored)).removeprefix("model.")
                if (form := self._stored.get(part.key)) is not None:
                    part, merge = part.fitted(form.shape)
                    self._merges += [merge] if merge is not None else []
                held.add(part, name, first_name(read, self.ties))
        # A module has one part of each parameter, and a table may tie two.
        if isinstance(self.model, Mapping) or self.names.cuts_target:
            refuse_overlaps(held)
        if self.optimizer is not None and not self.wants:
            raise TransferError(
                "the target has an optimizer and the source has none; give both, "
                "optimizer=(source's, target's), or neither"
            )
        if self.optimizer is not None:
            self._optimizer_state = OptimizerState(self.optimizer, stateful(self._state))
            self.more = tuple(self._optimizer_state.updated)
            for one in self._optimizer_state.targets(self._stored, Turns(grid)):
                if isinstance(one, Item) and one.path[0] == "model":  # an fp32 copy that starts so
                    name = key_of(copy_of(one.path))
                    read = first_name(one.path[-1], self.ties)
                    held.add(one, name, read)
                elif isinstance(one, Item):
                    held.add(one, source=first_name(one.key, self.ties))
        refuse_one_memory(held)

    def check_offer(self, updated: Iterable[str]) -> None:
        """Refuses state that no rank of the target takes.

        Args:
            updated: the parameters that the target's optimizers update.

        Raises:
            TransferError: names parameters.
        """
        known = {*updated}
        known = known.union(*(names for names in self.ties if names & known))
        there = self._stored if self.wants else ()
        unknown = sorted(key.removeprefix(_OPTIONS) for key in not_taken(there, known))
        if unknown and not known:
            raise TransferError(
                "the source has an optimizer and the target has none; give both, "
                "optimizer=(source's, target's), or neither"
            )
        if unknown:
            raise TransferError(
                f"the source's optimizer updates {', '.join(unknown[:3])}"
                f"{f' and {len(unknown) - 3} more' if len(unknown) > 3 else ''}, which no "
                "optimizer of the target does; "
                "give the target an optimizer of these, or freeze them"
            )

    def begin(self, values: Mapping[str, Any]) -> None:
        """Refuses another optimizer's state, and numbers it loses, before anything moves."""
        if self._optimizer_state is not None:
            values = with_twins(values, self.ties)
            missing = sorted(self._told - values.keys())
            if missing:
                raise TransferError(
                    f"no rank of the source gave {missing[0]}, and {len(missing) - 1} more; give "
                    "optimizer=(source's, target's) on all of its ranks"
                )
            self._optimizer_state.check_options(values)
            refuse_lost(summed(self._optimizer_state.lost_in_values(values)), TransferError)

    def clear_padding(self) -> None:
        """Make tensors zero that have padding, before they get new numbers."""
        padded = [name for name in self.names.padded if self.names.has(name)]
        if self._state is not None:
            self._state.clear_padding(padded)
        elif isinstance(self.model, Mapping):
            for name in padded:
                for each in several(self.model.get(name, ())):
                    local_part(each.tensor if isinstance(each, Part) else each).zero_()

    def finish(self, values: Mapping[str, Any]) -> None:
        """Puts optimizer state in place; or tells optimizers that there are new weights."""
        for merge in self._merges:
            merge()
        if self._optimizer_state is not None:
            with torch.no_grad():
                self._optimizer_state.take(with_twins(values, self.ties))
        elif self._state is not None:
            self._state.tell_loaded()
