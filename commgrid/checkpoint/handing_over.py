"""States in memory of ranks that a rebuild leaves out, handed over to the ranks of the new grid.

    dp 4, rank 2 gone, dp 3 does not divide the batch: dp 2 over (0, 1), rank 3 is left out

    rank 0   own 0, kept for 3
    rank 1   own 1, kept for 0
    rank 3   own 3, kept for 2   ── kept for 2 ──►   rank 0, which has no copy of it

Of the newest state that is complete with them, boxes are handed over of which the new grid has no
copy; nothing, if its ranks have a complete state that is as new.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from commgrid.checkpoint.meeting import everyone
from commgrid.checkpoint.memory import Inventory, Kept, give, kept_states, missing, take_over
from commgrid.collectives.objects import gathered
from commgrid.parameters.boxes import Chunk
from commgrid.resharding.items import Item
from commgrid.runtime.named_failures import named_failures
from commgrid.torch_compat.world import group_timeout

if TYPE_CHECKING:
    from commgrid.runtime.grid import HyperCommGrid

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
