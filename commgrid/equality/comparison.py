"""Comparison of numbers among ranks: finds those that differ; every rank gets the error.

    each group      largest and smallest of every fact's numbers         one all-reduce
    a fact differs  its numbers of each rank, for the error              one all-gather
    all ranks       share the first error                                one all-reduce a group

A number that is NaN says nothing: only ranks with a number are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from commgrid.collectives.objects import gathered
from commgrid.collectives.plain import all_gather, all_reduce
from commgrid.equality.digest import device_for
from commgrid.errors import CommGridError, GridMismatchError

ByRank = Mapping[int, Sequence[float]]
"""Each rank's numbers of a fact."""
Error = Callable[[int, ByRank], CommGridError | None]
"""Makes the error of a fact from the first place that differs and each rank's numbers; None: no
error after all."""
Differs = Callable[[Tensor, Tensor], int | None]
"""Returns the first place that differs, from the largest and the smallest numbers; or None."""


@dataclass(frozen=True)
class Fact:
    """Numbers that must be equal on the ranks of a group.

    Args:
        group: every rank passes the same facts in the same order.
        numbers: exact in fp64, as many on every rank; NaN or infinite: this rank has none.
        error: of numbers that differ.
        differs: None: any difference counts.
    """

    group: ProcessGroup
    numbers: Tensor | Sequence[float]
    error: Error
    differs: Differs | None = None


def exactly(largest: Tensor, smallest: Tensor) -> int | None:
    """The first place where ranks differ."""
    return first_place(largest > smallest)


def first_place(is_wrong: Tensor) -> int | None:
    """The first True of a vector."""
    return int(is_wrong.nonzero()[0]) if bool(is_wrong.any()) else None


def ends_of(by_rank: ByRank, place: int) -> tuple[tuple[float, int], tuple[float, int]]:
    """The smallest and the largest number in one place, each with a rank that has it."""
    known = [(row[place], rank) for rank, row in by_rank.items() if not math.isnan(row[place])]
    return min(known), max(known)


def compare(
    facts: Iterable[Fact], everyone: Iterable[ProcessGroup], mark: bool = False
) -> tuple[CommGridError | None, bool]:
    """Return the first error, or None, and whether any rank has the mark; collective.

    Args:
        facts: this rank's; each is compared over its group.
        everyone: groups that together reach every rank, in one order on all of them; after the
            comparison either all of these ranks have an error or none has.
        mark: of this rank.
    """
    by_group: dict[ProcessGroup, list[Fact]] = {}
    for fact in facts:
        by_group.setdefault(fact.group, []).append(fact)
    wrong: CommGridError | None = None
    for group, alike in by_group.items():
        told = _compare(group, alike)
        wrong = wrong or told
    return on_all(wrong, everyone, mark)


def on_all(
    wrong: CommGridError | None, everyone: Iterable[ProcessGroup], mark: bool = False
) -> tuple[CommGridError | None, bool]:
    """Return this rank's error, or another rank's, and whether any rank has the mark; collective.

    Args:
        wrong: of this rank; None: it has none.
        everyone, mark: as for `compare`.
    """
    for group in everyone:
        mine = torch.tensor([wrong is not None, mark], device=device_for(group)).long()
        is_wrong, mark = map(bool, all_reduce(mine, group, op="max").tolist())
        if is_wrong:
            said = gathered("" if wrong is None else str(wrong), group)
            wrong = wrong or GridMismatchError(next(filter(None, said)))
    return wrong, mark


ABSENT = -(1 << 63)
"""Stands for no number in `odd_places`; less than any number and its negative."""


def odd_places(mine: Tensor, group: ProcessGroup) -> tuple[int, int, dict[int, int]] | None:
    """Compare many whole numbers among ranks, such as digests; collective over the group.

    Args:
        mine: int64, each with a negative; `ABSENT` where this rank has none.

    Returns:
        How many places differ, the first of them, and its number on each rank; None: none does.
    """
    both = torch.cat([mine, torch.where(mine == ABSENT, mine, -mine)])
    largest, smallest = all_reduce(both, group, op="max").chunk(2)
    odd = (largest != -smallest).nonzero().flatten()
    if not len(odd):
        return None
    first = int(odd[0])
    found = all_gather(mine[first : first + 1], group).tolist()
    by_rank = dict(zip(dist.get_process_group_ranks(group), found, strict=True))
    return len(odd), first, by_rank


def _compare(group: ProcessGroup, facts: list[Fact]) -> CommGridError | None:
    given = [torch.as_tensor(fact.numbers, dtype=torch.float64) for fact in facts]
    numbers = torch.cat(given)
    both = torch.cat([numbers, -numbers])
    both = torch.where(both.isnan(), -torch.inf, both).to(device_for(group))
    ends = all_reduce(both, group, op="max").cpu()
    largest, smallest = torch.where(ends == -torch.inf, torch.nan, ends).chunk(2)
    sizes = [len(each) for each in given]
    ends_of_each = zip(torch.split(largest, sizes), torch.split(-smallest, sizes), strict=True)
    for fact, own, (high, low) in zip(facts, given, ends_of_each, strict=True):
        place = (fact.differs or exactly)(high, low)
        if place is not None:
            rows = all_gather(own.to(device_for(group)), group).view(group.size(), -1)
            ranks = dist.get_process_group_ranks(group)
            told = fact.error(place, dict(zip(ranks, rows.tolist(), strict=True)))
            if told is not None:
                return told
    return None
