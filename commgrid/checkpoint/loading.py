"""Loading: every rank reads what it needs, and nothing is put in place before all have read."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from commgrid.checkpoint import folder as folders
from commgrid.checkpoint.agreement import (
    Call,
    Model,
    Progress,
    beside_a_disk,
    compare,
    everyone,
    failure,
    kind_of,
    reporter,
    tells_failures,
)
from commgrid.checkpoint.background import finish, settle
from commgrid.checkpoint.foreign_names import MODEL, Renamed, Source
from commgrid.checkpoint.reader import Stored
from commgrid.checkpoint.safetensors import Safetensors, has_scales
from commgrid.checkpoint.trust import Unread
from commgrid.checkpoint.values import extras_in, is_same_layout, offered
from commgrid.checkpoint.writer import Report
from commgrid.collectives.objects import at_first
from commgrid.equality.digest import digest
from commgrid.equality.lost_numbers import Lost, lost_by_all, lost_numbers, narrows, refuse_lost
from commgrid.errors import CheckpointError, SpecError
from commgrid.layout.ranks import whole_number
from commgrid.resharding.holders import Turns
from commgrid.resharding.item import Item, Value, key_of
from commgrid.resharding.layouts import counts_averages
from commgrid.resharding.model_state import ModelState
from commgrid.resharding.naming import (
    Naming,
    Rename,
    Tied,
    not_taken,
    read_from,
    shared_in,
    ties_of_all,
    twins,
)
from commgrid.resharding.optimizer_state import Optimizers, OptimizerState
from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.registry import get_grid

Names = tuple[list[str], list[str], list[str]]
"""Names that one stage tells: of its model; of those, what the checkpoint has not; parameters that
its optimizer updates."""


@dataclass(frozen=True)
class Restored:
    """What `load` has loaded.

    Args:
        step: the checkpoint's; None: it does not say.
        folder: the checkpoint's.
        extra: what was saved with it, without what would need `trusted=True`.
        extra_per_rank: what ranks of the saving grid had of their own, of those offered to this
            rank: on the same sizes what it had itself. On an axis that had more places, it is also
            what ranks at its place + n, + 2 n … had, n being the places now; on an axis that had
            fewer, ranks beyond get nothing.
        missing: with `strict=False`, the model's names that the checkpoint has not, and of
            parameters that were not trained `optimizer.param_groups.<parameter>`.
        unexpected: with `strict=False`, the checkpoint's names that the model has not.
        same_layout: whether each rank gets exactly what it had of its own. Else random states are
            not to be set: copies of a model need equal ones, so all begin with one seed.
    """

    step: int | None
    folder: Path
    extra: dict[str, Any]
    extra_per_rank: list[dict[str, Any]]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    same_layout: bool = False


def steps(folder: str | Path) -> list[int]:
    """The steps of which a folder has complete checkpoints, ascending."""
    path = folders.local(folder)
    found = [step for step, at in folders.complete(path).items() if not folders.half(at)]
    folders.warn_of_halves(path, max(found, default=-1))
    return found


@tells_failures
def load(
    folder: str | Path,
    model: Model,
    optimizer: Optimizers | None = None,
    *,
    step: int | None = None,
    prefix: str = MODEL,
    rename: Rename | None = None,
    padded: Mapping[str, int] | None = None,
    strict: bool = True,
    trusted: bool = False,
    progress: Progress = True,
    grid: HyperCommGrid | None = None,
) -> Restored:
    """Loads a checkpoint that any grid wrote, or one process; on all ranks of the grid.

    Also what torch.distributed.checkpoint has written by itself, Megatron-core's `torch_dist`, and
    a folder of safetensors files.

    Nothing is changed before every rank has read its part; until then parameters are held once more
    on the CPU, and optimizer state where it is going to be. Numbers of another precision
    are converted; where half-precision weights were saved with fp32 copies, wider ones are taken
    from these.

    Args:
        folder: of checkpoints, or one of these itself.
        model, optimizer: as `save` takes them, cut in any way; without an optimizer its state in
            the checkpoint is left alone.
        step: None: the last complete one.
        prefix: what the checkpoint's names of the model's tensors begin with; "" of a model's
            `state_dict()` that was saved by itself, and of most safetensors files.
        rename: what follows the prefix to the model's names: a mapping, in which names that stay
            may be left out, or a function, which returns None for what is to be left out; or
            `commgrid.transfer.mapping(…)`, where tensors are fused or stacked otherwise.
        padded: by the model's names, how many entries along dim 0 are no padding, such as rows of a
            vocabulary, where model or checkpoint has more; the model's padding becomes zero.
        strict: False: tensors of the model that the checkpoint has not keep their numbers, and what
            only the checkpoint has is left alone; both are returned. One must be in both.
        trusted: False: nothing in it runs code: tensors and plain values load, and what torch's
            `weights_only` makes. True: values of any type, which pickle makes by functions that the
            file names; for checkpoints of your own.
        progress, grid: as `save`'s.

    Raises:
        CheckpointError: on all ranks: no such checkpoint, half a one, or one of another model or
            optimizer, which has values of other types than plain ones; names what is missing or
            differs, and which ranks found it. Should a module refuse its extra state then, the
            error says that the model is not to be used.
        PeerFailedError, PeerTimeoutError: as `save`.
        UnknownGroupError: the grid has no group of all its ranks.
    """
    grid = grid or get_grid()
    group = everyone(grid)
    naming = Naming(prefix, rename, padded)

    def source(path: Path) -> Source:
        if folders.is_safetensors_folder(path):
            return Safetensors(path, scales=not has_scales(model))
        return Stored(path, trusted)

    def call() -> Call:
        finish(grid, group)
        if naming.cuts_target and optimizer is not None:
            raise SpecError(
                "optimizer= does not go with a rename= that cuts the model's tensors into parts; "
                "load the model alone, or save with the names of this model"
            )
        return {
            "step": step if step is None else whole_number("step", step, 0),
            "optimizer": kind_of(model, optimizer),
            "prefix": naming.prefix,
            "strict": strict,
            "trusted": trusted,
        }

    def choose(calls: list[Call]) -> tuple[int | None, Path]:
        compare(calls)
        with beside_a_disk(group, grid, at_whole=True):
            settle()
            return _found(folders.local(folder), step, trusted)

    found, path = at_first(group, call, choose, failure("nothing was loaded"))
    failed = failure(f"nothing was loaded from {path}")

    def plan() -> Names:
        with beside_a_disk(group, grid):
            return loading.plan()

    loading = Loading(grid, lambda: source(path), model, optimizer, strict, naming)
    loading.ties = at_first(group, loading.look, ties_of_all, failed)
    missing, unexpected = at_first(group, plan, loading.check_all, failed)
    what = "the model" if found is None else f"step {found}"
    line, report = reporter(progress, f"loading {what}", grid)

    def read() -> list[tuple[str, Lost]]:
        with beside_a_disk(group, grid):
            return loading.read(report)

    refuse_lost(at_first(group, read, lost_by_all, failed))
    partly = failure(f"the model is not to be used, as {path} was loaded in part")
    at_first(group, loading.take, lambda _: None, partly)
    loading.warn_of_unread()
    if line is not None:
        line.finish(f"loaded {what} from {path}")
    names = tuple(missing), tuple(unexpected)
    own = loading.extra_per_rank
    return Restored(found, path, loading.extra, own, *names, loading.same_layout)


def _found(folder: Path, step: int | None, trusted: bool) -> tuple[int | None, Path]:
    """The step to load, None where it does not say, and the checkpoint's folder.

    Raises:
        CheckpointError: there is none, or a half.
    """
    chosen, path = folders.find(folder, step)
    if folders.is_safetensors_folder(path):
        return None, path
    stored = Stored(path, trusted)
    stored.check_files()
    return stored.step if chosen is None else chosen, path


class Loading:
    """One rank's part in loading a checkpoint.

    Args:
        grid: whose ranks load.
        source: opens what is loaded from.
        model, optimizer, strict: as `load` takes them.
        naming: of the model's tensors, which may have parts under other names.

    Attributes:
        ties: the names of each tied weight, on all stages.
    """

    ties: Sequence[set[str]]

    def __init__(
        self,
        grid: HyperCommGrid,
        source: Callable[[], Source],
        model: Model,
        optimizer: Optimizers | None,
        strict: bool = True,
        naming: Naming | None = None,
    ) -> None:
        self._grid, self._open, self._strict = grid, source, strict
        self._given, self._naming = (model, optimizer), naming or Naming(MODEL, None)
        self._turns = Turns(grid)

    def look(self) -> Tied:
        """List the model's tensors; return the names of tied ones."""
        self._model = ModelState(self._given[0], self._grid, rows=self._naming.padded.get)
        items = self._model.items(self._turns)
        self._live = [part for item in items for part in self._parts_of(item)]
        return shared_in(self._live), self._naming.tied("target", self._model.aliases)

    def plan(self) -> Names:
        """Compare the model with the checkpoint; return the names of this rank's model."""
        optimizer, turns = self._given[1], self._turns
        self._stored = Renamed(self._open(), self._naming, optimizer is not None, self.ties)
        names = [item.key for item in self._live]
        missing: list[str] = []
        if not self._strict:
            missing = [key for key in names if key not in self._stored.forms]
            self._live = [item for item in self._live if item.key in self._stored.forms]
        self._fit()
        self._stored.check(self._live)
        self._staged = [self._source(i) if isinstance(i, Item) else i for i in self._live]
        self._twins = list(self._stored_twins())
        self._optimizer = OptimizerState(optimizer, self._model) if optimizer is not None else None
        self._extra = extras_in(self._stored.forms)
        self._own = [Value(path) for path in offered(self._stored.forms, self._grid)]
        self._needed = [*self._staged, *(t for *_, t in self._twins), *self._extra, *self._own]
        if self._optimizer is not None:
            targets = self._optimizer.targets(self._stored.forms, turns, self._strict)
            self._needed += map(self._state_source, targets)
        # One rank of each stage and member tells, since the others of it have the same names.
        stage, apart = self._grid.spec.regions[0].axes, {"pp", *self._model.own_axes}
        others = (self._grid.coordinate[axis] for axis in stage if axis not in apart)
        if any(others):
            return [], [], []
        updated = []
        if self._optimizer is not None:
            updated = self._optimizer.updated
            missing += self._optimizer.untrained
        return names, missing, updated

    def _fit(self) -> None:
        """Read tensors that ranks each had of their own as this grid's ranks have them."""
        self._merges: list[Callable[[], None]] = []
        for place, item in enumerate(self._live):
            stored = self._stored.forms.get(item.key)
            if isinstance(item, Item) and stored is not None:
                self._live[place], merge = item.fitted(stored.shape)
                self._merges += [merge] if merge is not None else []

    def _parts_of(self, item: Item | Value) -> Sequence[Item | Value]:
        """The parts of an item, under the checkpoint's names after rename=."""
        if isinstance(item, Item):
            return self._naming.target(item.path[-1], item.shape).items(item)
        return [item] if self._naming.target(item.path[-1]).names else []

    def _stored_twins(self) -> Iterator[tuple[Item, Item, Item]]:
        """Tensors of tied weights, with the boxes to read into, and those of a further copy."""
        for live, staged in zip(self._live, self._staged, strict=True):
            if isinstance(live, Item) and isinstance(staged, Item) and live.path[0] == "model":
                for key in twins(live.key, self.ties):
                    if key in self._stored.forms and not self._stored.is_one(live.key, key):
                        twin = self._source(replace(live, path=("model", key.removeprefix(MODEL))))
                        yield live, staged, twin

    def _check_twins(self) -> None:
        """Refuse different numbers for one weight.

        Raises:
            CheckpointError: names both of its names.
        """
        for live, *both in self._twins:
            one, other = ([int(digest(c.data.to(live.dtype))) for c in i.chunks] for i in both)
            if one != other:
                raise CheckpointError(
                    f"{live.key} and {both[1].key} are one weight of this model, and differ in the "
                    "checkpoint; untie them, or have rename= return None for one"
                )

    def _source(self, item: Item) -> Item:
        """Return the box to read a tensor into; from its fp32 copy if that is more precise.

        It has the checkpoint's dtype where the tensor's may not hold all of its numbers.
        """
        path = read_from(item, self._stored.forms)
        form = self._stored.forms[key_of(path)]
        assert form is not None  # `check` has refused values
        stored = form.torch_dtype
        staged = item.staged(stored if narrows(stored, item.dtype) else None)
        return replace(staged, path=path)

    def _state_source(self, item: Item | Value) -> Item | Value:
        """Return the box to read optimizer state into, as `_source` does."""
        stored = self._stored.forms[item.key]
        if not isinstance(item, Item) or stored is None or item.path[0] == "model":
            return item
        if narrows(stored.torch_dtype, item.dtype):
            self._live.append(item)
            item = item.staged(stored.torch_dtype)
            self._staged.append(item)
        return item

    def check_all(self, told: Sequence[Names]) -> tuple[list[str], list[str]]:
        """Whether all stages together have all of the checkpoint's model.

        Returns:
            Without `strict`, names that are missing in the checkpoint, and that only it has.
        """
        own, lacking, trains = (dict.fromkeys(chain(*each)) for each in zip(*told, strict=True))
        known = {*own}
        known |= {twin for name in known for twin in twins(name, self.ties)}
        missing = [name.removeprefix(MODEL) for name in lacking]
        self._naming.check_padded([name.removeprefix(MODEL) for name in known])
        there = [key for key in self._stored.forms if key.startswith(MODEL)]
        unknown = [key for key in there if key not in known]
        if self._optimizer is not None:
            updated = {*trains}
            updated = updated.union(*(names for names in self.ties if names & updated))
            unknown += not_taken(self._stored.forms, updated)
            untrained = [name for name in missing if name.startswith("optimizer.")]
            if updated and len(untrained) == len(updated):
                raise CheckpointError(
                    f"of another optimizer: it has none of {', '.join(untrained[:3])}; its state "
                    "is by the names of the model's parameters"
                )
        lost = [key for key in unknown if not counts_averages(key)]
        if lost and self._strict:
            more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
            trained = all(key.startswith("optimizer.") for key in lost)
            raise CheckpointError(
                f"of another {'optimizer' if trained else 'model'}: it also has "
                f"{', '.join(lost[:3])}{more}, which no rank has; strict=False leaves it alone"
            )
        if missing and not known & {*there}:
            names = ", ".join(key.removeprefix(MODEL) for key in there[:3])
            raise CheckpointError(
                f"of another model: it has none of {', '.join(missing[:3])}, but {names}; see "
                "prefix= and rename="
            )
        return missing, [key.removeprefix(MODEL) for key in unknown]

    def read(self, report: Report) -> list[tuple[str, Lost]]:
        """Into memory of its own; return what tensors of another dtype do not hold."""
        self._values = self._stored.read(self._needed, report)
        self._check_twins()
        if self._optimizer is not None:
            self._optimizer.check_options(self._values)
        return list(self._lost())

    def _lost(self) -> Iterator[tuple[str, Lost]]:
        for live, staged in zip(self._live, self._staged, strict=True):
            if isinstance(live, Item) and isinstance(staged, Item) and live.dtype != staged.dtype:
                total = math.prod(live.shape)
                for chunk in staged.chunks:
                    lost = lost_numbers(chunk.data, live.dtype, total)
                    if lost.overflowed or lost.vanished:
                        yield live.key, replace(lost, is_copy=not staged.writes)
        if self._optimizer is not None:
            yield from self._optimizer.lost_in_values(self._values)

    @torch.no_grad()
    def take(self) -> None:
        """Puts everything in place; first what modules might refuse."""
        self._model.set_values(self._values)
        self._model.clear_padding({live.path[-1] for live in self._live})
        for live, staged in zip(self._live, self._staged, strict=True):
            if isinstance(live, Item) and isinstance(staged, Item):
                live.take(staged)
        for merge in self._merges:
            merge()
        if self._optimizer is not None:
            self._optimizer.take(self._values)

    @property
    def extra(self) -> dict[str, Any]:
        """The job's own values."""
        found = {
            one.path[-1]: one.chunks[0].data if isinstance(one, Item) else self._values[one.key]
            for one in self._extra
        }
        return {key: value for key, value in found.items() if not isinstance(value, Unread)}

    @property
    def same_layout(self) -> bool:
        """Whether every rank is offered exactly what it had itself."""
        return is_same_layout(self._stored.forms, self._grid)

    @property
    def extra_per_rank(self) -> list[dict[str, Any]]:
        """The old ranks' own values that this rank is offered."""
        found = [self._values[value.key] for value in self._own]
        return [value for value in found if not isinstance(value, Unread)]

    def warn_of_unread(self) -> None:
        """Warn of the job's values that are left out; of those of all on the first rank."""
        is_first = self._grid.rank == self._grid.spec.grid_ranks[0]
        for one in [*(self._extra if is_first else []), *self._own]:
            value = self._values.get(one.key)
            if isinstance(value, Unread):
                warnings.warn(f"the weights are loaded, without {value.why}", stacklevel=3)
