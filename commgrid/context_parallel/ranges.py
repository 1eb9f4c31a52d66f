"""Ranges of positions: cut at documents, joined, met, and put in order.

Ranges are (start, stop) pairs, disjoint and ascending. A buffer that holds some of them holds their
rows one after the other; a *run* is a (start, stop) of such rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Range = tuple[int, int]
"""Start and stop of consecutive positions of the packed sequence."""

Ranges = tuple[Range, ...]
"""Ranges of one rank: disjoint, ascending, none adjacent."""


class DocumentPiece(NamedTuple):
    """Consecutive positions of one document in a buffer."""

    start: int
    stop: int
    row: int
    """Of `start` in the buffer."""

    @property
    def last_row(self) -> int:
        """The row after that of its last position."""
        return self.row + self.stop - self.start


def count(ranges: Iterable[Range]) -> int:
    """How many positions.

    >>> count(((0, 4), (12, 16)))
    8
    """
    return sum(stop - start for start, stop in ranges)


def union(ranges: Iterable[Range]) -> Ranges:
    """The union of ranges, in as few as possible.

    >>> union([(12, 16), (0, 4), (4, 6), (5, 8), (9, 9)])
    ((0, 8), (12, 16))
    """
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return tuple(found)


def meet(ranges: Ranges, others: Ranges) -> Ranges:
    """The intersection.

    >>> meet(((0, 8), (12, 16)), ((2, 3), (6, 14)))
    ((2, 3), (6, 8), (12, 14))
    """
    found, i, j = [], 0, 0
    while i < len(ranges) and j < len(others):
        start, stop = max(ranges[i][0], others[j][0]), min(ranges[i][1], others[j][1])
        if start < stop:
            found.append((start, stop))
        if ranges[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def pieces(ranges: Ranges, documents: Sequence[int]) -> dict[int, list[DocumentPiece]]:
    """The pieces of each document in a buffer, by the document's number.

    >>> pieces(((0, 4), (6, 8)), (0, 3, 8))[1]
    [DocumentPiece(start=3, stop=4, row=3), DocumentPiece(start=6, stop=8, row=4)]
    """
    found: dict[int, list[DocumentPiece]] = {}
    row = 0
    for start, stop in ranges:
        document = bisect_right(documents, start) - 1
        while start < stop:
            end = min(stop, documents[document + 1])
            found.setdefault(document, []).append(DocumentPiece(start, end, row))
            row += end - start
            start, document = end, document + 1
    return found


def runs_of(part: Ranges, whole: Ranges) -> Ranges:
    """The rows that some ranges are in a buffer that holds them and others.

    >>> runs_of(((2, 4), (12, 13)), ((0, 4), (12, 16)))
    ((2, 5),)
    """
    found, row, i = [], 0, 0
    for start, stop in whole:
        while i < len(part) and part[i][0] < stop:
            found.append((row + part[i][0] - start, row + part[i][1] - start))
            i += 1
        row += stop - start
    return union(found)


def sorting_runs(held: Sequence[Ranges]) -> Ranges:
    """The rows of concatenated buffers, in the order of their positions.

    >>> runs = sorting_runs([((0, 4), (12, 16)), ((4, 12),)])
    >>> runs, sorting_runs([runs])  # which undoes the order
    (((0, 4), (8, 16), (4, 8)), ((0, 4), (12, 16), (4, 12)))
    """
    rows, row = [], 0
    for ranges in held:
        for start, stop in ranges:
            rows.append((start, row, row + stop - start))
            row += stop - start
    return joined((first, last) for _, first, last in sorted(rows))


def joined(runs: Iterable[Range]) -> Ranges:
    """Runs in their order; each that continues the one before is joined to it."""
    found: list[Range] = []
    for start, stop in runs:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)
