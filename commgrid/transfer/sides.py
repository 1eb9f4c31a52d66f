"""The two sides of a transfer on this rank, made anew for every run: models and optimizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from commgrid.checkpoint.boxes import Turns
from commgrid.checkpoint.items import Item, Shared, Value, key_of
from commgrid.checkpoint.optimizer_state import OptimizerState, copy_of
from commgrid.checkpoint.saving import differing_copies
from commgrid.errors import GridMismatchError, SpecError, TransferError
from commgrid.transfer.held import Held, Model, Names, TransferredModel, mapped_items, tensors_of
from commgrid.transfer.layouts import Form

if TYPE_CHECKING:
    from commgrid.runtime.grid import HyperCommGrid


_OPTIONS = "optimizer.param_groups."


@dataclass(frozen=True)
class Offer:
    """What a source's optimizer has beside tensors, as a target has to know it.

    Args:
        keys: of all values.
    """

    keys: tuple[str, ...]


@dataclass
class OneSide(ABC):
    """What this rank has of one side.

    Args:
        model: None: nothing.
        grid: None: this rank is not on that side.
        optimizer: whose state is moved; None: none is.
        names: what is moved, and what it is called.

    Attributes:
        held: since `hold` was called last; of a target's optimizer state, new tensors.
    """

    model: Model | None
    grid: HyperCommGrid | None
    optimizer: torch.optim.Optimizer | None
    names: Names
    held: Held | None = field(default=None, init=False)
    _state: TransferredModel | None = field(default=None, init=False)
    _seen: list[Any] = field(default_factory=list, init=False)

    @property
    @abstractmethod
    def what(self) -> str:
        """Which side it is, for messages."""

    def hold(self) -> Held | None:
        """Looks at the model and its optimizer, once more before every run.

        Without an optimizer a model is not looked at again while it has the same tensors.
        """
        if self.grid is None:
            return None
        if self.optimizer is None and self._is_as_seen():
            return self.held
        self._seen, self.held = [], Held()
        if self.model is None:
            return self.held
        items, self._state = _items_of(self.model, self.grid)
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

    @abstractmethod
    def _fill(self, held: Held, items: Iterable[Item], grid: HyperCommGrid) -> None:
        """Adds the tensors of the model and its optimizer."""


@dataclass
class SourceSide(OneSide):
    """What this rank has of the source.

    Attributes:
        values: an optimizer's that are no tensors, which this rank tells.
        more: what targets have to know of these; None: there is no optimizer.
    """

    values: dict[str, Any] = field(default_factory=dict, init=False)
    more: Offer | None = field(default=None, init=False)
    _items: list[Item] = field(default_factory=list, init=False)

    @property
    def what(self) -> str:
        return "source"

    def _fill(self, held: Held, items: Iterable[Item], grid: HyperCommGrid) -> None:
        values: list[Value] = []
        self._items.clear()
        for item in items:
            name = self.names.of_source(item.path[-1])
            if self.names.has(name):
                held.add(name, item.shape, item.dtype, item.chunks)
                self._items.append(item)
        if self.optimizer is not None:
            for one in OptimizerState(self.optimizer, _with(self._state)).items(Turns(grid)):
                if isinstance(one, Item):
                    held.add(one.key, one.shape, one.dtype, one.chunks)
                    self._items.append(one)
                else:
                    values.append(one)
            self.more = Offer(tuple(value.key for value in values))
        self.values = {value.key: _plain(value) for value in values if value.writes}

    @property
    def knows_copies(self) -> bool:
        """Whether it says which ranks should have copies, or is not on that side."""
        return self.grid is None or isinstance(self.model, Sequence | nn.Module)

    def compare_copies(self) -> None:
        """Refuses to send one of several copies that differ; collective over the source's grid.

        Raises:
            GridMismatchError: names tensor and ranks.
        """
        told = differing_copies(self._items, self.grid) if self.grid is not None else None
        if told is not None:
            raise GridMismatchError(
                f"{told}; these should be copies, of which any may be sent. Make them equal, or "
                'where they may differ say Transfer(…, copies="any")'
            )


@dataclass
class TargetSide(OneSide):
    """What this rank has of the target.

    Attributes:
        more: the parameters that its optimizer updates; None: there is none.
        wants: whether the source has an optimizer.
    """

    more: tuple[str, ...] | None = field(default=None, init=False)
    wants: bool = field(default=False, init=False)
    _optimizer_state: OptimizerState | None = field(default=None, init=False)
    _offered: dict[str, Form] = field(default_factory=dict, init=False)
    _stored: dict[str, Any] = field(default_factory=dict, init=False)

    @property
    def what(self) -> str:
        return "target"

    def take_offer(self, forms: Mapping[str, Form], offers: Iterable[Offer]) -> None:
        """Hears what the source has.

        Args:
            forms: its tensors by the target's names.
            offers: of its ranks with an optimizer.
        """
        self._offered = dict(forms)
        self._stored = {
            name: TensorStorageMetadata(
                TensorProperties(dtype=getattr(torch, form.dtype)), torch.Size(form.shape), []
            )
            for name, form in forms.items() if name.startswith("optimizer.")
        }  # fmt: skip
        values = {key: BytesStorageMetadata() for offer in offers for key in offer.keys}
        self._stored.update(values)
        self.wants = bool(values)

    def _fill(self, held: Held, items: Iterable[Item], grid: HyperCommGrid) -> None:
        for item in items:
            name = item.path[-1]
            if self.names.has(name):
                held.add(name, item.shape, item.dtype, item.chunks, self._read_from(item))
        if self.optimizer is not None and not self.wants:
            raise TransferError(
                "the target has an optimizer and the source has none; give both, "
                "optimizer=(source's, target's), or neither"
            )
        if self.optimizer is not None:
            self._optimizer_state = OptimizerState(self.optimizer, _with(self._state))
            self.more = tuple(self._optimizer_state.keys)
            for one in self._optimizer_state.targets(self._stored):
                if isinstance(one, Item) and one.path[0] == "model":  # an fp32 copy that starts so
                    name = key_of(copy_of(one.path))
                    held.add(name, one.shape, one.dtype, one.chunks, one.path[-1])
                elif isinstance(one, Item):
                    held.add(one.key, one.shape, one.dtype, one.chunks)

    def _read_from(self, item: Item) -> str:
        """What a tensor of the model is read from, where an fp32 copy says more than a weight."""
        name = item.path[-1]
        copy = key_of(copy_of(item.path))
        if copy not in self._offered or name not in self._offered:
            return ""
        given: torch.dtype = getattr(torch, self._offered[name].dtype)
        return copy if torch.promote_types(item.dtype, given) != given else ""

    def check_offer(self, offers: Iterable[Offer], wants: Iterable[tuple[str, ...]]) -> None:
        """Refuses state that no rank of the target takes.

        Args:
            offers: of the source's ranks with an optimizer.
            wants: of the target's, the parameters that it updates.

        Raises:
            TransferError: names parameters.
        """
        there = {
            f"{key.rpartition('.')[0]}."
            for offer in offers
            for key in offer.keys if key.startswith(_OPTIONS)
        }  # fmt: skip
        known = {key for keys in wants for key in keys}
        if there and not known:
            raise TransferError(
                "the source has an optimizer and the target has none; give both, "
                "optimizer=(source's, target's), or neither"
            )
        unknown = sorted(key.removeprefix(_OPTIONS)[:-1] for key in there - known)
        if unknown:
            raise TransferError(
                f"the source's optimizer updates {', '.join(unknown[:3])}"
                f"{f' and {len(unknown) - 3} more' if len(unknown) > 3 else ''}, which no "
                "optimizer of the target does"
            )

    def begin(self, values: Mapping[str, Any]) -> None:
        """Refuses another optimizer's state, before anything moves."""
        if self._optimizer_state is not None:
            self._optimizer_state.check_options(values)

    def finish(self, values: Mapping[str, Any]) -> None:
        """Puts optimizer state in place; or tells optimizers that there are new weights."""
        if self._optimizer_state is not None:
            with torch.no_grad():
                self._optimizer_state.take(values)
        elif self._state is not None:
            self._state.tell_loaded()


def _items_of(model: Model, grid: HyperCommGrid) -> tuple[list[Item], TransferredModel | None]:
    """The tensors of a model, and what else is known of it; of a mapping nothing is."""
    if isinstance(model, Mapping):
        return mapped_items(model), None
    state = TransferredModel(model, grid)
    return state.tensors(), state


def _with(state: TransferredModel | None) -> TransferredModel:
    """What an optimizer's state goes with."""
    if state is None:
        raise SpecError("optimizer= goes with a module or a stage's chunks, not with a mapping")
    state.check_no_foreign()
    return state


def _plain(value: Value) -> Any:
    return value.value.value if isinstance(value.value, Shared) else value.value
