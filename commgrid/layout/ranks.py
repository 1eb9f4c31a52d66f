"""Ranks themselves: sets of them in few integers, lists in any order, and what users give as ranks.

A `RankSet` is a sum of strides, however many ranks it holds; a `RankTuple` lists ranks that no
strides describe, or whose order counts. Nothing here imports torch or touches a device.
"""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from typing import NamedTuple, overload

from commgrid.errors import SpecError


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

    Behaves like a tuple of ranks (as `range` does for one stride), but equals no tuple; two sets
    are equal exactly when they hold the same ranks.

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
        if not self.modes:
            return iter((self.offset,))
        (size, stride), *slower = self.modes
        spans = [range(0, m.size * m.stride, m.stride) for m in reversed(slower)]
        starts = (self.offset + sum(digits) for digits in product(*spans))
        # Ranges are many times as fast as adding up each rank.
        return chain.from_iterable(range(at, at + size * stride, stride) for at in starts)

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

    @property
    def runs(self) -> tuple[RankSet, int] | None:
        """The first ranks of its runs of neighbours, and how many ranks each run has; None: its
        runs may differ.

        >>> RankSet(8, (Mode(4, 1), Mode(2, 16))).runs
        (RankSet(offset=8, modes=(Mode(size=2, stride=16),)), 4)
        """
        starts, length = self, 1
        if self.modes and self.modes[0].stride == 1:
            starts, length = RankSet(self.offset, self.modes[1:]), self.modes[0].size
        return None if length in starts.steps else (starts, length)

    @property
    def steps(self) -> set[int]:
        """The distances between neighbours in the set."""
        found, reach = set(), 0
        for size, stride in self.modes:
            found.add(stride - reach)
            reach += (size - 1) * stride
        return found

    def take(self, places: Sequence[int]) -> Ranks:
        """The members at these places, which ascend.

        >>> RankSet(8, (Mode(4, 2),)).take([0, 3])
        RankSet(offset=8, modes=(Mode(size=2, stride=6),))
        >>> len(RankSet(0, (Mode(10**9, 1), Mode(10**9, 10**10))).take(range(5, 10**18, 10**8)))
        10000000000
        """
        even = self._every(places) if isinstance(places, range) else None
        return RankSet.of(self[place] for place in places) if even is None else even

    def _every(self, places: range) -> RankSet | None:
        """The members at evenly spaced places, where few modes hold them; else None."""
        modes, step, left = [], places.step, len(places)
        for size, stride in self.modes:
            if step % size == 0:
                step //= size
            elif size % step == 0 and (left % (size // step) == 0 or left < size // step):
                count = min(left, size // step)
                modes.append(Mode(count, stride * step))
                step, left = 1, left // count
            else:
                return None
        made = RankSet(self[places[0]], tuple(modes))
        ends = made[-1] == self[places[-1]]
        return made if ends and len(made) == len(places) else None

    @classmethod
    def of(cls, ranks: Iterable[int]) -> Ranks:
        """The set of these ranks, or a sorted tuple where no few modes describe them.

        >>> RankSet.of([4, 0, 5, 1]), RankSet.of([0, 1, 3])
        (RankSet(offset=0, modes=(Mode(size=2, stride=1), Mode(size=2, stride=4))), (0, 1, 3))
        """
        ordered = RankTuple(sorted(set(ranks)))
        modes: list[Mode] = []
        starts: tuple[int, ...] = ordered
        while len(starts) > 1:
            stride = starts[1] - starts[0]
            size = next(
                (i for i, r in enumerate(starts) if r != starts[0] + i * stride), len(starts)
            )
            modes.append(Mode(size, stride))
            starts = starts[::size]
        made = cls(ordered[0], tuple(modes)) if ordered else ordered
        return made if tuple(made) == ordered else ordered


class RankTuple(tuple[int, ...]):
    """Distinct ranks in an order that counts: a tuple with a short `str`.

    >>> listed = RankTuple((5, 2, 0, 7))
    >>> listed.places[0], listed.take([0, 2]), str(listed)
    (2, (5, 0), '5,2,0,7')
    """

    @cached_property
    def places(self) -> dict[int, int]:
        """Each rank's place in the list."""
        return {rank: place for place, rank in enumerate(self)}

    def take(self, places: Iterable[int]) -> RankTuple:
        """The members at these places."""
        return RankTuple(map(self.__getitem__, places))

    def __str__(self) -> str:
        """Short and unambiguous: the ranks, or their number and a digest."""
        text = ",".join(map(str, self))
        if len(text) <= _LONGEST:
            return text
        import hashlib  # slow to load, and few lists are so long

        return f"{len(self)}ranks-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


Ranks = RankSet | RankTuple
"""The members of a group, in the grid's order; of a grid over a range always ascending."""

_LONGEST = 64
"""The longest list of ranks, in characters, within a group's name at the store."""


MOST_RANK = 2**31 - 1
"""The highest rank there can be: torch counts them in 32 bits."""
_MOST_LISTED = 2**24
"""How many ranks may be listed one by one, other than as a range."""


def divisors(number: int) -> list[int]:
    """All of them, ascending, in as many steps as the root of the number.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    low = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return low + [number // size for size in reversed(low) if size * size != number]


def as_index(value: object) -> int | None:
    """The int that anything with `__index__` is (NumPy's, torch's); of others and of bool, None."""
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def whole_number(key: str, value: object, least: int = 1, most: int | None = None) -> int:
    """The int that a value is, within bounds.

    Args:
        key: begins the message.

    Raises:
        SpecError: it is none, or outside of them.

    >>> whole_number("top", 3)
    3
    """
    number = as_index(value)
    too_large = number is not None and most is not None and number > most
    if number is None or number < least or too_large:
        reach = f"to {most:,}" if too_large else "on"
        raise SpecError(f"{key}={value!r}: expected a whole number from {least} {reach}")
    return number


def as_ranks(ranks: object) -> range | RankTuple:
    """The ranks of a grid, in its order: evenly spaced rising ones as a range, others as a tuple.

    Args:
        ranks: a range, distinct integers in any order, YAML's {start, stop, step}, or text such as
            `0-3,6` and `0-14/2`.

    Raises:
        SpecError: there are none, one is repeated or negative, or is no integer.

    Example:
        >>> as_ranks([0, 2, 4]), as_ranks("0-2,4"), as_ranks([3, 2, 1])
        (range(0, 5, 2), (0, 1, 2, 4), (3, 2, 1))
    """
    if isinstance(ranks, str):
        return as_ranks(parse_ranks(ranks))
    if isinstance(ranks, range) and ranks and ranks.step > 0 and ranks[0] >= 0:
        _refuse_above(ranks, ranks[-1])
        return range(ranks[0], ranks[-1] + 1, ranks.step if len(ranks) > 1 else 1)
    if isinstance(ranks, Mapping):  # asked last: Python looks through every kind of mapping
        return as_ranks(_span(ranks))
    listed = check_ranks("ranks", ranks)
    step = listed[1] - listed[0] if len(listed) > 1 else 1
    even = range(listed[0], listed[-1] + 1, step) if step > 0 else range(0)
    return even if len(even) == len(listed) and tuple(even) == listed else listed


def highest_rank(ranks: Ranks | range | tuple[int, ...]) -> int:
    """The highest of some ranks, which is the last of a range or a set.

    >>> highest_rank(range(10**12)), highest_rank((5, 7, 2))
    (999999999999, 7)
    """
    return max(ranks) if isinstance(ranks, tuple) else ranks[-1]


def _refuse_above(given: object, rank: int) -> None:
    if rank > MOST_RANK:
        raise SpecError(f"ranks={_cut(given)}: {_cut(rank)} is no rank; they go up to {MOST_RANK}")


def check_ranks(key: str, ranks: object) -> RankTuple:
    """Distinct ranks in the order given.

    Args:
        key: what messages call them: `ranks`.
        ranks: as a user gave them.

    Raises:
        SpecError: there are none, one is repeated or negative, or is no integer.
    """
    if isinstance(ranks, range) and len(ranks[: _MOST_LISTED + 1]) > _MOST_LISTED:
        raise SpecError(
            f"{key}={_cut(ranks)}: at most {_MOST_LISTED} ranks are listed one by one; "
            "write ranges, as 0-4095"
        )
    unordered = isinstance(ranks, str | bytes | Mapping | set | frozenset)
    try:
        items = None if unordered else list(ranks)  # type: ignore[call-overload]
    except TypeError:
        items = None
    if items is None:
        raise SpecError(
            f"{key}={_cut(ranks)}: expected a list of distinct ranks, whose order counts, such as "
            "[0, 1, 2, 4], or a range"
        )
    found = []
    for place, item in enumerate(items):
        rank = as_index(item)
        if rank is None or rank < 0:
            raise SpecError(
                f"{key}={_cut(ranks)}: {item!r} at place {place} is no rank; expected integers "
                "from 0 on"
            )
        found.append(rank)
    if not found:
        raise SpecError(
            f"{key}={_cut(ranks)}: expected at least one rank; leave {key} out where none are meant"
        )
    made = RankTuple(found)
    if len(set(made)) < len(made):
        doubled = next(rank for rank, count in Counter(made).items() if count > 1)
        raise SpecError(f"{key}={_cut(ranks)}: rank {doubled} is there twice; name each rank once")
    _refuse_above(ranks, max(made))
    return made


def _span(ranks: Mapping[str, object]) -> range:
    given = {"start": 0, "step": 1, **ranks}
    span = [as_index(given.get(key)) for key in ("start", "stop", "step")]
    if set(given) - {"start", "stop", "step"} or None in span or span[2] == 0:
        raise SpecError(
            f"ranks={_cut(dict(ranks))}: expected integers as start, stop and step, or a list of "
            "ranks"
        )
    return range(*(number or 0 for number in span))


def runs_of(ranks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The first and the last of each run of neighbours, in the order given.

    >>> [*runs_of([4, 5, 6, 0, 2])], next(runs_of(range(10**12)))
    ([(4, 6), (0, 0), (2, 2)], (0, 999999999999))
    """
    if isinstance(ranks, range) and ranks and ranks.step > 0:
        ranks = RankSet(ranks.start, (Mode(len(ranks), ranks.step),))
    if isinstance(ranks, RankSet) and ranks.runs is not None:
        starts, length = ranks.runs
        yield from ((start, start + length - 1) for start in starts)
        return
    run: tuple[int, int] | None = None
    for rank in ranks:
        if run is not None and rank == run[1] + 1:
            run = (run[0], rank)
        else:
            if run is not None:
                yield run
            run = (rank, rank)
    if run is not None:
        yield run


def parse_ranks(text: str) -> Iterable[int]:
    """The ranks of `0-3,6`; a dash joins the first and the last, a slash says the step."""
    spans = []
    for piece in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,18})(?:-(\d{1,18})(?:/(\d{1,18}))?)?\s*", piece)
        first, last, step = (found[1], found[2] or found[1], found[3] or 1) if found else (1, 0, 0)
        if int(last) < int(first) or int(step) < 1:
            raise SpecError(
                f"ranks={_cut(text)}: {_cut(piece)} is neither a rank nor a rising range; expected "
                "such as 0,1,2,4 or 0-3,6 or 0-14/2"
            )
        spans.append(range(int(first), int(last) + 1, int(step)))
    if len(spans) == 1:
        return spans[0]
    for span in spans:
        _refuse_above(text, span[-1])
    if sum(map(len, spans)) > _MOST_LISTED:
        raise SpecError(
            f"ranks={_cut(text)}: several spans of more than {_MOST_LISTED} ranks; "
            "write one with a step, as 0-99999/2"
        )
    return [rank for span in spans for rank in span]


def _cut(ranks: object) -> str:
    text = repr(ranks)
    return text if len(text) <= 100 else f"{text[:90]}…"
