"""From layouts to pools: what the same ranks hold and the same ranks need.

    kind   tensors that lie alike on the same ranks          planned once
    pool   boxes of any kinds, same holders, same receivers  one stream of bytes
    run    the part of a pool that is of one kind            its boxes of one tensor after the other

A target box is cut where source boxes begin and end. A run has thousands of tensors' boxes in a few
words, and finds those of any range of its bytes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from commgrid.errors import TransferError
from commgrid.layout.box import Box, common, part_of_range, volume, without
from commgrid.layout.rank_text import describe_ranks
from commgrid.resharding.layouts import GridLayouts

Ranks = tuple[int, ...]

LARGE = 1 << 18  # bytes: to pack so many on one rank and unpack them on another costs a message


@dataclass(frozen=True)
class MovedTensor:
    """A full tensor that is moved.

    Args:
        name: on the target.
        source: on the source.
        dtype: that it travels in, the narrower of both sides'.
        itemsize: bytes of an element on its way.
    """

    name: str
    source: str
    dtype: str
    itemsize: int


@dataclass(eq=False)
class Run:
    """Some boxes of each of some tensors, one tensor after the other.

    Args:
        kind: the number of the tensors' kind.
        tensors: all of one itemsize.
        is_large: whether its boxes are worth a message each.
        boxes: of every tensor.

    Example:
        >>> up = [MovedTensor(name, name, "float32", 4) for name in ("0.up", "1.up")]
        >>> run = Run(0, up, False, [((0, 0), (2, 2)), ((6, 0), (1, 2))])
        >>> run.size, run.floor(30)
        (48, 24)
        >>> [(tensor.name, box) for tensor, box in run.within(16, 32)]
        [('0.up', ((6, 0), (1, 2))), ('1.up', ((0, 0), (1, 2)))]
    """

    kind: int
    tensors: Sequence[MovedTensor]
    is_large: bool
    boxes: list[Box] = field(default_factory=list)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.tensors[0].itemsize

    @cached_property
    def _starts(self) -> list[int]:
        """Where each box of a tensor begins, and where the next tensor does."""
        sizes = (volume(box) * self.itemsize for box in self.boxes)
        return [0, *accumulate(sizes)]

    @property
    def size(self) -> int:
        """Its bytes."""
        return self._starts[-1] * len(self.tensors)

    def floor(self, position: int) -> int:
        """Where the box begins that a byte is of."""
        number, inside = divmod(position, self._starts[-1])
        box = bisect_right(self._starts, inside) - 1
        return number * self._starts[-1] + self._starts[box]

    def within(self, start: int, stop: int) -> Iterator[tuple[MovedTensor, Box]]:
        """The boxes of a range of its bytes."""
        stride, itemsize = self._starts[-1], self.itemsize
        for number in range(start // stride, -(-stop // stride)):
            first, last = start - number * stride, stop - number * stride
            for box, begin, end in zip(self.boxes, self._starts, self._starts[1:], strict=False):
                if end > first and begin < last:
                    low, high = max(first - begin, 0), min(last, end) - begin
                    for part in part_of_range(box, low // itemsize, high // itemsize):
                        yield self.tensors[number], part

    def pieces(self, start: int, stop: int, most: int) -> Iterator[tuple[int, int]]:
        """A range of its bytes, in ranges of one box and of so many bytes, between rows if need be.

        Args:
            most: bytes; a single element may be larger.
        """
        stride = self._starts[-1]
        while start < stop:
            begin = self.floor(start)
            number = bisect_right(self._starts, start % stride) - 1
            size = self.boxes[number][1]
            end = min(stop, begin + self._starts[number + 1] - self._starts[number])
            row = (self._starts[number + 1] - self._starts[number]) // (size[0] if size else 1)
            while start < end:
                whole = max(most // self.itemsize, 1) * self.itemsize
                if row <= most:
                    inside = (start - begin) % row
                    whole = min(most, end - start) // row * row or end - start
                    whole = row - inside if inside else whole
                following = min(start + whole, end)
                yield start, following
                start = following


@dataclass
class Pool:
    """Boxes that the same ranks hold and the same ranks need.

    Args:
        holders: ranks of the source that have all of them.
        needing: ranks of the target that have a place for all of them.

    Attributes:
        runs: its boxes, those of the longest elements first.
        cuts: receiver to sender, first byte and the one after the last.
    """

    holders: Ranks
    needing: Ranks
    runs: list[Run] = field(default_factory=list)
    cuts: dict[int, Sequence[tuple[int, int, int]]] = field(default_factory=dict)

    @cached_property
    def size(self) -> int:
        """The bytes of its boxes."""
        return sum(run.size for run in self.runs)

    @cached_property
    def copying(self) -> Ranks:
        """Those that have them already."""
        held = set(self.holders)
        return tuple(rank for rank in self.needing if rank in held)

    @cached_property
    def receivers(self) -> Ranks:
        """Those that lack them."""
        held = set(self.holders)
        if held.isdisjoint(self.needing):  # as always between separate ranks: one tuple for all
            return self.needing
        return tuple(rank for rank in self.needing if rank not in held)

    def within(self, start: int, stop: int) -> Iterator[tuple[Run, int, int]]:
        """The parts of its runs that a range of its bytes is."""
        position = 0
        for run in self.runs:
            first, last = max(start - position, 0), min(stop - position, run.size)
            if first < last:
                yield run, first, last
            position += run.size


Kind = tuple[tuple[int, int], ...]
"""The lists of names that have a tensor, and the number of its form in each."""


def kinds_of(
    tensors: Sequence[MovedTensor], source: GridLayouts, target: GridLayouts
) -> list[list[MovedTensor]]:
    """Tensors that lie alike on both sides, together."""
    found: dict[tuple[Kind, Kind], list[MovedTensor]] = {}
    for tensor in tensors:
        kinds = source.kinds[tensor.source], target.kinds[tensor.name]
        found.setdefault(kinds, []).append(tensor)
    return list(found.values())


def pools_of(
    kinds: Sequence[Sequence[MovedTensor]], source: GridLayouts, target: GridLayouts
) -> list[Pool]:
    """All boxes of all kinds, in one order on all ranks.

    Raises:
        TransferError: the source has not all of a target's box.
    """
    pools: dict[tuple[Ranks, Ranks], Pool] = {}
    runs: dict[tuple[Ranks, Ranks, int, bool], Run] = {}
    for kind, tensors in enumerate(kinds):
        first = tensors[0]
        for box, holders, needing in _pieces(first, source, target):
            is_large = volume(box) * first.itemsize >= LARGE
            key = holders, needing, kind, is_large
            if key not in runs:
                pool = pools.setdefault((holders, needing), Pool(holders, needing))
                runs[key] = Run(kind, tensors, is_large)
                pool.runs.append(runs[key])
            runs[key].boxes.append(box)
    for pool in pools.values():
        pool.runs.sort(key=lambda run: -run.itemsize)
    return [pools[key] for key in sorted(pools)]


def _pieces(
    tensor: MovedTensor, source: GridLayouts, target: GridLayouts
) -> Iterator[tuple[Box, Ranks, Ranks]]:
    """The target's boxes of one tensor, cut where what ranks hold of it begins and ends.

    Yields:
        A box, who holds all of it, and who needs it.

    Raises:
        TransferError: the source has not all of a target's box.
    """
    held = _Holders(source.places_of(tensor.source))
    for wanted, places in target.places_of(tensor.name):
        needing = target.ranks_with(places)
        for box, holding in held.cut(wanted):
            if not holding:
                raise TransferError(
                    f"no rank of the source holds {_where(box)} of {tensor.source}, which "
                    f"{describe_ranks(needing)} of the target need; give every rank of the source "
                    "grid its part of the model"
                )
            yield box, source.ranks_with(holding), needing


class _Holders:
    """Boxes of one tensor in order, each with the layouts that have it."""

    def __init__(self, held: list[tuple[Box, frozenset[int]]]) -> None:
        self._held = held
        self._firsts = [box[0][:1] for box, _ in held]
        self._longest = max((box[1][0] for box, _ in held if box[1]), default=0)

    def cut(self, wanted: Box) -> Iterator[tuple[Box, frozenset[int]]]:
        """The parts of a box, each with the layouts of which one box or another has all of it."""
        parts: list[tuple[Box, frozenset[int]]] = [(wanted, frozenset())]
        low, high = 0, len(self._held)
        if wanted[0]:  # others end before it in the first dim, or begin behind it
            low = bisect_left(self._firsts, (wanted[0][0] - self._longest + 1,))
            high = bisect_left(self._firsts, (wanted[0][0] + wanted[1][0],))
        for box, places in self._held[low:high]:
            if common(wanted, box) is None:
                continue
            before, parts = parts, []
            for part, holding in before:
                if box[0] and part[0][0] + part[1][0] <= box[0][0]:
                    yield part, holding  # the boxes that follow begin behind it, too
                    continue
                both = common(part, box)
                if both is None:
                    parts.append((part, holding))
                    continue
                parts.append((both, holding | places))
                parts.extend((rest, holding) for rest in without(part, both))
        yield from parts


def _where(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{start + n}" for start, n in zip(*box, strict=True)) + "]"
