"""Balance: a division of packed documents among ranks, equal in tokens and in attended pairs.

Lay the documents on a circle of T tokens. The arc of t tokens that starts at x attends some number
of pairs, and the mean over all x is t / T of all pairs; moved by one token, an arc changes by no
more than the pairs of one position. So for all lengths and orders there is an arc with its exact
share of both tokens and pairs (Stromquist and Woodall, "Sets on which several measures agree",
1985, for more measures than two).

`balanced` takes such an arc for half of the ranks, closes the circle behind it, and repeats that on
both sides until each rank has one. That is 2 (parts - 1) cuts and 2 · parts - 1 ranges at most, for
any number of documents. One causal document becomes the zig-zag: the first arc is the middle, the
next lie around it. A cut document lies on neighbouring ranks, since halves are halved again.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from commgrid.context_parallel.ranges import Range, Ranges, pieces, union
from commgrid.errors import SpecError


@dataclass(frozen=True)
class Mask:
    """Mask within a document.

    Args:
        causal: itself and what comes before; else all of the document.
        window: of those at most so many, itself included; None: all.

    Raises:
        SpecError: a window without causal, or below 1.
    """

    causal: bool = True
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is None:
            return
        if not self.causal:
            raise SpecError(
                f"window={self.window} with causal=False: a window looks back, so it needs "
                "causal=True; leave one of them out"
            )
        if not hasattr(self.window, "__index__"):
            raise SpecError(f"window={self.window!r}: expected a whole number of keys")
        if self.window < 1:
            raise SpecError(f"window={self.window}: expected 1 key (its own) or more")

    def pairs(self, count: int, length: int) -> int:
        """The (query, key) pairs of the first `count` positions of a document of `length`.

        >>> Mask().pairs(4, 10), Mask(window=2).pairs(4, 10), Mask(causal=False).pairs(4, 10)
        (10, 7, 40)
        """
        if not self.causal:
            return count * length
        near = count if self.window is None else min(count, self.window)
        return near * (near + 1) // 2 + (count - near) * near

    def __str__(self) -> str:
        wide = "causal" if self.causal else "full"
        return wide if self.window is None else f"window {self.window}"


def balanced(
    lengths: Iterable[int], parts: int, *, causal: bool = True, window: int | None = None
) -> tuple[Ranges, ...]:
    """Divide the positions of packed documents among ranks.

    Documents lie one after the other in a packed sequence and attend only themselves. Any lengths
    and any number of parts do; nothing has to divide. With T tokens and W attended pairs in all,
    and M pairs at the busiest position,

        tokens of a rank   T / parts, within 1 of it
        pairs of a rank    W / parts, within 3 · M of it
        ranges in all      2 · parts - 1 at most

    So all but 2 (parts - 1) documents are whole on a rank, and the others lie on neighbouring
    ranks. With fewer tokens than parts the last ranks hold none. The answer depends on the
    arguments alone, so every rank finds the same. It takes O((documents + parts) · log(parts) ·
    log(documents)) steps, none for tokens.

    Args:
        lengths: tokens of each document, 1 or more, in the order in which they are packed.
        parts: how many ranks.
        causal, window: see `Mask`.

    Returns:
        For each rank its (start, stop) ranges, ascending.

    Raises:
        SpecError: no documents, a length or a number of parts below 1, or a mask that is none.

    Example:
        >>> balanced([16], 2)
        (((0, 4), (12, 16)), ((4, 12),))
        >>> balanced([8], 2, causal=False)
        (((0, 4),), ((4, 8),))
        >>> balanced([3, 5, 3, 5], 2)
        (((0, 8),), ((8, 16),))
        >>> balanced([1], 3)
        (((0, 1),), (), ())
    """
    mask, sizes, parts = Mask(causal, window), check_lengths(lengths), operator.index(parts)
    if parts < 1:
        raise SpecError(f"parts={parts}: expected 1 rank or more")
    ends = list(accumulate(sizes))
    documents = [
        _Piece(end - size, end, end - size, size) for size, end in zip(sizes, ends, strict=True)
    ]
    circle = _Circle(documents, [mask.pairs(size, size) for size in sizes], mask)
    found = [union(piece[:2] for piece in held) for held in _halve(circle, parts)]
    return tuple(sorted(found, key=lambda held: not held))  # ranks without any come last


def pairs_of(lengths: Iterable[int], ranges: Iterable[Range], mask: Mask) -> int:
    """How many (query, key) pairs the queries in some ranges of packed documents attend.

    >>> [pairs_of([16], held, Mask()) for held in balanced([16], 2)]
    [68, 68]
    """
    bounds, held = [0, *accumulate(check_lengths(lengths))], tuple(ranges)
    for start, stop in held:
        if not 0 <= start <= stop <= bounds[-1]:
            raise SpecError(
                f"range ({start}, {stop}) is not one of the {bounds[-1]} positions of the documents"
            )
    found = 0
    for document, own in pieces(held, bounds).items():
        begin = bounds[document]
        length = bounds[document + 1] - begin
        for start, stop, _ in own:
            found += mask.pairs(stop - begin, length) - mask.pairs(start - begin, length)
    return found


def check_lengths(lengths: Iterable[int]) -> list[int]:
    """Lengths of documents as a list of ints.

    Raises:
        SpecError: there are none, or one is below 1.
    """
    try:
        sizes = [operator.index(length) for length in lengths]
    except TypeError:
        raise SpecError(
            f"lengths={lengths!r}: expected the length of each document, an int"
        ) from None
    if not sizes:
        raise SpecError("lengths is empty: expected the length of 1 document or more")
    for i, size in enumerate(sizes):
        if size < 1:
            raise SpecError(f"lengths[{i}]={size}: expected 1 token or more; leave it out")
    return sizes


class _Piece(NamedTuple):
    """Consecutive positions of one document, in the packed sequence's numbers."""

    start: int
    stop: int
    begin: int
    """Where its document begins."""
    length: int
    """Of its document."""


class _Circle:
    """Pieces one after the other, the first again after the last; tokens count from the first's.

    Args:
        pieces: in order.
        work: the attended pairs of each.
        mask: says them for a part of one.
    """

    def __init__(self, pieces: list[_Piece], work: list[int], mask: Mask) -> None:
        self.pieces, self.work_of, self.mask = pieces, work, mask
        self.tokens = [0, *accumulate(stop - start for start, stop, _, _ in pieces)]
        self.pairs = [0, *accumulate(work)]
        self.total, self.work = self.tokens[-1], self.pairs[-1]

    def pairs_before(self, token: int) -> int:
        """The pairs of the first tokens; after the last come the first again."""
        laps, token = divmod(token, self.total)
        i = bisect_right(self.tokens, token) - 1
        inside = self._pairs(self.pieces[i], token - self.tokens[i])
        return laps * self.work + self.pairs[i] + inside

    def _pairs(self, piece: _Piece, count: int) -> int:
        """The pairs of a piece's first tokens."""
        start, _, begin, length = piece
        before = start - begin
        return self.mask.pairs(before + count, length) - self.mask.pairs(before, length)

    def arc(self, start: int, stop: int) -> _Circle:
        """The pieces from one token to another, at most a lap later, as a circle of their own."""
        pieces: list[_Piece] = []
        work: list[int] = []
        for first, last in _laps(start, stop, self.total):
            i = bisect_right(self.tokens, first) - 1
            j = bisect_left(self.tokens, last)
            own, done = self.pieces[i:j], self.work_of[i:j]
            ahead, behind = first - self.tokens[i], self.tokens[j] - last
            if ahead or behind:
                own[0] = own[0]._replace(start=own[0].start + ahead)
                own[-1] = own[-1]._replace(stop=own[-1].stop - behind)
                for k in (0, -1):
                    done[k] = self._pairs(own[k], own[k].stop - own[k].start)
            pieces += own
            work += done
        return _Circle(pieces, work, self.mask)


def _laps(start: int, stop: int, total: int) -> Iterator[Range]:
    """An arc as one or two stretches between 0 and `total`."""
    if start >= total:
        start, stop = start - total, stop - total
    if start < min(stop, total):
        yield start, min(stop, total)
    if stop > total:
        yield 0, stop - total


def _halve(circle: _Circle, parts: int) -> list[list[_Piece]]:
    """Divide a circle among so many ranks."""
    if parts == 1 or not circle.pieces:
        return [circle.pieces] + [[] for _ in range(parts - 1)]
    count = parts // 2
    start, stop = _find_arc(circle, parts, count)
    arc, rest = circle.arc(start, stop), circle.arc(stop, start + circle.total)
    sides = [(arc, count), (rest, parts - count)]
    sides.sort(key=lambda side: min(side[0].pieces)[0] if side[0].pieces else math.inf)
    return [held for side, own in sides for held in _halve(side, own)]


def _find_arc(circle: _Circle, parts: int, count: int) -> Range:
    """The arc with its share of tokens, for `count` ranks, and most nearly its share of pairs.

    Arcs that start at every `parts`-th of the circle cover it evenly, so unless all of them are
    just, one has too many pairs and one too few; between two such neighbours lies the one sought.
    """
    held = (2 * circle.total * count + parts) // (2 * parts)

    def excess(start: int) -> int:
        done = circle.pairs_before(start + held) - circle.pairs_before(start)
        return done * parts - circle.work * count

    starts = [circle.total * k // parts for k in range(parts + 1)]
    off = [excess(start) for start in starts]
    for (start, before), (end, after) in pairwise(zip(starts, off, strict=True)):
        if (before < 0) != (after < 0):
            sign = 1 if before < 0 else -1
            between = range(start, end)
            found = start + bisect_left(between, 0, key=lambda x: sign * excess(x))
            starts = [max(found - 1, start), found]  # `start` itself may be the one
            off = [excess(x) for x in starts]
            break
    _, start = min((abs(o), s) for o, s in zip(off, starts, strict=True))
    return start, start + held
