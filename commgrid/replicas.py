"""Bitwise comparison of replicas between ranks.

Ranks of a group compare the largest and smallest digest, first of all tensors' digests together,
and if these differ of each tensor, two numbers a tensor for any number of ranks; then those of the
first tensor that differs are gathered, to name the ranks.

The first comparison is of `condensed` tensors. These are equal for equal tensors on one kind of
processor, and on two kinds may not be. So only `digest`s say that tensors differ.

    copies along dp and tp      compared along dp, then along tp; ranks equal along both are equal
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from commgrid.collectives.common_group import DATA, common_group
from commgrid.collectives.group_ref import name_of
from commgrid.equality.comparison import ByRank, Fact, compare, odd_places
from commgrid.equality.digest import MANTISSA, condensed, device_for, digest
from commgrid.equality.values import exact_number_of, number_of
from commgrid.errors import GridMismatchError, NotInGroupError, UnknownGroupError
from commgrid.layout.rank_text import describe_ranks
from commgrid.runtime.grid import HyperCommGrid


@dataclass(frozen=True)
class Copy:
    """A tensor that should be equal on all ranks of some groups.

    Args:
        name: its name in messages.
        tensor: this rank's tensor.
        groups: the groups along which it should be equal.
        key: its common name on all ranks of the groups; "": `name`.
    """

    name: str
    tensor: Tensor
    groups: tuple[ProcessGroup, ...]
    key: str = ""


def differing(
    copies: Iterable[Copy],
    everyone: ProcessGroup | None = None,
    groups: Iterable[ProcessGroup] = (),
) -> str | None:
    """Describe how replicas differ, or return None.

    Collective over every group given, and over `everyone`; all of their ranks must give the same
    groups in the same order.

    Args:
        copies: this rank's, in one order on all ranks of their groups.
        everyone: ranks that all return the description if any of them differ; None: only the
            ranks of a group with a difference do.
        groups: compared over first, also on a rank that has no copies along them.

    Returns:
        A clause that names tensor and ranks.
    """
    by_group: dict[ProcessGroup, list[Copy]] = {group: [] for group in groups}
    for copy in copies:
        for group in copy.groups:
            by_group.setdefault(group, []).append(copy)
    digests = _Digests()
    facts = (_fact(group, alike, digests) for group, alike in by_group.items())
    everyone = everyone if everyone is not None and everyone.size() > 1 else None
    wrong, _ = compare(facts, () if everyone is None else (everyone,))
    return None if wrong is None else str(wrong)


class _Digests:
    """Digests of copies, each taken once for all groups; of copies that live as long."""

    def __init__(self) -> None:
        self._condensed, self._number = cache(condensed), cache(number_of)

    def of_all(self, copies: Sequence[Copy], device: torch.device) -> int:
        """Return one number, which is the same on processors of one kind."""
        parts = [torch.zeros(0, dtype=torch.int8, device=device)]
        parts += [self._condensed(copy.tensor).to(device) for copy in copies]
        return int(digest(torch.cat(parts))) & MANTISSA

    def of_each(self, copies: Sequence[Copy], device: torch.device) -> Tensor:
        """Return one number a copy, without its last bit, so that every one has a negative."""
        if not copies:
            return torch.zeros(0, dtype=torch.int64, device=device)
        numbers = [self._number(copy.tensor).to(device) for copy in copies]
        return torch.stack(numbers).bitwise_right_shift(1)


def _fact(group: ProcessGroup, copies: Sequence[Copy], digests: _Digests) -> Fact:
    """The number, names and types of copies and one digest of all, which are equal together."""
    whole = digests.of_all(copies, device_for(group))
    names = exact_number_of([copy.key or copy.name for copy in copies])
    kinds = exact_number_of([(str(copy.tensor.dtype), copy.tensor.shape) for copy in copies])
    return Fact(group, [len(copies), names, kinds, whole], partial(_told, group, copies, digests))


def _told(
    group: ProcessGroup, copies: Sequence[Copy], digests: _Digests, place: int,
    by_rank: ByRank,
) -> GridMismatchError | None:  # fmt: skip
    """The error that names the first tensor that differs; collective over the group."""
    device, ranks, named = device_for(group), list(by_rank), name_of(group)
    if place < 2:
        who = _holders(ranks, [tuple(row[:2]) for row in by_rank.values()])
        told = " and ".join(f"{count:g} on {describe_ranks(r)}" for (count, _), r in who)
        return GridMismatchError(
            f"tensors of which the ranks of group {named!r} should have copies are not the same "
            f"ones: {told}, of parameters and optimizer state"
        )
    odd = odd_places(digests.of_each(copies, device), group)
    if odd is None:
        return None
    count, first, numbers = odd
    who = _holders(ranks, list(numbers.values()))
    others = f", and so do {count - 1} more tensors" if count > 1 else ""
    told = " and ".join(describe_ranks(holding) for _, holding in who)
    return GridMismatchError(
        f"{copies[first].name} differs between {told} of group {named!r}{others}"
    )


def _holders(ranks: Sequence[int], found: Sequence[Any]) -> list[tuple[Any, list[int]]]:
    """Each distinct value with its ranks, fewest ranks first."""
    holders: dict[Any, list[int]] = {}
    for rank, value in zip(ranks, found, strict=True):
        holders.setdefault(value, []).append(rank)
    return sorted(holders.items(), key=lambda item: len(item[1]))


def groups_along(
    axes: Iterable[str], grid: HyperCommGrid, data: Sequence[str] = DATA
) -> tuple[ProcessGroup, ...]:
    """The grid's groups along each of some axes, of more than one rank.

    If one was not created, returns a created group of just these axes instead; failing that, the
    groups that were created. Each is the `common_group` of its ranks.
    """
    wanted = [axis for axis in axes if grid.size(axis) > 1]
    found = []
    for axis in wanted:
        with suppress(UnknownGroupError, NotInGroupError):
            found.append(common_group(grid.get_group(axis), grid, data))
    if len(found) == len(wanted):
        return tuple(found)
    for name in grid.group_names:
        definition = grid.spec.definitions[name]
        long = {axis for axis in definition.axes if grid.size(axis) > 1}
        if definition.is_whole and long == set(wanted):
            return (common_group(grid.get_group(name), grid, data),)
    return tuple(found)
