"""The likely cause of a different gradient, from its values before and after the reduction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from commgrid.audit.assemble import Axes, GridRanks, Joined, join, ratio, relative, summed
from commgrid.audit.records import Chunks, slices_of


class Cause(NamedTuple):
    """The likely cause: one of `finding.KINDS`, along which axes, in words."""

    kind: str
    axes: Axes
    words: str


@dataclass(frozen=True)
class Case:
    """A gradient of one grid and the reference's.

    Args:
        after: as the optimizer was given it.
        before: as each rank's backward had found it.
        reference: the other grid's, after.
        ranks: of this grid.
        region: whose axes say which ranks have copies.
        loose: tolerance of a classification: above rounding, below chance.
        common: the factor that most gradients have alike, such as a clip of the norm gives.
        reduced: the collectives over its memory, by rank.
        beside: what ranks have found that have another expert in its place.
        floor: a norm an element; smaller ones are noise.
        passed: collectives of modules that backward has run before it came to this gradient.
    """

    after: Joined
    before: Mapping[int, Chunks]
    reference: Joined
    ranks: GridRanks
    region: str
    loose: float
    common: float
    floor: float
    reduced: Mapping[int, list[list[str]]]
    beside: Mapping[int, Chunks]
    passed: Sequence[Sequence[str]]

    def judge(self) -> Cause:
        """The first explanation that fits."""
        if self.after.apart:
            return self._copies()
        factor = ratio(self.after.full, self.reference.full, self.loose)
        if factor is not None:
            return self._factor(factor / self.common)
        return self._reduction()

    def _copies(self) -> Cause:
        """Ranks that have other copies: parts of a sum, or anything else."""
        axes = self.ranks.axes_between(self.after.apart, self.region)
        added = summed(self.after.chunks, self.ranks, axes, self.region)
        total = join(added, self.reference.full.shape, self.loose)
        over = ", ".join(axes)
        if ratio(total.full, self.reference.full, self.loose) is not None:
            seen = self._groups()
            if seen:
                return Cause(
                    "wrong group", axes,
                    f"summed over {seen}, and not over {over}: the sum over {over} of what its "
                    "ranks have is the reference's",
                )  # fmt: skip
            return Cause(
                "not reduced", axes,
                f"its ranks have {self.ranks.size(axes, self.region)} different gradients, whose "
                "sum is the reference's",
            )  # fmt: skip
        found = self._reduction()
        if found.kind in ("wrong group", "not reduced"):
            return found
        return Cause("copies", axes, "its ranks have different gradients, which add up to none")

    def _factor(self, factor: float) -> Cause:
        """All of it is the reference's times a number."""
        said = f"{factor:.6g} times the reference's"
        calls = [*self.passed, *(call for seen in self.reduced.values() for call in seen)]
        names = [call[1].split(",") for call in calls]
        subsets = self.ranks.subsets(self.region)[1:]
        # Of groups of one size those first that something was reduced over.
        for axes in sorted(subsets, key=lambda axes: not any("_".join(axes) in n for n in names)):
            size = self.ranks.size(axes, self.region)
            if abs(factor / size - 1) < self.loose:
                return Cause("reduced twice", axes, f"{said}, the size of {'_'.join(axes)}")
            if abs(factor * size - 1) < self.loose:
                return Cause(
                    "not reduced", axes,
                    f"{said}: one over the size of {'_'.join(axes)}; all its ranks have the same, "
                    "and it is their sum that the reference has",
                )  # fmt: skip
        return Cause("scaled", (), said)

    def _reduction(self) -> Cause:
        """The ranks over which the gradient was summed, and those over which it should be."""
        is_sum = self._is_sum()
        should_be = self._should_be()
        if should_be is None:
            known = "what each rank's backward has found adds up to the reference's over no group"
            return Cause("backward", self.ranks.axes(self.region), known)
        wanted = f"the sum over {', '.join(should_be)}" if should_be else "one rank's alone"
        if is_sum is None:
            return Cause(
                "unknown", should_be,
                f"the reference's is {wanted}; this is no sum of the ranks' gradients",
            )  # fmt: skip
        found = f"the sum over {', '.join(is_sum)}" if is_sum else "each rank's own"
        other = tuple(
            axis for axis in (*should_be, *is_sum) if (axis in should_be) != (axis in is_sum)
        )
        kind = "not reduced" if not is_sum else "wrong group"
        return Cause(kind, other, f"it is {found}; the reference's is {wanted}")

    def _is_sum(self) -> Axes | None:
        """The axes over which the ranks' gradients add up to the optimizer's."""
        for region in dict.fromkeys(("dense", self.region)):
            for axes in self.ranks.subsets(region):
                if self._is_like(summed({**self.beside, **self.before}, self.ranks, axes, region)):
                    return axes
        return None

    def _should_be(self) -> Axes | None:
        """The axes over which it adds up to the reference's."""
        for region in dict.fromkeys((self.region, "dense")):
            for axes in self.ranks.subsets(region):
                added = summed(self.before, self.ranks, axes, region)
                total = join(added, self.reference.full.shape, self.loose, self.floor)
                fits = ratio(total.full, self.reference.full, self.loose) is not None
                if fits and not total.apart and bool((total.has == self.reference.has).all()):
                    return axes
        return None

    def _is_like(self, added: Mapping[int, Chunks]) -> bool:
        """Whether every rank's reduced gradient is a multiple of its own of these sums.

        The same multiple, unless ranks have different ones, which each may have clipped by itself.
        """
        factors: list[float] = []
        for rank, chunks in self.after.chunks.items():
            mine = join({0: added.get(rank, [])}, self.reference.full.shape, self.loose)
            for offset, part in chunks:
                place = slices_of(offset, part)
                if not bool(mine.has[place].all()):
                    return False
                factor = ratio(part.double(), mine.full[place], self.loose)
                if factor is None:
                    if relative(part.double(), mine.full[place], self.floor) > self.loose:
                        return False
                    continue
                factors.append(factor)
        alike = max(factors, default=0) - min(factors, default=0)
        return bool(factors) and (bool(self.after.apart) or alike <= self.loose * abs(factors[0]))

    def _groups(self) -> str:
        """The groups that its memory was reduced over."""
        names = {group.split(",")[0] for calls in self.reduced.values() for _, group, _ in calls}
        return ", ".join(sorted(names))
