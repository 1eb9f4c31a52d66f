"""Boxes of full tensors: what two have in common, what one lacks, and those of a range of elements.

A box is an offset and a size in each dim. Checkpoints say with them what a rank holds of a tensor,
transfers what goes from where to where.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]
"""Offset and size."""


def volume(box: Box) -> int:
    """How many elements it has."""
    return math.prod(box[1])


def common(one: Box, other: Box) -> Box | None:
    """The overlap of two boxes; None: they have none.

    >>> common(((0, 2), (4, 4)), ((2, 0), (4, 4)))
    ((2, 2), (2, 2))
    """
    offset, size = [], []
    for begin, extent, start, length in zip(*one, *other, strict=True):
        first = max(begin, start)
        last = min(begin + extent, start + length)
        if last <= first:
            return None
        offset.append(first)
        size.append(last - first)
    return tuple(offset), tuple(size)


def slices(box: Box, at: Sequence[int]) -> tuple[slice, ...]:
    """The indices of a box in a tensor that begins at an offset of the full one.

    >>> slices(((2, 0), (2, 4)), at=(1, 0))
    (slice(1, 3, None), slice(0, 4, None))
    """
    places = zip(*box, at, strict=True)
    return tuple(slice(begin - own, begin - own + size) for begin, size, own in places)


def without(whole: Box, part: Box) -> Iterator[Box]:
    """The rest of a box without a part of it, as boxes.

    >>> list(without(((0, 0), (4, 4)), ((1, 0), (2, 4))))
    [((0, 0), (1, 4)), ((3, 0), (1, 4))]
    """
    offset, size = map(list, whole)
    for dim, (start, length) in enumerate(zip(*part, strict=True)):
        begin, end = offset[dim], offset[dim] + size[dim]
        for first, last in ((begin, start), (start + length, end)):
            if first < last:
                yield (
                    (*offset[:dim], first, *offset[dim + 1 :]),
                    (*size[:dim], last - first, *size[dim + 1 :]),
                )
        offset[dim], size[dim] = start, length


def part_of_range(box: Box, start: int, stop: int) -> Iterator[Box]:
    """The boxes of a box's elements start … stop - 1, counted row by row within it."""
    offset, size = box
    if start <= 0 and stop >= volume(box):
        yield box
        return
    for inner, extent in boxes_of_range(start, stop, size):
        yield tuple(own + more for own, more in zip(offset, inner, strict=True)), extent


def boxes_of_range(start: int, stop: int, shape: Sequence[int]) -> Iterator[Box]:
    """The boxes that hold elements start … stop - 1 of a row-major tensor, in their order.

    >>> list(boxes_of_range(1, 11, (4, 3)))
    [((0, 1), (1, 2)), ((1, 0), (2, 3)), ((3, 0), (1, 2))]
    """
    rest = tuple(shape[1:])
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(rest)
    first, last = start // row, stop // row

    def within(index: int, begin: int, end: int) -> Iterator[Box]:
        for offset, size in boxes_of_range(begin, end, rest):
            yield (index, *offset), (1, *size)

    if first == last:
        yield from within(first, start - first * row, stop - first * row)
        return
    if start % row:
        yield from within(first, start % row, row)
        first += 1
    if first < last:
        yield (first, *[0] * len(rest)), (last - first, *rest)
    yield from within(last, 0, stop % row)
