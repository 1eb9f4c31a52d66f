"""Arithmetic on ranks: which rank sits where, and who shares what with whom.

A layout is a mixed-radix number system. Each axis contributes *modes*, pairs of a
size and a stride, and a rank is `offset + sum(digit * stride)`. An axis of a fresh
layout has one mode; flattening axes that are not adjacent gives an axis with
several. It is the idea of CuTe's layout algebra
(https://docs.nvidia.com/cutlass/media/docs/cpp/cute/02_layout_algebra.html), cut
down to what sets of ranks need. Nothing here imports torch or touches a device.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, overload

from commgrid.errors import NotInGridError, SpecError


class Mode(NamedTuple):
    """One digit of the number system: `size` values, `stride` ranks apart."""

    size: int
    stride: int


def _coalesce(modes: Iterable[Mode]) -> tuple[Mode, ...]:
    """The same set of offsets in fewest modes, smallest stride first."""
    merged: list[Mode] = []
    for mode in sorted((m for m in modes if m.size > 1), key=lambda m: m.stride):
        if merged and mode.stride == merged[-1].size * merged[-1].stride:
            merged[-1] = Mode(merged[-1].size * mode.size, merged[-1].stride)
        else:
            merged.append(mode)
    return tuple(merged)


@dataclass(frozen=True)
class RankSet(Sequence[int]):
    """A set of ranks in ascending order, stored in a few integers however many they are.

    Behaves like a tuple of ranks (as `range` does for one stride); two sets are equal
    exactly when they hold the same ranks.

    >>> halves = RankSet(8, (Mode(2, 1), Mode(2, 4)))
    >>> tuple(halves), halves[2], halves.index(13), 12 in halves, len(halves)
    ((8, 9, 12, 13), 12, 3, True, 4)
    """

    offset: int
    modes: tuple[Mode, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "modes", _coalesce(self.modes))

    def __len__(self) -> int:
        return math.prod(mode.size for mode in self.modes)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        position = range(len(self))[operator.index(index)]
        rank = self.offset
        for size, stride in self.modes:
            position, digit = divmod(position, size)
            rank += digit * stride
        return rank

    def __iter__(self) -> Iterator[int]:
        spans = [range(0, m.size * m.stride, m.stride) for m in reversed(self.modes)]
        return (self.offset + sum(digits) for digits in product(*spans))

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and self._position(rank) is not None

    def index(self, rank: int, start: int = 0, stop: int | None = None) -> int:
        """The position of `rank`, its group rank; ValueError if it is not in the set."""
        position = self._position(rank)
        if position is None or not start <= position < (len(self) if stop is None else stop):
            raise ValueError(f"rank {rank} is not in {self}")
        return position

    def _position(self, rank: int) -> int | None:
        remainder, position, weight = rank - self.offset, 0, len(self)
        for size, stride in reversed(self.modes):
            weight //= size
            digit, remainder = divmod(remainder, stride)
            if not 0 <= digit < size:
                return None
            position += digit * weight
        return position if remainder == 0 else None

    def __str__(self) -> str:
        """Short and unambiguous: the first rank, then size x stride of each mode."""
        return "+".join([str(self.offset), *(f"{m.size}x{m.stride}" for m in self.modes)])

    def describe(self) -> str:
        """The set in words, however large: `ranks 0 to 15`, `ranks 0 to 14 (8 of them)`."""
        if len(self) == 1:
            return f"rank {self.offset}"
        span = f"ranks {self[0]} to {self[-1]}"
        return span if self[-1] - self[0] + 1 == len(self) else f"{span} ({len(self)} of them)"

    @classmethod
    def of(cls, ranks: Iterable[int]) -> RankSet | tuple[int, ...]:
        """The set of these ranks, or a sorted tuple where no few modes describe them.

        >>> RankSet.of([4, 0, 5, 1]), RankSet.of([0, 1, 3])
        (RankSet(offset=0, modes=(Mode(size=2, stride=1), Mode(size=2, stride=4))), (0, 1, 3))
        """
        ordered = tuple(sorted(set(ranks)))
        modes, starts = [], ordered
        while len(starts) > 1:
            stride = starts[1] - starts[0]
            size = next(
                (i for i, r in enumerate(starts) if r != starts[0] + i * stride), len(starts)
            )
            modes.append(Mode(size, stride))
            starts = starts[::size]
        made = cls(ordered[0], tuple(modes)) if ordered else ordered
        return made if tuple(made) == ordered else ordered


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

    >>> layout = RankLayout.from_sizes({"tp": 2, "cp": 2, "dp": 2})
    >>> layout.coordinate(5)
    {'tp': 1, 'cp': 0, 'dp': 1}
    >>> layout.rank(tp=1, cp=0, dp=1)
    5
    >>> tuple(layout.group(5, "tp")), tuple(layout.group(5, "dp", "tp"))
    ((4, 5), (0, 1, 4, 5))
    >>> [tuple(group) for group in layout.groups("cp")]
    [(0, 2), (1, 3), (4, 6), (5, 7)]
    """

    axes: tuple[Axis, ...]
    offset: int = 0

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        if len(set(names)) < len(names):
            raise SpecError(f"axis names must differ, got {', '.join(names)}")
        for axis in self.axes:
            if axis.size < 1:
                raise SpecError(f"axis {axis.name} has size {axis.size}; it must be at least 1")
        reach = 0  # the furthest a rank can be from the offset by the modes seen so far
        for mode in sorted((m for m in self._modes() if m.size > 1), key=lambda m: m.stride):
            if mode.stride <= reach:
                raise SpecError(
                    f"a stride of {mode.stride} lets two coordinates mean one rank: the modes of "
                    f"smaller stride already reach {reach} ranks further; it must be larger"
                )
            reach += (mode.size - 1) * mode.stride

    @classmethod
    def from_sizes(
        cls, sizes: Mapping[str, int], *, offset: int = 0, stride: int = 1
    ) -> RankLayout:
        """Axes laid out one after another, the first one fastest.

        Args:
            sizes: axis name to size, fastest-varying first.
            offset: the first rank.
            stride: the distance between neighbouring ranks (2: every other rank).

        Example:
            >>> RankLayout.from_sizes({"tp": 2, "dp": 2}, offset=2048, stride=2).ranks[:]
            (2048, 2050, 2052, 2054)
        """
        axes = []
        for name, size in sizes.items():
            axes.append(Axis(name, (Mode(size, stride),)))
            stride *= size
        return cls(tuple(axes), offset)

    def _modes(self) -> list[Mode]:
        return [mode for axis in self.axes for mode in axis.modes]

    @property
    def shape(self) -> dict[str, int]:
        """Axis name to size, fastest-varying first."""
        return {axis.name: axis.size for axis in self.axes}

    @property
    def ranks(self) -> RankSet:
        """All ranks of the layout, ascending."""
        return RankSet(self.offset, tuple(self._modes()))

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
        if rank not in self.ranks:
            raise NotInGridError(f"rank {rank} is not one of {self.ranks.describe()}")
        # Nested modes (checked at construction): dividing by falling strides peels each digit.
        digits, remainder = {}, rank - self.offset
        for mode in sorted(set(self._modes()), key=lambda m: m.stride, reverse=True):
            if mode.size > 1:
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
        rank = self.offset
        for name, index in coordinate.items():
            axis = self.axis(name)
            if not 0 <= index < axis.size:
                raise SpecError(f"{name}={index} is outside axis {name} of size {axis.size}")
            rank += axis.shift(index)
        return rank

    def group(self, rank: int, *axes: str) -> RankSet:
        """The ranks that differ from `rank` only along `axes`, ascending.

        Raises:
            NotInGridError: the layout does not hold this rank.
        """
        coordinate = self.coordinate(rank)
        picked = [self.axis(name) for name in axes]
        base = rank - sum(axis.shift(coordinate[axis.name]) for axis in picked)
        return RankSet(base, tuple(mode for axis in picked for mode in axis.modes))

    def groups(self, *axes: str) -> list[RankSet]:
        """Every group along `axes`, ordered by first rank; together they partition the ranks."""
        picked = tuple(mode for name in axes for mode in self.axis(name).modes)
        rest = [mode for axis in self.axes if axis.name not in axes for mode in axis.modes]
        return [RankSet(base, picked) for base in RankSet(self.offset, tuple(rest))]

    def select(self, **fixed: int) -> RankLayout:
        """The sub-layout in which the given axes have the given index.

        >>> RankLayout.from_sizes({"tp": 2, "dp": 4}).select(dp=2).ranks[:]
        (4, 5)
        """
        base = self.rank(**fixed)
        return RankLayout(tuple(a for a in self.axes if a.name not in fixed), base)

    def flatten(self, *axes: str, into: str) -> RankLayout:
        """Several axes as one, at the place of the fastest of them; they need not be adjacent.

        >>> layout = RankLayout.from_sizes({"tp": 2, "cp": 2, "dp": 2})
        >>> flat = layout.flatten("dp", "tp", into="dp_tp")
        >>> flat.shape, flat.coordinate(5)
        ({'dp_tp': 4, 'cp': 2}, {'dp_tp': 3, 'cp': 0})
        """
        if not axes:
            raise SpecError("flatten needs at least one axis")
        wanted = {self.axis(name).name for name in axes}
        modes = tuple(m for axis in self.axes if axis.name in wanted for m in axis.modes)
        rebuilt: list[Axis] = []
        for axis in self.axes:
            if axis.name not in wanted:
                rebuilt.append(axis)
            elif all(done.name != into for done in rebuilt):
                rebuilt.append(Axis(into, modes))
        return RankLayout(tuple(rebuilt), self.offset)

    def split(self, name: str, parts: Mapping[str, int]) -> RankLayout:
        """One axis as several; `parts` are names and sizes, fastest-varying first.

        >>> layout = RankLayout.from_sizes({"tp": 2, "dp": 4})
        >>> layout.split("dp", {"dp_shard": 2, "dp_replicate": 2}).coordinate(5)
        {'tp': 1, 'dp_shard': 0, 'dp_replicate': 1}

        Raises:
            SpecError: the sizes do not multiply to the axis, or cut through one of its modes.
        """
        axis = self.axis(name)
        if math.prod(parts.values()) != axis.size:
            given = "·".join(f"{part}={size}" for part, size in parts.items())
            raise SpecError(f"cannot split {name} of size {axis.size} into {given}")
        left, split = list(axis.modes), []
        for part, size in parts.items():
            modes = []
            while size > 1:
                mode = left.pop(0)
                if mode.size <= size and size % mode.size == 0:
                    modes.append(mode)
                    size //= mode.size
                elif mode.size % size == 0:
                    modes.append(Mode(size, mode.stride))
                    left.insert(0, Mode(mode.size // size, mode.stride * size))
                    size = 1
                else:
                    sizes = "·".join(str(m.size) for m in axis.modes)
                    raise SpecError(f"{part}={size} cuts through {name}, which is made of {sizes}")
            split.append(Axis(part, tuple(modes)))
        at = self.axes.index(axis)
        return RankLayout(self.axes[:at] + tuple(split) + self.axes[at + 1 :], self.offset)

    def permute(self, *axes: str) -> RankLayout:
        """The same ranks with the axes listed in another order; no rank moves."""
        if sorted(axes) != sorted(axis.name for axis in self.axes):
            known = ", ".join(axis.name for axis in self.axes)
            raise SpecError(f"permute needs each of {known} once, got {', '.join(axes)}")
        return RankLayout(tuple(self.axis(name) for name in axes), self.offset)

    def overlap(self, other: RankLayout) -> tuple[int, ...]:
        """The ranks that both layouts hold, ascending.

        >>> odd = RankLayout.from_sizes({"dp": 4}, offset=1, stride=2)
        >>> RankLayout.from_sizes({"dp": 4}).overlap(odd)
        (1, 3)
        """
        small, large = sorted((self.ranks, other.ranks), key=len)
        if small[-1] < large[0] or large[-1] < small[0]:
            return ()
        return tuple(rank for rank in small if rank in large)
