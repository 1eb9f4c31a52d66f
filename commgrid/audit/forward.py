"""Where two grids' forwards part: of inputs, modules' outputs and dropout.

Outputs are not compared element by element, since nothing says how ranks share them. Their means
and mean squares over all ranks are: these are the same whether ranks have copies or parts. They
only say where a difference begins that losses, gradients or weights have shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations

from commgrid.audit.assemble import Axes, GridRanks
from commgrid.audit.finding import Divergence
from commgrid.audit.records import Records

Table = dict[str, list[float]]
_MODEL_AXES = ("tp", "pp")  # along which ranks are given the same data


@dataclass(frozen=True)
class ForwardStep:
    """One step's forward on a grid, beside the reference's.

    Args:
        finding: makes one, of this grid and step.
        ranks: of the grid.
        theirs, mine: the reference's records, and the grid's.
        tolerance: relative.
    """

    finding: Callable[..., Divergence]
    ranks: GridRanks
    theirs: Records
    mine: Records
    tolerance: float

    def drops(self, *, has_parted: bool) -> Iterator[Divergence]:
        """Dropout that is the same or not where it should not be."""
        for axis in self.ranks.axes():
            if axis == "pp":
                continue
            for one, other in self._neighbours(axis):
                found = self._drops_between(one, other)
                if found is not None:
                    name, kind = found
                    said = f"ranks {one} and {other}, as {_WORDS[kind]}"
                    yield self.finding("dropout", name, kind, (axis,), 1.0, said)
                    return
        drawn = next((key for each in self.mine.values() for key in each.drawn), None)
        if drawn is not None and has_parted:
            said = "the program drops at random, and no two grids draw the same"
            yield self.finding("dropout", drawn.partition(" ")[2], "dropout", (), 1.0, said)

    def _drops_between(self, one: int, other: int) -> tuple[str, str] | None:
        mine, theirs = self.mine[one].drawn, self.mine[other].drawn
        for key in mine:
            if key in theirs:
                same_state, same_input = (
                    a == b for a, b in zip(mine[key], theirs[key], strict=True)
                )
                if same_state != same_input:
                    kind = "seeded alike" if same_state else "seeded unlike"
                    return key.partition(" ")[2], kind
        return None

    def inputs(self) -> Iterator[Divergence]:
        """Inputs of the model that are not the same data."""
        wanted, found = _total(self.theirs, "inputs"), _total(self.mine, "inputs")
        for name in found:
            if name not in wanted or _distance(found[name], wanted[name]) <= self.tolerance:
                continue
            for axis in self.ranks.axes():
                pairs = list(self._neighbours(axis))
                alike = [
                    self.mine[a].inputs.get(name) == self.mine[b].inputs.get(name) for a, b in pairs
                ]
                if axis not in _MODEL_AXES and pairs and all(alike):
                    said = f"all ranks along {axis} are given the same"
                    yield self.finding("input", name, "not sharded", (axis,), 1.0, said)
                    return
            axes = tuple(axis for axis in self.ranks.axes() if axis not in _MODEL_AXES)
            said = "its numbers are others than the reference's, over all ranks"
            yield self.finding("input", name, "batch", axes, 1.0, said)
            return

    def modules(self) -> Iterator[Divergence]:
        """The first module whose output is another one; those after it follow from it."""
        wanted, found = _total(self.theirs, "modules"), _total(self.mine, "modules")
        for key, reference in wanted.items():
            if key not in found:
                continue
            difference = _distance(found[key], reference)
            if difference <= self.tolerance:
                continue
            name = key.rpartition("#")[0]
            calls = {
                tuple(call) for each in self.mine.values() for call in each.within.get(name, ())
            }
            kind, axes, said = self._looks_like(found[key], reference)
            yield self.finding("module", name, kind, axes, difference, said, sorted(calls))
            return

    def _looks_like(self, found: list[float], reference: list[float]) -> tuple[str, Axes, str]:
        """By the mean: a sum over a group that was not taken, or taken twice, is a factor."""
        loose = max(10 * self.tolerance, 1e-6)
        factor = _mean(found) / _mean(reference) if _mean(reference) else 1.0
        for axes in self.ranks.subsets()[1:]:
            size, name = self.ranks.size(axes), "_".join(axes)
            if abs(factor * size - 1) < loose:
                said = f"its outputs add up over {name} to the reference's"
                return "not reduced", axes, said
            if abs(factor / size - 1) < loose:
                return "reduced twice", axes, f"its mean is {size} times the reference's"
        said = (
            f"its mean is {_mean(found):.6g}, the reference's {_mean(reference):.6g}; its mean "
            f"square {found[3] / found[1]:.6g}, the reference's {reference[3] / reference[1]:.6g}"
        )
        return "forward", self.ranks.axes(), said

    def _neighbours(self, axis: str) -> Iterator[tuple[int, int]]:
        """Pairs of ranks that differ along one axis alone."""
        for one, other in combinations(sorted(self.mine), 2):
            if {one, other} <= set(self.ranks.where) and other in self.ranks.along(one, (axis,)):
                yield one, other


_WORDS = {
    "seeded alike": "they have other data, should not draw the same numbers, and do",
    "seeded unlike": "they have the same data, should draw the same numbers, and do not",
}


def _total(records: Records, key: str) -> Table:
    """Over all ranks: calls, elements, sums and squares; of inputs those of the first stage."""
    found: Table = {}
    for record in records.values():
        for name, row in getattr(record, key).items():
            held = found.setdefault(name, [0.0] * 4)
            for i, value in enumerate(row):
                held[i] += value
    return found


def _mean(row: list[float]) -> float:
    return row[2] / row[1]


def _distance(found: list[float], reference: list[float]) -> float:
    """How far means and mean squares are apart, relative to the mean square."""
    squares = reference[3] / reference[1]
    if squares == 0.0:
        return 0.0 if found[3] == 0.0 else float("inf")
    by_squares = abs(found[3] / found[1] / squares - 1)
    return max(by_squares, abs(_mean(found) - _mean(reference)) / math.sqrt(squares))
