"""Recovery after a failure: rebuild makes the grid that is left, recover brings back a state.

The ranks of the new grid tell each other what they have in memory, their own and their neighbours'.
The newest state that is there as a whole goes to where it is needed now, as between any two grids;
else the last checkpoint is loaded. Ranks that are left out of the new grid hand over, in rebuild,
the boxes that no other rank has:

    dp 4, rank 2 gone, dp 3 does not divide the batch: dp 2 over (0, 1), rank 3 is left out

    rank 0   own 0, kept for 3
    rank 1   own 1, kept for 0
    rank 3   own 3, kept for 2   ── kept for 2 ──►   rank 0, which has no copy of it

They hand over boxes of which the new grid has no copy, of the newest state that is complete with
them; nothing, if the new grid has a complete state that is as new.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

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
from commgrid.checkpoint.memory import (
    Inventory,
    Kept,
    forget,
    give,
    kept_states,
    missing,
    take_over,
)
from commgrid.checkpoint.reader import check_has
from commgrid.checkpoint.writer import Report
from commgrid.collectives.objects import at_first, gathered
from commgrid.equality.lost_numbers import lost_by_all, refuse_lost
from commgrid.errors import CheckpointError
from commgrid.planning.survivors import Fits
from commgrid.rendezvous.timeouts import Seconds
from commgrid.resharding.item import Chunk, Item, Value
from commgrid.resharding.optimizer_state import Optimizers
from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.named_failures import named_failures
from commgrid.runtime.rebuild import States
from commgrid.runtime.rebuild import rebuild as _rebuild
from commgrid.runtime.registry import get_grid
from commgrid.torch_compat.world import group_timeout
from commgrid.transfer.models import Part
from commgrid.transfer.transfer import Transfer

MEMORY, NEIGHBOURS, CHECKPOINT = "memory", "neighbours' memory", "checkpoint"
LEFT_OUT = "memory of ranks left out"
_NAMED = 3  # missing entries that an error lists


@dataclass(frozen=True)
class Recovered:
    """What `recover` has brought back.

    Args:
        step: of the state; training continues with the next.
        source: `memory`: what the ranks that are left had of their own; `neighbours' memory`: some
            of it was kept for ranks that are gone; `memory of ranks left out`: some of it was only
            with ranks that have no place any more, which handed it over in `rebuild`;
            `checkpoint`: the folder's last.
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


def rebuild(
    ranks: range | Sequence[int] | str | None = None,
    *,
    name: str | None = None,
    grace: Seconds = 10.0,
    at_least: int | None = None,
    fits: Fits | None = None,
    timeout: Seconds = 60.0,
) -> HyperCommGrid | None:
    """Makes a grid again, of the same name and description, over the ranks that are left.

    Ranks call it after a failure, such as a PeerFailedError; the processes and torch.distributed
    stay. The axis that was given as -1 shrinks, or else dp, and then pp. Whole replicas are left
    out, so that as many ranks as possible keep their place on the other axes. Later
    `commgrid.recover` brings together the states in memory; a rank without a place hands over here
    the parts that it alone has. A rank that has none, as `ranks` of `initialize` or a rebuild left
    it out or as it only called `join`, waits in this call until a rebuild needs it.

    Args:
        ranks: exactly these come, and an error names the missing ones. A rank that is not among
            them waits as one without a part. None: any rank may come.
        name: of the grid; None: the default one.
        grace: how long after the first ranks others may come, in seconds or as timedelta. Ranks
            learn of a failure in their next collective; give more than they compute without one.
            On a watched grid, no rank waits for a process that was seen to end.
        at_least: how many ranks of the grid before must come; None: half, or more than half where
            the store is out of reach and others may be there still. Fewer may be the smaller side
            of a network that was cut, while the larger side continues too.
        fits: whether the job can use sizes, `{"tp": 2, "dp": 3, …}`, such as a batch that must
            divide; asked on one rank. None: any.
        timeout: how long it may take in all, likewise; not the waiting of a rank without a part.

    Returns:
        The new grid, which `get_grid(name)` returns from now on and `rebuilt` says more of; None on
        a rank that has waited for a place when the others have ended.

    Raises:
        GridNotInitializedError: torch.distributed is not up.
        PeerTimeoutError: ranks did not come, or this one came too late.
        PeerFailedError: too few ranks are left, or the store and all standby stores are gone.
        SpecError: no grid of this description fits the ranks that are left.
        GridMismatchError: ranks call for different things.

    Example:
        >>> import commgrid
        >>> grid = commgrid.initialize()
        >>> grid.abort()                        # as after a failure
        >>> commgrid.rebuild(grace=0.1).shape["dp"]
        1
        >>> commgrid.shutdown()
    """
    states = States(lambda name: bool(kept_states(name)), hand_over)
    return _rebuild(ranks, name, grace, at_least, fits, timeout, states)


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
        with beside_a_disk(group, grid):
            finish(grid.name)
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
    forms = at_first(
        group,
        lambda: None if mine is None else mine.forms,
        lambda told: next(each for each in told if each is not None),
        failed,
    )
    loading = Loading(grid, lambda: _Memory(mine, forms, grid, group), model, optimizer)
    loading.ties = at_first(group, loading.look, loading.ties_of_all, failed)
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
        step: it is of; 0 for the checkpoint, which says so itself.
        source: as `Recovered` has it.
        lost: what is missing of the newest state that is not whole.
    """

    tag: str | None
    step: int
    source: str
    lost: tuple[str, ...] = ()


def _choose(told: Sequence[Inventory], folder: str | Path | None, grid: str) -> _Chosen:
    """The newest state that is whole, in memory or else in the folder.

    Args:
        grid: its name.

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
            return _Chosen(tag, having[0].step, MEMORY)
        if not missing(having, with_others=True):
            return _Chosen(tag, having[0].step, NEIGHBOURS)
        gone = missing(having, with_others=True, with_left=True)
        if not gone:
            return _Chosen(tag, having[0].step, LEFT_OUT)
        lost = lost or gone
    if saved:
        return _Chosen(None, 0, CHECKPOINT, tuple(lost))
    more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
    what = (
        f"no rank that is left has all of {', '.join(lost[:_NAMED])}{more} in memory"
        if lost
        else f"no rank has a state in memory of grid {grid!r} (checkpoint.keep keeps some)"
    )
    where = "no folder of checkpoints was given" if folder is None else f"{folder} has none"
    raise CheckpointError(f"{what}, and {where}; start again")


class _Memory:
    """States in the memory of all ranks of a grid, as something to load from.

    Args:
        mine: this rank's part of it; None: it has none.
        forms: of the whole.
        grid, group: whose ranks.
    """

    def __init__(
        self,
        mine: Kept | None,
        forms: Mapping[str, Any],
        grid: HyperCommGrid,
        group: ProcessGroup | None,
    ) -> None:
        self._mine, self._forms, self._grid, self._group = mine, forms, grid, group
        self.keys: Mapping[str, Any] = {key: _metadata(form) for key, form in forms.items()}

    def check(self, items: Iterable[Item | Value]) -> None:
        """Raises CheckpointError where these are not in it."""
        check_has(self.keys, items)

    def read(self, items: Iterable[Item | Value], report: Report) -> dict[str, Any]:
        """Fills the items' boxes from wherever they are; returns the values by key."""
        wanted = list(items)
        told = {} if self._mine is None else self._mine.values
        values: dict[str, Any] = {}
        for one in reversed(gathered(told, self._group) if self._group is not None else [told]):
            values.update(one)
        target: dict[str, list[Part]] = {}
        late: list[tuple[Tensor, Tensor]] = []
        for item in wanted:
            if not isinstance(item, Item):
                continue
            shape, name = self._forms[item.key]
            for chunk in item.chunks:
                data = chunk.data
                if data.dtype != getattr(torch, name):
                    data = torch.empty_like(data, dtype=getattr(torch, name))
                    late.append((chunk.data, data))
                target.setdefault(item.key, []).append(Part(data, shape, tuple(chunk.offset)))
        transfer = Transfer(
            self._source(), target, source_grid=self._grid, target_grid=self._grid,
            only=lambda _: True, copies="any", name="recover",
        )  # fmt: skip
        transfer.run()
        transfer.close()
        for live, read in late:
            live.copy_(read)
        return {item.key: values[item.key] for item in wanted if isinstance(item, Value)}

    def _source(self) -> dict[str, list[Part]]:
        found: dict[str, list[Part]] = {}
        for item in self._mine.items if self._mine is not None else ():
            for chunk in item.chunks:
                part = Part(chunk.data, tuple(item.shape), tuple(chunk.offset))
                found.setdefault(item.key, []).append(part)
        return found


def _metadata(form: Any) -> Any:
    """Return torch's metadata of a tensor, or of a value."""
    if form is None:
        return BytesStorageMetadata()
    shape, dtype = form
    properties = TensorProperties(dtype=getattr(torch, dtype))
    return TensorStorageMetadata(properties, torch.Size(shape), [])


Box = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Key, offset and size."""


@dataclass(frozen=True)
class Given:
    """The boxes and values that one rank hands over.

    Args:
        to: the rank that gets it.
        boxes, values: names of them.
    """

    to: int
    boxes: frozenset[Box]
    values: frozenset[str]


def hand_over(grid: HyperCommGrid, seated: Sequence[int], name: str) -> None:
    """Hand over boxes of ranks outside of the new grid to its ranks; on all of both.

    Args:
        grid: over all of them, for this alone.
        seated: those with a place.
        name: of the grid whose states they are.

    Raises:
        PeerFailedError, PeerTimeoutError: one is gone meanwhile.
    """
    group = everyone(grid)
    if group is None:
        return
    ranks = dist.get_process_group_ranks(group)
    with named_failures(grid, lambda: "handing over states"):
        told = gathered([Inventory.of(state) for state in kept_states(name)], group)
        tag, plan = given(dict(zip(ranks, told, strict=True)), seated)
        if not plan:
            return
        state = next((one for one in kept_states(name) if one.tag == tag), None)
        mine, timeout = plan.get(grid.rank), group_timeout(grid.timeout)
        sources = [ranks.index(rank) for rank, one in plan.items() if one.to == grid.rank]
        if mine is None or state is None:
            items, values = give([], {}, None, sources, group, timeout)
        else:
            said = {key: state.values[key] for key in mine.values}
            items, values = give(
                _only(state, mine.boxes), said, ranks.index(mine.to), sources, group, timeout
            )
        take_over(tag, items, values)


def given(
    told: Mapping[int, Sequence[Inventory]], seated: Sequence[int]
) -> tuple[str, dict[int, Given]]:
    """Plan the hand-over; from the same inventories all ranks make the same plan.

    Args:
        told: each rank's inventories.
        seated: those with a place.

    Returns:
        The state's tag, and by rank what it gives; {}: nothing is needed, or nothing helps.
    """
    states: dict[str, dict[int, Inventory]] = {}
    for rank, inventories in told.items():
        for each in inventories:
            states.setdefault(each.tag, {})[rank] = each
    newest_first = sorted(states.items(), key=lambda one: -next(iter(one[1].values())).step)
    for tag, having in newest_first:
        sitting = {rank: having[rank] for rank in seated if rank in having}
        if sitting and not missing(list(sitting.values()), with_others=True, with_left=True):
            return tag, {}
        if sitting and not missing(list(having.values()), with_others=True, with_left=True):
            return tag, _shares(having, sitting)
    return "", {}


def _shares(having: Mapping[int, Inventory], sitting: Mapping[int, Inventory]) -> dict[int, Given]:
    """The boxes of each rank outside of the grid that ranks before it have not."""
    boxes = {box for each in sitting.values() for box in each.boxes}
    values = {key for each in sitting.values() for key in each.values}
    takers = sorted(sitting)
    plan: dict[int, Given] = {}
    for rank in sorted(set(having) - set(sitting)):
        new_boxes = having[rank].boxes - boxes
        new_values = set(having[rank].values) - values
        if new_boxes or new_values:
            to = takers[len(plan) % len(takers)]
            plan[rank] = Given(to, frozenset(new_boxes), frozenset(new_values))
            boxes |= new_boxes
            values |= new_values
    return plan


def _only(state: Kept, boxes: frozenset[Box]) -> list[Item]:
    """These of a state's boxes, each once."""
    found, left = [], set(boxes)
    for item in state.items:
        chunks: list[Chunk] = []
        for chunk in item.chunks:
            box = (item.key, tuple(chunk.offset), tuple(chunk.data.shape))
            if box in left:
                left.remove(box)
                chunks.append(chunk)
        if chunks:
            found.append(Item(item.path, item.shape, chunks, item.dtype))
    return found
