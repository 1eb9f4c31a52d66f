"""Parts: the tensors that a fused or stacked tensor is made of, and the boxes of both.

    qkv.weight, 2 groups of sizes 2, 1, 1     q_proj.weight   k_proj.weight   v_proj.weight
    rows 0, 1   q of group 0                  rows 0, 1
    row  2      k                                             row 0
    row  3      v                                                             row 0
    rows 4, 5   q of group 1                  rows 2, 3
    row  6      k                                             row 1
    row  7      v                                                             row 1

Boxes go both ways as views: numbers that are written to one are in the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

from torch import Tensor

from commgrid.layout.box import Shape
from commgrid.resharding.item import Chunk, Item


class Range(NamedTuple):
    """Entries of a part along the dim that is cut.

    Args:
        part: its number.
        start: of the first entry in the fused tensor.
        begin: of the first entry in the part.
        length: entries.
    """

    part: int
    start: int
    begin: int
    length: int


@dataclass(frozen=True)
class TensorParts:
    """The parts of a tensor.

    The parts of a tensor with indexes, such as stacked experts, are those of each of its entries.

    Args:
        shape: of the tensor.
        names: of the parts; with indexes, of each entry's, one entry after the other.
        ranges: of the parts, by their numbers in an entry; (): it is one part, under another name.
        dim: that is cut, counted without the indexes and after the transpose.
        indexes: how many of the first dims count entries, which have no such dims.
        transposed: whether the last two dims of the parts are exchanged.
        stacked: whether parts have no dim `dim`, of which each is one entry.
    """

    shape: Shape
    names: tuple[str, ...]
    ranges: tuple[Range, ...] = ()
    dim: int = 0
    indexes: int = 0
    transposed: bool = False
    stacked: bool = False

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Each part's name and full shape."""
        if not self.ranges:
            return dict.fromkeys(self.names, self.shape)
        lengths = [0] * self._count
        for one in self.ranges:
            lengths[one.part] += one.length
        shape = self._turned(self.shape[self.indexes :])
        return {
            name: _without(shape, self.dim) if self.stacked else
            _with(shape, self.dim, lengths[number % self._count])
            for number, name in enumerate(self.names)
        }  # fmt: skip

    def items(self, item: Item) -> list[Item]:
        """The parts of this rank's boxes of the tensor, which may have none."""
        if not self.ranges:
            return [replace(item, path=(*item.path[:-1], name)) for name in self.names]
        found: dict[str, list[Chunk]] = {name: [] for name in self.names}
        for chunk in item.chunks:
            for name, part in self._parts_of(chunk):
                found[name].append(part)
        return [
            replace(item, path=(*item.path[:-1], name), shape=self.shapes[name], chunks=chunks)
            for name, chunks in found.items()
        ]

    def whole(self, name: str, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Boxes of a part as boxes of the tensor.

        Args:
            name: the part's.
            chunks: of it.
        """
        if not self.ranges:
            return list(chunks)
        entry, part = divmod(self._places[name], self._count)
        return [box for chunk in chunks for box in self._wholes_of(entry, part, *chunk)]

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.names)}

    @cached_property
    def _count(self) -> int:
        """Parts of an entry."""
        return 1 + max(one.part for one in self.ranges)

    def _turned(self, numbers: Shape) -> Shape:
        return (*numbers[:-2], *reversed(numbers[-2:])) if self.transposed else numbers

    def _parts_of(self, chunk: Chunk) -> Iterator[tuple[str, Chunk]]:
        offset, data = chunk
        count = self.indexes
        for place in product(*map(range, data.shape[:count])):
            entry = 0
            for first, more, size in zip(offset, place, self.shape, strict=False):
                entry = entry * size + first + more
            yield from self._ranges_of(entry, offset[count:], data[place])

    def _ranges_of(self, entry: int, offset: Shape, data: Tensor) -> Iterator[tuple[str, Chunk]]:
        """The parts of a box of an entry."""
        if self.transposed:
            offset, data = self._turned(offset), data.transpose(-2, -1)
        start = offset[self.dim]
        end = start + data.shape[self.dim]
        for one in self.ranges:
            first, last = max(one.start, start), min(one.start + one.length, end)
            if first >= last:
                continue
            piece = data.narrow(self.dim, first - start, last - first)
            place = _with(offset, self.dim, one.begin + first - one.start)
            if self.stacked:
                piece, place = piece.select(self.dim, 0), _without(offset, self.dim)
            yield self.names[entry * self._count + one.part], Chunk(place, piece)

    def _wholes_of(self, entry: int, part: int, offset: Shape, data: Tensor) -> Iterator[Chunk]:
        """The boxes of the tensor that a box of a part is."""
        if self.stacked:
            offset, data = (*offset[: self.dim], 0, *offset[self.dim :]), data.unsqueeze(self.dim)
        start = offset[self.dim]
        end = start + data.shape[self.dim]
        for one in self.ranges:
            first, last = max(one.begin, start), min(one.begin + one.length, end)
            if one.part != part or first >= last:
                continue
            piece = data.narrow(self.dim, first - start, last - first)
            place = _with(offset, self.dim, one.start + first - one.begin)
            if self.transposed:
                piece, place = piece.transpose(-2, -1), self._turned(place)
            rest = entry
            for size in reversed(self.shape[: self.indexes]):
                rest, first_index = divmod(rest, size)
                piece, place = piece.unsqueeze(0), (first_index, *place)
            yield Chunk(place, piece)


def _with(numbers: Shape, dim: int, number: int) -> Shape:
    return (*numbers[:dim], number, *numbers[dim + 1 :])


def _without(numbers: Shape, dim: int) -> Shape:
    return (*numbers[:dim], *numbers[dim + 1 :])
