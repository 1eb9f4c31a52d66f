"""Slices of random weights that nobody makes in full."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from commgrid.tensor_parallel.counter_rng import Law, Normal, PairMaker, mixed

CHUNK = {"cpu": 2**17, "cuda": 2**22}
"""Elements drawn at once: what stays in a core's cache, and what keeps a GPU busy."""


def fill(
    target: Tensor,
    full_shape: Sequence[int],
    starts: Sequence[int],
    law: Law,
    seed: int,
    chunk: int | None = None,
) -> None:
    """Fills a tensor with its part of a full one, which is never made.

    Args:
        target: floating-point, of any strides; the work is done on its device.
        full_shape: of the full tensor, as many dims as the target's.
        starts: where in the full tensor the target begins, by dim.
        law: how the numbers are distributed.
        seed: of the full tensor; the lowest 64 bits count.
        chunk: how many elements are drawn at once; None: what suits the device.

    Example:
        >>> full, right = torch.empty(2, 6), torch.empty(2, 3)
        >>> fill(full, (2, 6), (0, 0), Normal(0, 1), seed=1)
        >>> fill(right, (2, 6), (0, 3), Normal(0, 1), seed=1)
        >>> torch.equal(right, full[:, 3:])
        True
    """
    if target.numel() == 0:
        return
    strides = [math.prod(full_shape[dim + 1 :]) for dim in range(len(full_shape))]
    drawing = Drawing(target, law, seed, chunk)
    for piece in pieces(target.shape, drawing.chunk):
        first = sum(
            (start + own.start) * stride
            for start, own, stride in zip(starts, piece, strides, strict=True)
        )
        part = target[piece]
        part.copy_(drawing.draw(first, *runs(part.shape, strides)).view(part.shape))


def pieces(shape: Sequence[int], most: int) -> Iterator[tuple[slice, ...]]:
    """Boxes of up to `most` elements that make up the shape, in order.

    Example:
        >>> [[(own.start, own.stop) for own in box] for box in pieces((3, 4), 8)]
        [[(0, 2), (0, 4)], [(2, 3), (0, 4)]]
    """
    if not shape:
        yield ()
        return
    inner = math.prod(shape[1:])
    step = max(1, most // inner)
    for start in range(0, shape[0], step):
        own = slice(start, min(start + step, shape[0]))
        for rest in pieces(shape[1:], most):
            yield own, *rest


def runs(shape: Sequence[int], strides: Sequence[int]) -> tuple[list[tuple[int, int]], int]:
    """A box as rows of elements that follow each other in the full tensor.

    Args:
        shape: of the box.
        strides: of the full tensor, which is contiguous.

    Returns:
        How many rows and how far apart, by dim, and a row's length.

    Example:
        >>> runs((2, 3, 4), (24, 4, 1))
        ([(2, 24)], 12)
        >>> runs((2, 3, 2), (12, 4, 1))
        ([(6, 4)], 2)
    """
    dims: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    run = dims.pop()[0] if dims and dims[-1][1] == 1 else 1
    return dims, run


class Drawing:
    """Draws one tensor's numbers piece by piece.

    Args:
        target: its dtype decides the precision, its device where the work is done.
        law: how the numbers are distributed.
        seed: of the full tensor.
        chunk: as `fill`'s.
    """

    def __init__(self, target: Tensor, law: Law, seed: int, chunk: int | None) -> None:
        # Other kinds of devices may lack 64-bit integers, or round in a way of their own.
        self.device = target.device if target.device.type in CHUNK else torch.device("cpu")
        self.law, self.seed = law, seed
        self.chunk = min(chunk or CHUNK[self.device.type], target.numel())
        # Rows of two elements may each lie in two pairs, and one row begin and end within pairs.
        self.maker = PairMaker(self.chunk + 1, target.dtype == torch.float64, self.device)

    def draw(self, first: int, rows: Sequence[tuple[int, int]], run: int) -> Tensor:
        """The numbers of rows of consecutive elements, row after row.

        Args:
            first: the place of the first one in the full tensor.
            rows: how many and how far apart, by dim.
            run: a row's length.
        """
        starts = torch.zeros(1, dtype=torch.int64, device=self.device)
        for count, stride in rows:
            starts = starts.unsqueeze(-1) + self._count(count) * stride
        starts = starts.view(-1, 1)
        if any(stride % 2 for _, stride in rows):  # pairs begin elsewhere in every row
            return self.at((starts + self._count(run) + first).view(-1))
        starts += first
        skip = first % 2
        count = (skip + run + 1) // 2
        made = self.maker.make(starts >> 1, count, self.law, self.seed)
        own = made.view(-1, 2 * count)[:, skip : skip + run].reshape(-1)
        return self._within(own, (starts + self._count(run)).view(-1)) if self._is_cut else own

    def at(self, places: Tensor) -> Tensor:
        """The numbers at any places, which costs twice as much."""
        found = self._attempt(places, 0)
        return self._within(found, places) if self._is_cut else found

    def _attempt(self, places: Tensor, number: int) -> Tensor:
        """What an element gets at the first attempt, 0, or a later one."""
        seed = mixed(mixed(self.seed) + number) if number else self.seed
        made = self.maker.make((places >> 1).view(-1, 1), 1, self.law, seed).view(-1, 2)
        return torch.where(places % 2 == 0, made[:, 0], made[:, 1])

    def _within(self, values: Tensor, places: Tensor) -> Tensor:
        """Draws those that are cut off again, each until it is not."""
        assert isinstance(self.law, Normal)
        values = values.clone()  # the maker's memory is about to hold others
        number, found, own = 0, values, self._count(len(values))
        while True:
            outside = (found < self.law.low) | (found > self.law.high)
            own, places = own[outside], places[outside]
            if len(own) == 0:
                return values
            number += 1
            found = self._attempt(places, number)
            values[own] = found

    @property
    def _is_cut(self) -> bool:
        return isinstance(self.law, Normal) and self.law.is_cut

    def _count(self, stop: int) -> Tensor:
        return torch.arange(stop, dtype=torch.int64, device=self.device)
