"""From measured collectives to a cluster that predicts others: each level by itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from commgrid.cost_model.cluster import Cluster
from commgrid.cost_model.collective import bus_bandwidth
from commgrid.cost_model.collective_form import KINDS, Fit, one_level_time
from commgrid.errors import SpecError


@dataclass(frozen=True)
class Measured:
    """The measured time of a collective of one size on the groups of a name.

    Args:
        group: the name.
        names: all whose groups have the same ranks and options.
        collective: one of `commgrid.cost_model.collective.COLLECTIVES`.
        size: bytes, as nccl-tests counts them.
        count: elements that a rank gives, as nccl-tests counts them.
        ranks: of a group.
        groups: how many communicated at once.
        spread: ranks of a group by level.
        seconds: the median of the repeats, each the mean of its calls and the slowest rank's.
        least, most: of the repeats.
    """

    group: str
    names: tuple[str, ...]
    collective: str
    size: int
    count: int
    ranks: int
    groups: int
    spread: tuple[int, ...]
    seconds: float
    least: float
    most: float

    @property
    def algorithm_bandwidth(self) -> float:
        """Size over time, in bytes a second."""
        return self.size / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """nccl-tests' bus bandwidth, in bytes a second."""
        return bus_bandwidth(self.collective, self.size, self.ranks, self.seconds)


def fit(rows: Iterable[Measured], cluster: Cluster) -> Cluster:
    """The cluster with a fit for each collective on each level that was measured.

    A level's fits come from groups that lie on that level alone; the time over several follows from
    them. Each is a form of `commgrid.cost_model.collective_form` whose latency and bandwidth have
    the least squares of relative errors. A level's own latency and bandwidth become those of its
    all-reduce, or of the first collective that was measured.

    Args:
        rows: of groups that communicated at once, as in training.
        cluster: with the levels that the rows' spreads are of.

    Raises:
        SpecError: no row is of a group on one level alone, or one has no size or time.
    """
    sets: dict[tuple[int, str], list[Measured]] = {}
    for row in rows:
        if not (0 < row.size < math.inf and 0 < row.seconds < math.inf):
            raise SpecError(
                f"{row.collective} of {row.group}: {row.size} bytes in {row.seconds} s; expected "
                "both above 0"
            )
        crossed = [place for place, n in enumerate(row.spread) if n > 1]
        if len(crossed) == 1:
            sets.setdefault((crossed[0], row.collective), []).append(row)
    if not sets:
        raise SpecError(
            "nothing to fit: no measured group is within one level; measure more of "
            "the grid's groups, such as its axes"
        )
    fits: list[Fit] = []
    levels = list(cluster.levels)
    for place, level in enumerate(cluster.levels):
        found = [
            _fit_one(collective, level.name, measured)
            for (at, collective), measured in sets.items()
            if at == place
        ]
        fits += found
        if found:
            chosen = next((one for one in found if one.collective == "all_reduce"), found[0])
            levels[place] = replace(
                level, latency=chosen.latency, bandwidth=chosen.bandwidth, measured=True
            )
    return replace(cluster, levels=tuple(levels), fits=tuple(fits))


def too_fast(rows: Iterable[Measured], fitted: Cluster) -> list[str]:
    """Describe fits whose bandwidth the measured sizes leave open.

    Where all sizes take about as long, latency explains them, and a bandwidth of any size does:
    what is planned for larger messages is then far too fast.

    Args:
        rows: that `fit` was given.
        fitted: what it made of them.
    """
    rows, told = list(rows), []
    for one in fitted.fits:
        place = fitted.find_level(one.level)
        best = max(
            row.bus_bandwidth
            for row in rows
            if row.collective == one.collective
            and [at for at, n in enumerate(row.spread) if n > 1] == [place]
        )
        if one.bandwidth > _TOO_FAST * best:
            told.append(
                f"{one.collective} on {one.level}: the fit's {one.bandwidth / 1e9:.3g} GB/s are "
                f"not to be trusted, since at most {best / 1e9:.3g} were measured and time hardly "
                "grew with size; measure larger ones with --sizes"
            )
    return told


_TOO_FAST = 10
"""How many times the best that was measured a fit's bandwidth may be."""


def _fit_one(collective: str, level: str, rows: Sequence[Measured]) -> Fit:
    """The form of the smallest error."""
    found: list[tuple[float, Fit]] = []
    for algorithm in KINDS[collective].forms:
        # A form is a sum of its latencies and its bytes, so that two calls tell its two parts.
        hops = [one_level_time(collective, algorithm, r.size, r.ranks, 1.0, math.inf) for r in rows]
        moved = [one_level_time(collective, algorithm, r.size, r.ranks, 0.0, 1.0) for r in rows]
        latency, per_byte = _two_numbers(
            [h / r.seconds for h, r in zip(hops, rows, strict=True)],
            [m / r.seconds for m, r in zip(moved, rows, strict=True)],
        )
        error = sum(
            ((h * latency + m * per_byte) / r.seconds - 1) ** 2
            for h, m, r in zip(hops, moved, rows, strict=True)
        )
        found.append((error, Fit(collective, level, algorithm, latency, 1 / per_byte)))
    return min(found, key=lambda each: round(each[0], 6))[1]  # the first of equals


def _two_numbers(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """x and y above 0 with the least squares of a·x + b·y − 1."""
    aa, bb = sum(x * x for x in a), sum(y * y for y in b)
    ab = sum(x * y for x, y in zip(a, b, strict=True))
    alone = sum(a) / aa, sum(b) / bb
    determinant = aa * bb - ab * ab
    if determinant > 1e-9 * aa * bb:
        x = (sum(a) * bb - sum(b) * ab) / determinant
        y = (sum(b) * aa - sum(a) * ab) / determinant
        if x > 0 and y > 0:
            return x, y
    # One of them explains all; a thousandth of the other keeps it above 0.
    errors = [sum((v * alone[n] - 1) ** 2 for v in values) for n, values in enumerate((a, b))]
    share = (1.0, 1e-3) if errors[0] < errors[1] else (1e-3, 1.0)
    x, y = share[0] * alone[0], share[1] * alone[1]
    both = [v * x + w * y for v, w in zip(a, b, strict=True)]
    scale = sum(both) / sum(each * each for each in both)
    return x * scale, y * scale
