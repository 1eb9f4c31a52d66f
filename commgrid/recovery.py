"""Recovery after a failure: rebuild makes the grid that is left, recover brings back a state.

The ranks of the new grid tell each other what they have in memory, their own and their neighbours'.
The newest state that is there as a whole goes to where it is needed now, as between any two grids;
else the last checkpoint is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from commgrid import checkpoint
from commgrid.checkpoint import folder as folders
from commgrid.checkpoint.agreement import (
    Model,
    Progress,
    beside_a_disk,
    everyone,
    failure,
    tells_failures,
)
from commgrid.checkpoint.background import finish, settle
from commgrid.checkpoint.loading import Loading
from commgrid.checkpoint.memory import Inventory, Kept, forget, kept_states, missing
from commgrid.checkpoint.writer import Report
from commgrid.collectives.objects import at_first, gathered
from commgrid.equality.lost_numbers import lost_by_all, refuse_lost
from commgrid.errors import CheckpointError
from commgrid.resharding.item import Item, Value
from commgrid.resharding.layouts import Form, GridLayouts
from commgrid.resharding.local_boxes import LocalBoxes
from commgrid.resharding.naming import ties_of_all
from commgrid.resharding.optimizer_state import Optimizers
from commgrid.resharding.plan import TransferPlan
from commgrid.resharding.transport import Carrier, message_device, most_of
from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.rebuild import rebuild as rebuild
from commgrid.runtime.registry import get_grid
from commgrid.store.hosts import own_host
from commgrid.torch_compat.world import group_timeout

MEMORY, NEIGHBOURS, CHECKPOINT = "memory", "neighbours' memory", "checkpoint"
_NAMED = 3  # missing entries that an error lists
_UNDER_WAY = 1 << 28  # bytes on their way between ranks at once


@dataclass(frozen=True)
class Recovered:
    """What `recover` has brought back.

    Args:
        step: of the state; training continues with the next.
        source: `memory`: what the ranks of the grid had of their own; `neighbours' memory`: some of
            it was kept for ranks that are gone, or have no place any more; `checkpoint`: the
            folder's last.
        extra: what was kept or saved with it.
        extra_per_rank: what ranks had of their own, as `checkpoint.load` offers it.
        lost: with a checkpoint: names of the entries that no rank had in memory, if any were kept.
        same_layout: as `checkpoint.load` says it.
    """

    step: int
    source: str
    extra: dict[str, Any]
    extra_per_rank: list[dict[str, Any]]
    lost: tuple[str, ...] = ()
    same_layout: bool = False


@tells_failures
def recover(
    folder: str | Path | None,
    model: Model,
    optimizer: Optimizers | None = None,
    *,
    progress: Progress = True,
    trusted: bool = False,
    grid: HyperCommGrid | None = None,
) -> Recovered:
    """Load the newest state that is left into model and optimizer; on all ranks of the new grid.

    Ranks keep states in memory by `checkpoint.keep`, or `save` with `keep_in_memory=True`. A state
    is complete if the ranks together have all of it; it may be of another shape of the grid of this
    name. If there is none, or the folder's last checkpoint is newer, that one is loaded. States of
    later steps are forgotten.

    Args:
        folder: of checkpoints; None: there are none.
        model, optimizer: made for the grid, in any state.
        progress, trusted: of loading a checkpoint, as `checkpoint.load` takes them.
        grid: None: the default one.

    Raises:
        CheckpointError: on all ranks: there is neither; names what is missing. Or what was kept is
            of another model.

    Example:
        >>> import commgrid, torch
        >>> grid = commgrid.initialize()
        >>> model = torch.nn.Linear(2, 1)
        >>> commgrid.checkpoint.keep(20, model)
        >>> commgrid.recover(None, model).source
        'memory'
        >>> commgrid.shutdown()
    """
    grid = grid or get_grid()
    group = everyone(grid)
    failed = failure("nothing was recovered")

    def kept() -> list[Inventory]:
        finish(grid, group)
        return [Inventory.of(state) for state in kept_states(grid.name)]

    def choose(told: list[list[Inventory]]) -> _Chosen:
        with beside_a_disk(group, grid, at_whole=True):
            settle()
            return _choose([each for one in told for each in one], folder, grid.name)

    chosen = at_first(group, kept, choose, failed)
    if chosen.tag is None:
        assert folder is not None
        restored = checkpoint.load(
            folder, model, optimizer, progress=progress, trusted=trusted, grid=grid
        )
        step = restored.step or 0
        forget(after=step, grid=grid.name)
        own, same = restored.extra_per_rank, restored.same_layout
        return Recovered(step, CHECKPOINT, restored.extra, own, chosen.lost, same)
    mine = next((state for state in kept_states(grid.name) if state.tag == chosen.tag), None)
    loading = Loading(grid, lambda: _Memory(mine, chosen.forms, grid, group), model, optimizer)
    loading.ties = at_first(group, loading.look, ties_of_all, failed)
    at_first(group, loading.plan, loading.check_all, failed)
    refuse_lost(at_first(group, lambda: loading.read(lambda *_: None), lost_by_all, failed))
    partly = failure("the model is not to be used, as it was recovered in part")
    at_first(group, loading.take, lambda _: None, partly)
    forget(after=chosen.step, grid=grid.name)
    own, same = loading.extra_per_rank, loading.same_layout
    return Recovered(chosen.step, chosen.source, loading.extra, own, same_layout=same)


@dataclass(frozen=True)
class _Chosen:
    """The states from which training can continue.

    Args:
        tag: of a whole state in memory; None: the checkpoint.
        step: of the state; 0: the checkpoint says it.
        source: as `Recovered` has it.
        forms: of the state in memory.
        lost: what is missing of the newest state that is not whole.
    """

    tag: str | None
    step: int
    source: str
    forms: Mapping[str, Form | None]
    lost: tuple[str, ...] = ()


def _choose(told: Sequence[Inventory], folder: str | Path | None, grid: str) -> _Chosen:
    """The newest state that is whole, in memory or else in the folder.

    Raises:
        CheckpointError: there is none.
    """
    saved = next(folders.whole(folders.local(folder)), None) if folder is not None else None
    states: dict[str, list[Inventory]] = {}
    for each in told:
        states.setdefault(each.tag, []).append(each)
    lost: list[str] = []
    for tag, having in sorted(states.items(), key=lambda state: -state[1][0].step):
        if saved and saved[0] > having[0].step:
            break
        if not missing(having, with_others=False):
            return _Chosen(tag, having[0].step, MEMORY, having[0].forms)
        if not missing(having, with_others=True):
            return _Chosen(tag, having[0].step, NEIGHBOURS, having[0].forms)
        lost = lost or missing(having, with_others=True)
    if saved:
        return _Chosen(None, 0, CHECKPOINT, {}, tuple(lost))
    more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
    what = (
        f"no rank that is left has all of {', '.join(lost[:_NAMED])}{more} in memory"
        if lost
        else f"no rank has a state in memory of grid {grid!r} (checkpoint.keep keeps some)"
    )
    where = "no folder of checkpoints was given" if folder is None else f"{folder} has none"
    raise CheckpointError(f"{what}, and {where}; start again")


class _Memory:
    """Source for `Loading`: the kept states of all ranks."""

    def __init__(
        self,
        mine: Kept | None,
        forms: Mapping[str, Form | None],
        grid: HyperCommGrid,
        group: ProcessGroup | None,
    ) -> None:
        self._mine, self.forms, self._grid, self._group = mine, forms, grid, group

    def read(self, items: Iterable[Item | Value], report: Report) -> dict[str, Any]:
        """Fills the items' boxes from wherever they are; returns the values by key."""
        wanted = list(items)
        told = {} if self._mine is None else self._mine.others_values | self._mine.values
        values: dict[str, Any] = {}
        for one in reversed(gathered(told, self._group) if self._group is not None else [told]):
            values.update(one)
        source = LocalBoxes() if self._mine is None else self._mine.boxes
        target, late = LocalBoxes(), list[tuple[Item, Item]]()
        for item in wanted:
            if isinstance(item, Item):
                form = self.forms[item.key]
                assert form is not None  # `check` has refused values
                read = item if item.dtype == form.torch_dtype else item.empty(form.torch_dtype)
                late += [] if read is item else [(item, read)]
                target.add(read)
        self._carry(source, target)
        for live, read in late:
            live.take(read)
        return {item.key: values[item.key] for item in wanted if isinstance(item, Value)}

    def _carry(self, source: LocalBoxes, target: LocalBoxes) -> None:
        """Move what is kept to where it is needed, over the grid's own group."""
        mine = source.layout, target.layout, own_host()
        told = [mine] if self._group is None else gathered(mine, self._group)
        ranks = [self._grid.rank]
        if self._group is not None:
            ranks = dist.get_process_group_ranks(self._group)
        held, needed, hosts = (
            dict(zip(ranks, each, strict=True)) for each in zip(*told, strict=True)
        )
        plan = TransferPlan(GridLayouts.of(held), GridLayouts.of(needed), hosts, partly=True)
        if self._group is None:
            for move in plan.copies(self._grid.rank):
                name, box = move.tensor.name, move.box
                target.view(name, box).copy_(source.view(name, box))
            target.copy_further()
            return
        carrier = Carrier(
            self._group, ranks, message_device(self._group, frozenset({"cpu"})), source, target,
            _UNDER_WAY, plan.messages(self._grid.rank, most_of(_UNDER_WAY)),
            partial(plan.copies, self._grid.rank), group_timeout(self._grid.timeout),
        )  # fmt: skip
        carrier.carry()
        carrier.meet()
