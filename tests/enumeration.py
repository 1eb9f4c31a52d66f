"""Brute-force oracle of ranks: coordinates by counting up, groups by looking at every rank.

Nothing here knows strides, layouts or closed forms: itertools and dictionaries alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

Coordinates = dict[int, dict[str, int]]
T = TypeVar("T")


def coordinates(sizes: Mapping[str, int], ranks: Sequence[int]) -> Coordinates:
    """Coordinate of each rank: the p-th rank has the p-th coordinate, the first axis fastest.

    `coordinates({"tp": 2, "dp": 2}, [5, 2, 0, 7])[2]` is `{"tp": 1, "dp": 0}`.
    """
    counted = itertools.product(*(range(n) for n in reversed(sizes.values())))
    return {
        rank: dict(zip(sizes, reversed(index), strict=True))
        for rank, index in zip(ranks, counted, strict=True)
    }


def groups_along(table: Coordinates, axes: Iterable[str]) -> dict[int, tuple[int, ...]]:
    """Group of each rank: the ranks that differ from it along `axes` alone."""
    moving = set(axes)
    keys = {r: tuple(i for axis, i in at.items() if axis not in moving) for r, at in table.items()}
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, key in keys.items():
        groups.setdefault(key, []).append(rank)
    return {rank: tuple(groups[key]) for rank, key in keys.items()}


def picked(members: tuple[int, ...], places: Iterable[int | str]) -> tuple[int, ...]:
    """Members of a group at these places, such as `("first", "last")`."""
    ends = {"first": 0, "last": len(members) - 1}
    kept = {ends[place] if isinstance(place, str) else place for place in places}
    return tuple(rank for place, rank in enumerate(members) if place in kept)


def part_of_split(members: tuple[int, ...], rank: int, size: int, stride: int) -> tuple[int, ...]:
    """Part with `rank` where a group is split into parts of `size` members `stride` apart."""
    at = members.index(rank)
    return tuple(
        other
        for place, other in enumerate(members)
        if place % stride == at % stride and place // (size * stride) == at // (size * stride)
    )


def subsets(items: Sequence[T], least: int = 1) -> Iterator[tuple[T, ...]]:
    """All choices of at least `least` items, in their order."""
    for count in range(least, len(items) + 1):
        yield from itertools.combinations(items, count)


def factorizations(total: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `total` as a product of `count` sizes, order counted."""
    if count == 0:
        if total == 1:
            yield ()
        return
    for size in (n for n in range(1, total + 1) if total % n == 0):
        for rest in factorizations(total // size, count - 1):
            yield (size, *rest)
