"""Full tensors, assembled from the ranks' parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import Tensor

from commgrid.audit.records import About, Chunks, slices_of

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Joined:
    """A full tensor, and what of it is known.

    Args:
        full: in fp64; zeros where no rank has anything.
        has: where ranks have something.
        apart: pairs of ranks that have different copies, with their relative difference.
        chunks: what each rank has.
    """

    full: Tensor
    has: Tensor
    apart: dict[tuple[int, int], float] = field(default_factory=dict)
    chunks: Mapping[int, Chunks] = field(default_factory=dict)


def join(
    held: Mapping[int, Chunks], shape: Sequence[int], tolerance: float, floor: float = 0.0
) -> Joined:
    """Assemble a tensor; of a part that several ranks have, the first one's is taken.

    Args:
        held: by rank.
        shape: of the full tensor, thinned.
        tolerance: what copies may differ by, relative to their norm.
        floor: a norm an element; smaller ones are compared with it.
    """
    full = torch.zeros(tuple(shape), dtype=torch.float64)
    owner = torch.full(tuple(shape), -1, dtype=torch.int64)
    apart: dict[tuple[int, int], float] = {}
    for rank, chunks in held.items():
        for offset, part in chunks:
            place = slices_of(offset, part)
            values, theirs = part.double(), owner[place]
            for other in torch.unique(theirs).tolist():
                if other < 0:
                    continue
                both = theirs == other
                difference = relative(values[both], full[place][both], floor)
                if difference > tolerance:
                    apart[other, rank] = max(apart.get((other, rank), 0.0), difference)
            new = theirs < 0
            full[place] = torch.where(new, values, full[place])
            owner[place] = torch.where(new, torch.full_like(theirs, rank), theirs)
    return Joined(full, owner >= 0, apart, held)


def relative(value: Tensor, reference: Tensor, floor: float = 0.0) -> float:
    """How far a value is from a reference, relative to the larger of norm and floor.

    Returns:
        0.0 where both are the same; infinity where one is not finite.
    """
    difference = float((value - reference).norm())
    scale = max(float(reference.norm()), floor * math.sqrt(max(reference.numel(), 1)))
    if difference == 0.0:
        return 0.0
    if not difference < float("inf") or scale == 0.0:
        return float("inf")
    return difference / scale


def ratio(value: Tensor, reference: Tensor, tolerance: float) -> float | None:
    """The number that a value is of a reference; None: it is none, or either is zero."""
    squares = float((reference * reference).sum())
    if squares == 0.0:
        return None
    factor = float((value * reference).sum()) / squares
    if factor == 0.0 or relative(value / factor, reference) > tolerance:
        return None
    return factor


class GridRanks:
    """Where the ranks of one grid are along its axes.

    Args:
        about: what all of them say.
    """

    def __init__(self, about: Iterable[About]) -> None:
        found = {each.rank: each for each in about if each.coordinates}
        self.where = {rank: each.coordinates for rank, each in found.items()}
        first = next(iter(found.values()), None)
        self.shapes = first.shapes if first is not None else {}

    def axes(self, region: str = "dense") -> Axes:
        """Those of more than one rank."""
        return tuple(axis for axis, size in self.shape(region).items() if size > 1)

    def shape(self, region: str = "dense") -> dict[str, int]:
        """A region's sizes; the dense one's where there is no such region."""
        return self.shapes.get(region, self.shapes.get("dense", {}))

    def size(self, axes: Axes, region: str = "dense") -> int:
        """Ranks along several axes."""
        return int(torch.Size([self.shape(region)[axis] for axis in axes]).numel())

    def coordinate(self, rank: int, region: str = "dense") -> dict[str, int]:
        """A rank's; the dense one's where there is no such region."""
        return self.where[rank].get(region, self.where[rank].get("dense", {}))

    def along(self, rank: int, axes: Axes, region: str = "dense") -> list[int]:
        """The ranks that differ from one only along some axes."""
        mine = self.coordinate(rank, region)
        return [
            other for other in self.where
            if all(n == mine[a] for a, n in self.coordinate(other, region).items() if a not in axes)
        ]  # fmt: skip

    def subsets(self, region: str = "dense") -> list[Axes]:
        """Every set of axes of more than one rank, the smallest first."""
        axes = self.axes(region)
        return [each for count in range(len(axes) + 1) for each in combinations(axes, count)]

    def axes_between(self, pairs: Iterable[tuple[int, int]], region: str = "dense") -> Axes:
        """The axes along which pairs of ranks differ, from pairs that differ along fewest."""
        found: list[Axes] = []
        for one, other in pairs:
            mine, theirs = self.coordinate(one, region), self.coordinate(other, region)
            found.append(tuple(axis for axis in mine if mine[axis] != theirs.get(axis)))
        fewest = min((len(each) for each in found), default=0)
        least = {axis for each in found if len(each) == fewest for axis in each}
        return tuple(axis for axis in self.shape(region) if axis in least)


def summed(
    held: Mapping[int, Chunks], ranks: GridRanks, axes: Axes, region: str = "dense"
) -> dict[int, Chunks]:
    """Each rank's chunks added up with those of the ranks along some axes, as a collective would.

    Ranks whose chunks are of other shapes, or that have none, add nothing.
    """
    found: dict[int, Chunks] = {}
    for rank, chunks in held.items():
        shapes = [part.shape for _, part in chunks]
        others = [
            held[other] for other in ranks.along(rank, axes, region)
            if other in held and [part.shape for _, part in held[other]] == shapes
        ]  # fmt: skip
        found[rank] = [
            (offset, torch.stack([other[i][1].double() for other in others]).sum(0))
            for i, (offset, _) in enumerate(chunks)
        ]
    return found
