"""Comparisons between the ranks of a transfer: copies, replicas, and numbers that would be lost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from commgrid.collectives.plain import all_reduce
from commgrid.equality.comparison import ABSENT, odd_places
from commgrid.equality.digest import condensed, digest
from commgrid.equality.lost_numbers import Lost, lost_numbers, narrows
from commgrid.errors import TransferError
from commgrid.layout.box import Box
from commgrid.layout.rank_text import describe_ranks
from commgrid.resharding.layouts import GridLayouts
from commgrid.resharding.local_boxes import LocalBoxes
from commgrid.torch_compat import groups as torch_groups

_PARTS = "optimizer."


def check_replicas(target: GridLayouts, places: Mapping[int, tuple[int, ...]]) -> None:
    """Refuse a replica that leaves out some of the names of another one.

    Args:
        target: what its ranks hold.
        places: each rank's coordinates on the axes along which it is no replica.

    Raises:
        TransferError: names the tensor and both ranks.
    """
    first: dict[tuple[Any, ...], int] = {}
    for rank, place in target.places.items():
        first.setdefault((places[rank], place), rank)
    by_place: dict[tuple[int, ...], list[int]] = {}
    for (where, _), rank in first.items():
        by_place.setdefault(where, []).append(rank)
    for ranks in by_place.values():
        held = {  # of optimizers ranks along dp may have parts of their own
            rank: {
                n: form for n, form in target.held_by(rank).items() if not n.startswith(_PARTS)
            }.items()
            for rank in ranks
        }
        most = max(ranks, key=lambda rank: len(held[rank]))
        if not all(held[rank] <= held[most] for rank in ranks):
            continue  # such as ranks that have other experts
        for rank in ranks:
            left_out = [name for name, _ in held[most] - held[rank]]
            if held[rank] and left_out:
                raise TransferError(
                    f"rank {rank} of the target is a replica of rank {most}, and leaves out "
                    f"{min(left_out)}, which would stay as it is there; give both the same names, "
                    "or leave it out with only="
                )


def lost_between(
    held: LocalBoxes | None,
    source: GridLayouts,
    target: GridLayouts,
    group: ProcessGroup,
    device: torch.device,
) -> dict[str, Lost]:
    """Count what targets of narrower dtypes do not hold; collective over the group.

    Of copies one counts, and all of them where that one has lost nothing.

    Args:
        held: this rank's boxes of the source.
        source, target: both sides.

    Returns:
        For each such target.
    """
    dtypes: dict[str, torch.dtype] = {}
    reads = target.reads
    for name, form in target.forms.items():
        if narrows(source.forms[reads[name]].torch_dtype, form.torch_dtype):
            dtypes[name] = form.torch_dtype
    if not dtypes:
        return {}
    me = dist.get_process_group_ranks(group)[group.rank()]
    counts = torch.zeros(len(dtypes), 2, 2, dtype=torch.int64)
    for row, (name, dtype) in zip(counts, dtypes.items(), strict=True):
        tensors = held.tensors(reads[name]) if held is not None else []
        forms = source.held_as(reads[name]) if tensors else {}
        for tensor, box in zip(
            tensors, forms[source.places[me]].boxes if tensors else (), strict=True
        ):
            holders = (min(source.ranks_of[p]) for p, form in forms.items() if box in form.boxes)
            lost = lost_numbers(tensor, dtype, 0)
            both = torch.tensor([lost.overflowed, lost.vanished])
            row[1] += both
            row[0] += both if me == min(holders) else 0
    rows = all_reduce(counts.to(device), group, op="sum").tolist()
    found = {}
    for (name, dtype), (once, all_copies) in zip(dtypes.items(), rows, strict=True):
        form = target.forms[name]
        total = math.prod(form.shape) * (2 if dtype.is_complex else 1)
        overflowed, vanished = once if any(once) else all_copies
        found[name] = Lost(form.dtype, overflowed, vanished, total)
    return found


_Shared = tuple[int, list[str], Box, tuple[int, ...]]
"""A box that several ranks hold of tensors that lie alike: its number of the first of these, which
the others' follow, their names, the box, and the ranks that have it."""


class SharedBoxes:
    """The boxes of a source's tensors that several ranks hold, which should be equal.

    Tensors of one name and one box are copies: on ranks along dp, on stages that tie a weight, or
    in two mappings.

    Args:
        side: what all ranks hold.
        group: whose ranks compare, with or without boxes of their own.
    """

    def __init__(self, side: GridLayouts, group: ProcessGroup) -> None:
        self._group = group
        self._own = dist.get_process_group_ranks(group)[group.rank()]
        alike: dict[Any, list[str]] = {}
        for name, kind in side.kinds.items():
            alike.setdefault(kind, []).append(name)
        self._shared: list[_Shared] = []
        self._sets: dict[tuple[int, ...], int] = {}  # ranks that share some boxes, numbered
        self._count = 0
        for names in alike.values():
            for box, places in side.places_of(names[0]):
                ranks = side.ranks_with(places)
                if len(ranks) > 1:
                    self._shared.append((self._count, names, box, ranks))
                    self._count += len(names)
                    self._sets.setdefault(ranks, len(self._sets))

    def seem_to_differ(
        self, held: LocalBoxes | None, asks: bool
    ) -> tuple[bool, bool, Exception | None]:
        """Compare one number of all boxes that the same ranks hold. Collective over the group.

        Args:
            asks: what is agreed on beside it.

        Returns:
            Whether `differing` is to say more, the same on all ranks: numbers differ, as they may
            between processors of two kinds, or a rank has an error; whether one of them asks; and
            this rank's error.
        """
        mine, failed = self._absent(len(self._sets)), None
        try:
            parts: dict[int, list[Tensor]] = {}
            for _, tensor, ranks in self._own_boxes(held):
                one = condensed(tensor).to(mine.device)
                parts.setdefault(self._sets[ranks], []).append(one)
            for number, some in parts.items():
                mine[number] = digest(torch.cat(some)).bitwise_right_shift(1)
        except Exception as error:  # which the others, who wait, are to hear
            failed = error
        both = torch.cat([mine, torch.where(mine == ABSENT, mine, -mine)])
        flags = mine.new_tensor([failed is not None, asks])  # with them it is one all-reduce
        ends = all_reduce(torch.cat([both, flags]), self._group, op="max")
        largest, smallest = ends[:-2].chunk(2)
        fails, asked = ends[-2:].tolist()
        return bool(fails) or not torch.equal(largest, -smallest), bool(asked), failed

    def differing(self, held: LocalBoxes | None) -> str | None:
        """Describe a difference, with its ranks; None: there is none. Collective over the group."""
        mine = self._absent(self._count)
        for number, tensor, _ in self._own_boxes(held):
            mine[number] = digest(tensor).bitwise_right_shift(1)
        odd = odd_places(mine, self._group)
        if odd is None:
            return None
        count, first, by_rank = odd
        start, names, box, ranks = next(s for s in reversed(self._shared) if s[0] <= first)
        lead = [one for one in ranks if by_rank[one] == by_rank[ranks[0]]]
        others = describe_ranks([one for one in ranks if one not in lead])
        more = f", and so do {count - 1} more tensors" if count > 1 else ""
        return (
            f"{names[first - start]}, of which {describe_ranks(ranks)} hold {list(box[1])} at "
            f"{list(box[0])}, differs between {describe_ranks(lead)} and {others}{more}"
        )

    def _absent(self, count: int) -> Tensor:
        """Numbers of boxes that this rank has not; those of others have a negative each."""
        return torch.full((count,), ABSENT, device=torch_groups.devices_of(self._group)[-1])

    def _own_boxes(self, held: LocalBoxes | None) -> Iterator[tuple[int, Tensor, tuple[int, ...]]]:
        """This rank's boxes, each with its number and the ranks that have it."""
        for start, names, box, ranks in self._shared:
            if held is not None and self._own in ranks:
                for number, name in enumerate(names, start):
                    yield number, held.view(name, box), ranks
