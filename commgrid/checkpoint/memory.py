"""States kept in memory: a rank's own, and what only a neighbour on another host has.

    rank 0, host a   own state   +  the pieces of rank 2 without a copy on another host
    rank 2, host b   own state   +  those of rank 0

A state is the boxes and values that a checkpoint would have, copied to the host's memory. Weights
that ranks on several hosts have copies of are safe by that; what has no copy elsewhere, as the
optimizer state that ZeRO-1 cuts over dp, or weights that FSDP cuts, goes to a neighbour along dp on
another host as well. Where all ranks are on one host, another process is as good as it gets.

The last two are kept: if a rank fails while it keeps one, the one before is whole.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from commgrid.checkpoint.background import stage
from commgrid.collectives.objects import as_bytes, as_tensor, at_first, gathered
from commgrid.collectives.plain import all_gather
from commgrid.layout.box import volume
from commgrid.resharding.item import Chunk, Item, Value
from commgrid.resharding.layouts import Form, GridLayouts
from commgrid.resharding.local_boxes import LocalBoxes
from commgrid.resharding.plan import Stretch, messages_of
from commgrid.resharding.pools import LARGE, MovedTensor, Run
from commgrid.resharding.transport import Carrier, message_device, most_of
from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.registry import _registry
from commgrid.store.hosts import own_host
from commgrid.torch_compat.messages import start_transfers, starts_batches, wait_for
from commgrid.torch_compat.world import group_timeout

_KEPT = 2
_UNDER_WAY = 64 << 20  # bytes on their way to neighbours at once


@dataclass(frozen=True, eq=False)
class Kept:
    """A state in this process's memory.

    Args:
        grid: the name of its grid.
        step: it is of.
        tag: what no other state is called, the same on all ranks.
        own: this rank's boxes, on the CPU.
        others: boxes of ranks whose neighbour this one is.
        values: this rank's, by key.
        others_values: of ranks whose neighbour this one is.
        forms: of every tensor of all ranks, by key, without boxes; None: a value.
        layout: a digest of this rank's names and shapes, and of its grid.
    """

    grid: str
    step: int
    tag: str
    own: list[Item]
    others: list[Item]
    values: dict[str, Any]
    others_values: dict[str, Any]
    forms: Mapping[str, Form | None]
    layout: str

    @property
    def boxes(self) -> LocalBoxes:
        """This process's boxes of its tensors, by key."""
        return _boxes([*self.own, *self.others])


_kept: list[Kept] = []


def kept_states(grid: str) -> list[Kept]:
    """The states that this process has of the grid of a name, the latest last."""
    return [each for each in _kept if each.grid == grid]


def forget(after: int | None = None, *, grid: str | None = None) -> None:
    """Gives the memory of kept states back.

    Args:
        after: only of those of later steps, which training will repeat; None: of all.
        grid: only of those of the grid of this name; None: of any.
    """
    _kept[:] = [
        each
        for each in _kept
        if (after is not None and each.step <= after) or grid not in (None, each.grid)
    ]


_registry.at_shutdown.append(forget)


def keep_items(
    step: int,
    items: Sequence[Item | Value],
    grid: HyperCommGrid,
    group: ProcessGroup | None,
    failed: Callable[[str], Exception],
) -> Kept:
    """Keeps a state; on all ranks of the grid.

    Args:
        step: it is of.
        items: this rank's.
        grid: whose ranks keep.
        group: of all its ranks; None: there is one.
        failed: makes the error of all, where one fails.
    """
    forms = {each.key: each.form if isinstance(each, Item) else None for each in items}
    layout = sha256(repr((grid.identity, sorted(forms.items()))).encode()).hexdigest()
    earlier = kept_states(grid.name)
    known = at_first(group, lambda: bool(earlier) and earlier[-1].layout == layout, all, failed)
    tag = at_first(group, lambda: None, lambda _: f"{step}/{uuid4().hex}", failed)
    for state in earlier[: len(earlier) - _KEPT + 1]:  # all ranks have the last one, as seen here
        _kept.remove(state)
    staged = stage([replace(each, writes=True) for each in items])
    own = [each for each in staged if isinstance(each, Item)]
    values = {each.key: each.value for each in staged if isinstance(each, Value)}
    others: list[Item] = []
    more: dict[str, Any] = {}
    every: Mapping[str, Form | None] = forms
    if group is not None:
        told = [] if known else gathered(forms, group)
        every = earlier[-1].forms if known else {k: f for one in told for k, f in one.items()}
        writes = {each.key for each in items if each.writes}
        places = Neighbours.of(grid, group)
        alone = [each for each in own if each.key in writes and not places.has_copy(each)]
        said = {key: value for key, value in values.items() if key in writes}
        others, more = _exchange(alone, said, places, group)
    _kept.append(Kept(grid.name, step, tag, own, others, values, more, every, layout))
    at_first(group, lambda: None, lambda _: None, failed)  # all ranks have it when one returns
    for state in [each for each in kept_states(grid.name)[:-1] if each.step == step]:
        _kept.remove(state)  # recovery chooses by step
    return _kept[-1]


def _boxes(items: Iterable[Item]) -> LocalBoxes:
    held = LocalBoxes()
    for item in items:
        held.add(item)
    return held


# -- neighbours --------------------------------------------------------------------------


@dataclass(frozen=True)
class Neighbours:
    """The hosts of a grid's ranks, and the neighbour of each rank on another host.

    Args:
        grid: whose ranks.
        of_rank: the host of each; where all are on one, the rank itself.
    """

    grid: HyperCommGrid
    of_rank: Mapping[int, str]

    @classmethod
    def of(cls, grid: HyperCommGrid, group: ProcessGroup) -> Neighbours:
        """Asks all ranks of a group where they run."""
        ranks = dist.get_process_group_ranks(group)
        hosts = gathered(own_host(), group)
        if len(set(hosts)) == 1:
            hosts = [f"rank {rank}" for rank in ranks]
        return cls(grid, dict(zip(ranks, hosts, strict=True)))

    def has_copy(self, item: Item) -> bool:
        """Whether a rank at another place and of another replica has the same boxes of a tensor.

        A grid that shrinks leaves a whole replica out, so that copies within it do not count.
        """
        layouts = self.grid.spec.layouts.values()
        layout = next(each for each in layouts if set(item.copies) <= set(each.shape))
        me = self.grid.rank
        ranks = {*(layout.group(me, *item.copies) if item.copies else ())}
        if item.shared is not None:
            ranks |= {*dist.get_process_group_ranks(item.shared)}
        return any(
            self.of_rank[rank] != self.of_rank[me]
            and (len(self._replica(me)) == len(self.of_rank) or rank not in self._replica(me))
            for rank in ranks
        )

    def _replica(self, rank: int) -> Sequence[int]:
        """The ranks that have one model together with this one."""
        layout = self.grid.spec.layout("dense")
        others = [axis for axis in layout.shape if axis not in self._along]
        return layout.group(rank, *others) if others else (rank,)

    @property
    def _along(self) -> list[str]:
        layout = self.grid.spec.layout("dense")
        return [axis for axis in layout.shape if axis.startswith("dp")]

    def neighbour(self, rank: int) -> int:
        """The next rank along dp at another place, or else the next of all."""
        layout = self.grid.spec.layout("dense")
        rings = [layout.group(rank, *self._along)] if self._along else []
        for ring in (*rings, self.grid.spec.grid_ranks):
            start = ring.index(rank)
            for step in range(1, len(ring)):
                other = ring[(start + step) % len(ring)]
                if self.of_rank[other] != self.of_rank[rank]:
                    return other
        raise AssertionError("several ranks, and all at one place")


def _exchange(
    items: Sequence[Item], values: Mapping[str, Any], places: Neighbours, group: ProcessGroup
) -> tuple[list[Item], dict[str, Any]]:
    """Gives this rank's to its neighbour; what others have given to this one."""
    ranks, timeout = dist.get_process_group_ranks(group), group_timeout(places.grid.timeout)
    me = places.grid.rank
    to = ranks.index(places.neighbour(me))
    sources = [place for place, rank in enumerate(ranks) if places.neighbour(rank) == me]
    device = message_device(group, frozenset({"cpu"}))
    found: list[Item] = []
    more: dict[str, Any] = {}
    own, theirs = LocalBoxes(), LocalBoxes()
    by_pair: dict[tuple[int, int], list[Stretch]] = {}
    told = _told(items, values, to, sources, group, device, timeout)
    for source, (described, given) in told.items():
        more.update(given)
        made = []
        for path, shape, dtype, boxes in described:
            chunks = [Chunk(offset, torch.empty(size, dtype=dtype)) for offset, size in boxes]
            made.append(Item(path, shape, chunks, dtype))
        found += made
        by_pair[ranks[source], me] = _stretches(made, theirs, ranks[source])
    by_pair[me, ranks[to]] = _stretches(items, own, me)
    messages = messages_of(by_pair, me, max(ranks) + 1, most_of(_UNDER_WAY))
    Carrier(group, ranks, device, own, theirs, _UNDER_WAY, messages, tuple, timeout).carry()
    return found, more


def _stretches(items: Iterable[Item], held: LocalBoxes, rank: int) -> list[Stretch]:
    """Add the boxes that a rank gives to those held here; return their bytes."""
    found: list[Stretch] = []
    for item in items:
        name = f"{item.key} of rank {rank}"
        held.add(item, name)
        form = item.form
        tensor = MovedTensor(name, name, form.dtype, form.itemsize)
        for chunk in item.chunks:
            run = Run(0, [tensor], chunk.data.nbytes >= LARGE, [chunk.box])
            if run.size:
                found.append((run, 0, run.size))
    return found


def _told(
    items: Sequence[Item],
    values: Mapping[str, Any],
    to: int,
    sources: Sequence[int],
    group: ProcessGroup,
    device: torch.device,
    timeout: float,
) -> dict[int, Any]:
    """Exchange descriptions: of each source the paths, shapes, dtypes and boxes, and the values."""
    boxes = [
        (each.path, each.shape, each.dtype, [chunk.box for chunk in each.chunks]) for each in items
    ]
    head = as_tensor(pickle.dumps((boxes, dict(values))), device)
    lengths = all_gather(torch.tensor([len(head)], device=device), group).tolist()
    heads = [torch.empty(lengths[source], dtype=torch.uint8, device=device) for source in sources]
    recvs = list(zip(heads, sources, strict=True))
    for work in start_transfers(group, [(head, to)], recvs, lambda error, _: error):
        wait_for(work, None if starts_batches(group, device) else timeout)
    return {
        source: pickle.loads(as_bytes(received))
        for source, received in zip(sources, heads, strict=True)
    }


# -- what ranks have together ------------------------------------------------------------


@dataclass(frozen=True)
class Inventory:
    """One rank's description of a state that it has kept.

    Args:
        step, tag: the state's.
        own, others: layouts of its own boxes, and of boxes kept for other ranks.
        values, others_values: their keys.
        forms: as the state's.
    """

    step: int
    tag: str
    own: bytes
    others: bytes
    values: list[str]
    others_values: list[str]
    forms: Mapping[str, Form | None]

    @classmethod
    def of(cls, state: Kept) -> Inventory:
        own, others = (_boxes(each).layout for each in (state.own, state.others))
        values, more = list(state.values), list(state.others_values)
        return cls(state.step, state.tag, own, others, values, more, state.forms)


def missing(told: Sequence[Inventory], with_others: bool) -> list[str]:
    """The keys of a state that ranks do not have all of, together.

    Args:
        told: by ranks that have the state.
        with_others: whether what they have for their neighbours counts.
    """
    values = {key for each in told for key in each.values}
    if with_others:
        values |= {key for each in told for key in each.others_values}
    counted = [each.own for each in told] + [each.others for each in told if with_others]
    held = GridLayouts.of(dict(enumerate(counted)))
    lost = []
    for key, form in told[0].forms.items():
        if form is None:
            whole = key in values
        else:  # boxes of one grid are equal, or have nothing in common
            boxes = (box for box, _ in held.places_of(key))
            whole = sum(map(volume, boxes)) == math.prod(form.shape)
        if not whole:
            lost.append(key)
    return lost
