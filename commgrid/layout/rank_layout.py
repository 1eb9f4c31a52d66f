"""Arithmetic on ranks: coordinates and groups.

A layout is a mixed-radix number system. Each axis contributes *modes*, pairs of a
size and a stride, and a rank is `offset + sum(digit * stride)`. It is the idea of CuTe's layout
algebra (https://docs.nvidia.com/cutlass/media/docs/cpp/cute/02_layout_algebra.html),
cut down to sets of ranks. Over a list of ranks in any order the arithmetic is
on places in that list, which turn into ranks at the edge. Nothing here imports torch
or touches a device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from commgrid.errors import NotInGridError, SpecError
from commgrid.layout.rank_text import describe_ranks
from commgrid.layout.ranks import Mode, Ranks, RankSet, RankTuple, as_ranks


@dataclass(frozen=True)
class Axis:
    """A named axis and its modes, fastest-varying first."""

    name: str
    modes: tuple[Mode, ...]

    @property
    def size(self) -> int:
        return math.prod(mode.size for mode in self.modes)

    def shift(self, index: int) -> int:
        """How far `index` steps along the axis move a rank."""
        shift = 0
        for size, stride in self.modes:
            index, digit = divmod(index, size)
            shift += digit * stride
        return shift


@dataclass(frozen=True)
class RankLayout:
    """Named axes over a set of ranks, fastest-varying first.

    Args:
        axes: with different names; no two coordinates mean one place.
        offset: the place of the rank whose index is 0 along every axis.
        listed: the rank at each place; None: a place is a rank.

    >>> layout = RankLayout.from_sizes({"tp": 2, "cp": 2, "dp": 2})
    >>> layout.coordinate(5)
    {'tp': 1, 'cp': 0, 'dp': 1}
    >>> layout.rank(tp=1, cp=0, dp=1)
    5
    >>> tuple(layout.group(5, "tp")), tuple(layout.group(5, "dp", "tp"))
    ((4, 5), (0, 1, 4, 5))
    >>> [tuple(group) for group in layout.groups("cp")]
    [(0, 2), (1, 3), (4, 6), (5, 7)]
    >>> layout = RankLayout.from_sizes({"tp": 2, "dp": 3}, ranks=[5, 2, 0, 7, 1, 4])
    >>> layout.coordinate(7), layout.group(7, "tp"), layout.group(7, "dp")
    ({'tp': 1, 'dp': 1}, (0, 7), (2, 7, 4))
    """

    axes: tuple[Axis, ...]
    offset: int = 0
    listed: RankTuple | None = None

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        if len(set(names)) < len(names):
            raise SpecError(f"axis names must differ, got {', '.join(names)}; name each once")
        for axis in self.axes:
            if axis.size < 1:
                raise SpecError(f"axis {axis.name} has size {axis.size}; it must be at least 1")
        reach = 0  # the furthest a rank can be from the offset by the modes seen so far
        for mode in sorted((m for m in self._modes if m.size > 1), key=lambda m: m.stride):
            if mode.stride <= reach:
                raise SpecError(
                    f"a stride of {mode.stride} lets two coordinates mean one rank: the modes of "
                    f"smaller stride already reach {reach} ranks further; it must be larger"
                )
            reach += (mode.size - 1) * mode.stride
        if self.listed is not None and self.offset + reach >= len(self.listed):
            raise SpecError(
                f"the axes reach place {self.offset + reach} of the {len(self.listed)} ranks listed"
            )

    @classmethod
    def from_sizes(
        cls,
        sizes: Mapping[str, int],
        *,
        offset: int = 0,
        stride: int = 1,
        ranks: Iterable[int] | None = None,
    ) -> RankLayout:
        """Axes laid out one after another, the first one fastest.

        Args:
            sizes: axis name to size, fastest-varying first.
            offset: the first rank.
            stride: the distance between neighbouring ranks (2: every other rank).
            ranks: instead of offset and stride: distinct ranks in any order, as many as the
                sizes make; the one at place p has the coordinate that p has in a layout from 0.

        Raises:
            SpecError: a size below 1, or another number of ranks.

        Example:
            >>> RankLayout.from_sizes({"tp": 2, "dp": 2}, offset=2048, stride=2).ranks[:]
            (2048, 2050, 2052, 2054)
        """
        covered = None if ranks is None else as_ranks(ranks)
        if covered is not None and len(covered) != math.prod(sizes.values()):
            given = " · ".join(f"{name}={size}" for name, size in sizes.items())
            raise SpecError(f"{given} is not the {len(covered)} ranks listed")
        if isinstance(covered, range):
            offset, stride = covered.start, covered.step
        axes = []
        for name, size in sizes.items():
            axes.append(Axis(name, (Mode(size, stride),)))
            stride *= size
        return cls(tuple(axes), offset, covered if isinstance(covered, RankTuple) else None)

    @cached_property
    def _modes(self) -> tuple[Mode, ...]:
        return tuple(mode for axis in self.axes for mode in axis.modes)

    @cached_property
    def _falling(self) -> tuple[Mode, ...]:
        """The modes that can have an index above 0, by falling stride."""
        real = {mode for mode in self._modes if mode.size > 1}
        return tuple(sorted(real, key=lambda m: m.stride, reverse=True))

    @property
    def shape(self) -> dict[str, int]:
        """Axis name to size, fastest-varying first."""
        return {axis.name: axis.size for axis in self.axes}

    @cached_property
    def _places(self) -> RankSet:
        """The places of all ranks of the layout."""
        return RankSet(self.offset, self._modes)

    @property
    def ranks(self) -> Ranks:
        """All ranks of the layout, in its order: ascending, unless they are listed."""
        if self.listed is not None and len(self) == len(self.listed):
            return self.listed
        return self._at(self._places)

    def _at(self, places: RankSet) -> Ranks:
        """The ranks at these places."""
        return places if self.listed is None else self.listed.take(places)

    def _place(self, rank: int) -> int:
        place = rank if self.listed is None else self.listed.places.get(rank, -1)
        if place not in self._places:
            raise NotInGridError(f"rank {rank} is not one of {describe_ranks(self.ranks)}")
        return place

    def __len__(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    def axis(self, name: str) -> Axis:
        """The axis of this name."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        known = ", ".join(axis.name for axis in self.axes)
        raise SpecError(f"layout has no axis {name!r}; its axes are {known}")

    def coordinate(self, rank: int) -> dict[str, int]:
        """The index of `rank` along every axis.

        Raises:
            NotInGridError: the layout does not hold this rank.
        """
        return self._coordinate_at(self._place(rank))

    def _coordinate_at(self, place: int) -> dict[str, int]:
        # Nested modes (checked at construction): dividing by falling strides peels each digit.
        digits, remainder = {}, place - self.offset
        for mode in self._falling:
            digits[mode], remainder = divmod(remainder, mode.stride)
        coordinate = {}
        for axis in self.axes:
            index, weight = 0, 1
            for mode in axis.modes:
                index += digits.get(mode, 0) * weight
                weight *= mode.size
            coordinate[axis.name] = index
        return coordinate

    def rank(self, **coordinate: int) -> int:
        """The rank at a coordinate; axes left out count as 0.

        Raises:
            SpecError: an unknown axis, or an index outside its axis.
        """
        place = self._place_of(coordinate)
        return place if self.listed is None else self.listed[place]

    def _place_of(self, coordinate: Mapping[str, int]) -> int:
        place = self.offset
        for name, index in coordinate.items():
            axis = self.axis(name)
            if not 0 <= index < axis.size:
                raise SpecError(
                    f"{name}={index} is outside axis {name} of size {axis.size}; "
                    f"expected 0 to {axis.size - 1}"
                )
            place += axis.shift(index)
        return place

    def group(self, rank: int, *axes: str) -> Ranks:
        """The ranks that differ from `rank` only along `axes`, in the layout's order.

        Raises:
            NotInGridError: the layout does not hold this rank.
        """
        place = self._place(rank)
        coordinate = self._coordinate_at(place)
        picked = [self.axis(name) for name in axes]
        base = place - sum(axis.shift(coordinate[axis.name]) for axis in picked)
        return self._at(RankSet(base, tuple(mode for axis in picked for mode in axis.modes)))

    def groups(self, *axes: str) -> list[Ranks]:
        """Every group along `axes`, ordered by the place of its first rank, which in a layout that
        lists no ranks is that rank; together they partition the ranks."""
        picked = RankSet(0, tuple(mode for name in axes for mode in self.axis(name).modes)).modes
        rest = [mode for axis in self.axes if axis.name not in axes for mode in axis.modes]
        return [self._at(RankSet(base, picked)) for base in RankSet(self.offset, tuple(rest))]

    def select(self, **fixed: int) -> RankLayout:
        """The sub-layout in which the given axes have the given index.

        >>> RankLayout.from_sizes({"tp": 2, "dp": 4}).select(dp=2).ranks[:]
        (4, 5)
        """
        kept = tuple(axis for axis in self.axes if axis.name not in fixed)
        return replace(self, axes=kept, offset=self._place_of(fixed))
