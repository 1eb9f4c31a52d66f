"""Tiles: the rectangles of the attention matrix that kernels compute, and the keys they need.

Queries and keys lie in buffers of ranges of positions. Two different ranges are ordered, so that
under a causal mask a rectangle of them is whole or empty; only a range beside itself is cut by the
diagonal, and a window cuts its edge. Torch's kernels on the CPU compute whole and causal
rectangles without a mask, so that rectangles are cut until few rows need one.

    rank 1 of zigzag over 3      keys of rank 0      of itself       of rank 2
              0   1 2 3 4  5     0       5           1       4       2       3
    queries 1                    whole   .           causal  .       .       .
            4                    whole   .           whole   causal  whole   whole

Whole ones above each other become one rectangle. A rank's own queries against its own keys of one
document are one causal rectangle, even with gaps between their ranges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from commgrid.context_parallel.balance import Mask
from commgrid.context_parallel.ranges import DocumentPiece, Ranges, meet, pieces, union

_FEW_ROWS = 128
_BLOCK_ROWS = 256


class Tile(NamedTuple):
    """A rectangle of queries and keys, both by row of their buffers.

    Query i and key j of it attend each other if `offset` is None, or 0 ≤ offset + i - j < window.

    Args:
        q_start, q_stop, k_start, k_stop: its rows.
        offset: how far its first query lies behind its first key; None: no mask.
        window: None: any distance.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    offset: int | None = None
    window: int | None = None

    @property
    def rows(self) -> slice:
        """Its queries."""
        return slice(self.q_start, self.q_stop)

    @property
    def columns(self) -> slice:
        """Its keys."""
        return slice(self.k_start, self.k_stop)

    @property
    def size(self) -> tuple[int, int]:
        """How many queries and how many keys."""
        return self.q_stop - self.q_start, self.k_stop - self.k_start

    @property
    def is_causal(self) -> bool:
        """Whether it is cut by its diagonal alone."""
        return self.offset == 0 and self.window is None


_Of = tuple[Ranges, Ranges, tuple[int, ...], Mask]


class Tiles(tuple[Tile, ...]):
    """Tiles cut for a kernel without windows; `uncut` gives them for one with windows."""

    calls: Any = None
    """Cache of `varlen_calls`, since a step of training calls it again."""
    _of: _Of

    def __new__(cls, found: Iterable[Tile], of: _Of) -> Tiles:
        made = super().__new__(cls, found)
        made._of = of
        return made

    @property
    def of_one_document(self) -> bool:
        """Whether the sequence is one."""
        return len(self._of[2]) == 2

    def uncut(self) -> tuple[Tile, ...]:
        """The same pairs, of a window in as few rectangles as there are pieces."""
        return self if self._of[3].window is None else tuple(_all(*self._of, cut=False))


def tiles(queries: Ranges, keys: Ranges, documents: tuple[int, ...], mask: Mask) -> Tiles:
    """The rectangles in which queries attend keys, each pair in just one of them.

    Args:
        queries, keys: what the buffers hold.
        documents: boundaries.
        mask: who attends whom within a document.

    Example:
        >>> tiles(((4, 8), (16, 20)), ((0, 4), (20, 24)), (0, 24), Mask())
        (Tile(q_start=0, q_stop=8, k_start=0, k_stop=4, offset=None, window=None),)
    """
    of = queries, keys, documents, mask
    return Tiles(_all(*of), of)


def _all(
    queries: Ranges, keys: Ranges, documents: tuple[int, ...], mask: Mask, cut: bool = True
) -> Iterator[Tile]:
    """Args: as `tiles`'; `cut`: whether a window's rectangles are cut at its edges."""
    theirs = pieces(keys, documents)
    for document, own in pieces(queries, documents).items():
        if document in theirs:
            length = documents[document + 1] - documents[document]
            yield from _document(own, theirs[document], mask, length, cut)


def needed(queries: Ranges, keys: Ranges, documents: tuple[int, ...], mask: Mask) -> Ranges:
    """Those of some keys that any of the queries attends.

    Example:
        >>> needed(((4, 8),), ((0, 4), (20, 24)), (0, 24), Mask())
        ((0, 4),)
        >>> needed(((4, 8),), ((0, 4), (20, 24)), (0, 24), Mask(window=3))
        ((2, 4),)
    """
    attended = []
    for document, own in pieces(queries, documents).items():
        start, stop = documents[document], documents[document + 1]
        if not mask.causal:
            attended.append((start, stop))
        elif mask.window is None:
            attended.append((start, own[-1].stop))
        else:
            attended += [(max(start, p.start - mask.window + 1), p.stop) for p in own]
    return meet(keys, union(attended))


def _document(
    own: list[DocumentPiece], keys: list[DocumentPiece], mask: Mask, length: int, cut: bool
) -> list[Tile]:
    """The rectangles of one document."""
    rows, columns = (own[0].row, own[-1].last_row), (keys[0].row, keys[-1].last_row)
    if not mask.causal:
        return [Tile(*rows, *columns)]
    if mask.window is not None and mask.window < length:
        return _stacked(list(_windowed(own, keys, mask.window, cut)))
    if [p[:2] for p in own] == [p[:2] for p in keys]:
        return [Tile(*rows, *columns, offset=0)]
    return _stacked(list(_causal(own, keys)))


def _causal(own: list[DocumentPiece], keys: list[DocumentPiece]) -> Iterator[Tile]:
    for query in own:
        before = [k for k in keys if k.start < query.start]
        if before:
            last = before[-1]
            until = last.row + min(last.stop, query.start) - last.start
            yield Tile(query.row, query.last_row, keys[0].row, until)
        for key in keys:
            yield from _corner(query, max(key.start, query.start), min(key.stop, query.stop), key)


def _corner(query: DocumentPiece, start: int, stop: int, key: DocumentPiece) -> Iterator[Tile]:
    """Keys from `start` to `stop`, which are positions of the query piece too."""
    if start >= stop:
        return
    row, column = query.row + start - query.start, key.row + start - key.start
    size = stop - start
    yield Tile(row, row + size, column, column + size, offset=0)
    if stop < query.stop:
        yield Tile(row + size, query.last_row, column, column + size)


def _windowed(
    own: list[DocumentPiece], keys: list[DocumentPiece], window: int, cut: bool
) -> Iterator[Tile]:
    """Block by block of queries, and of its keys the far edge, the middle and the near edge.

    Of a window of few keys all three are one rectangle with a mask: calls would cost more.
    """
    block = _FEW_ROWS if window < _FEW_ROWS else min(window, _BLOCK_ROWS)
    for query in own:
        for start in range(query.start, query.stop, block if cut else query.stop - query.start):
            stop = min(start + block, query.stop) if cut else query.stop
            first = start - window + 1
            far = stop - window
            cuts = [first, far, start, stop] if cut and window >= _FEW_ROWS else [first, stop]
            for left, right in pairwise(cuts):
                for key in keys:
                    yield from _band(query, start, stop, key, left, right, window)


def _band(
    query: DocumentPiece,
    start: int,
    stop: int,
    key: DocumentPiece,
    left: int,
    right: int,
    window: int,
) -> Iterator[Tile]:
    """Queries from `start` to `stop` beside the keys from `left` to `right` that a piece has."""
    left, right = max(left, key.start), min(right, key.stop)
    start, stop = max(start, left), min(stop, right - 1 + window)  # queries that attend any key
    if left >= right or start >= stop:
        return
    row, column = query.row + start - query.start, key.row + left - key.start
    rows = (row, row + stop - start, column, column + right - left)
    bounded = stop - 1 - left >= window
    if right - 1 <= start and not bounded:
        yield Tile(*rows)
    else:
        yield Tile(*rows, offset=start - left, window=window if bounded else None)


def _stacked(found: list[Tile]) -> list[Tile]:
    """The same, whole rectangles that touch made one."""
    merged: list[Tile] = []
    for tile in found:
        if merged and tile.offset is None and merged[-1].offset is None:
            last = merged[-1]
            if last[2:4] == tile[2:4] and last.q_stop == tile.q_start:
                merged[-1] = last._replace(q_stop=tile.q_stop)
                continue
            if last[:2] == tile[:2] and last.k_stop == tile.k_start:
                merged[-1] = last._replace(k_stop=tile.k_stop)
                continue
        merged.append(tile)
    return merged
