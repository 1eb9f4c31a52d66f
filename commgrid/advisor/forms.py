"""Forms of collectives, as functions of latencies and bandwidths, and what was measured of one.

A form's time is a sum over the levels of a cluster that a group crosses. A hop over a level takes
the level's latency; what its devices send goes at the level's bandwidth, each over its own links.

| form | all-reduce of S bytes over n ranks on one level | from |
|---|---|---|
| `ring` | 2 (n−1) latency + 2 (n−1)/n · S / bandwidth | Patarasuk & Yuan 2009 |
| `tree` | 2 ⌈log₂ n⌉ latency + 2 S / bandwidth | Sanders, Speck & Träff 2009 |

Sources: Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 69 (2009). Sanders, Speck & Träff, "Two-tree algorithms for full bandwidth broadcast,
reduction and scan", Parallel Computing 35 (2009), which are NCCL's double binary trees. Thakur,
Rabenseifner & Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19
(2005). How a ring's hops divide among levels, and that several rings use all links of a node:
NCCL, `src/graph/tuning.cc`. Sizes and bus bandwidth: nccl-tests, `doc/PERFORMANCE.md`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from commgrid.errors import SpecError
from commgrid.planning.checks import above_zero, check_keys
from commgrid.planning.names import nearest


class Link(Protocol):
    """The two numbers of a level: seconds, and bytes a second."""

    @property
    def latency(self) -> float: ...
    @property
    def bandwidth(self) -> float: ...


Spread = Sequence[int]
"""Ranks of a group by level: (8, 4) are 8 ranks in each of 4 nodes."""
Form = Callable[[float, Spread, Sequence[Link]], float]
"""Seconds, from a size, a spread and the levels."""


def highest(spread: Spread) -> int:
    """The place of the highest level that a group of this spread crosses; 0 for one rank."""
    return max((place for place, count in enumerate(spread) if count > 1), default=0)


def _hops(spread: Spread, levels: Sequence[Link]) -> float:
    """Latency of once around a ring that visits unit after unit: of (8, 4) 28 hops inside nodes
    and 3 between them."""
    return sum(
        (n - 1) * math.prod(spread[place + 1 :]) * levels[place].latency
        for place, n in enumerate(spread)
    )


def _climb(spread: Spread, levels: Sequence[Link]) -> float:
    """Latency from leaf to root of a tree, within units and then across them."""
    return sum(
        math.ceil(math.log2(n)) * level.latency for n, level in zip(spread, levels, strict=True)
    )


def _stream(size: float, spread: Spread, levels: Sequence[Link]) -> float:
    """Seconds that bytes take through every unit in turn, at the pace of the slowest level.

    Bytes leave a unit over the links of all the group's ranks in it: 8 rings over 8 adapters.
    """
    slowest, width = 0.0, 1
    for n, level in zip(spread, levels, strict=True):
        if n > 1:
            slowest = max(slowest, size / (level.bandwidth * width))
        width *= n
    return slowest


def _ring_pass(size: float, spread: Spread, levels: Sequence[Link]) -> float:
    """An all-gather or reduce-scatter as a ring: n − 1 steps of size / n (Thakur et al. 2005)."""
    n = math.prod(spread)
    return _hops(spread, levels) + _stream((n - 1) / n * size, spread, levels)


def _ring_all_reduce(size: float, spread: Spread, levels: Sequence[Link]) -> float:
    """A reduce-scatter and an all-gather (Patarasuk & Yuan 2009)."""
    return 2 * _ring_pass(size, spread, levels)


def _ring_broadcast(size: float, spread: Spread, levels: Sequence[Link]) -> float:
    """A pipeline through all ranks, in slices so small that only its latency is added."""
    return _hops(spread, levels) + _stream(size, spread, levels)


def _tree_broadcast(size: float, spread: Spread, levels: Sequence[Link]) -> float:
    """Two trees with half of the bytes each: who is inside one is a leaf of the other, so all send
    at full bandwidth (Sanders, Speck & Träff 2009)."""
    return _climb(spread, levels) + _stream(size, spread, levels)


def _tree_all_reduce(size: float, spread: Spread, levels: Sequence[Link]) -> float:
    """To the roots of two trees and back (Sanders, Speck & Träff 2009; NCCL since 2.4)."""
    return 2 * _tree_broadcast(size, spread, levels)


def _pairwise(size: float, spread: Spread, levels: Sequence[Link]) -> float:
    """An all-to-all of n − 1 messages of size / n (Thakur et al. 2005).

    Those over different levels use different links, so that the slowest level's bytes decide.
    """
    n = math.prod(spread)
    latency, slowest, below = 0.0, 0.0, 1
    for each, level in zip(spread, levels, strict=True):
        messages = (each - 1) * below
        latency += messages * level.latency
        slowest = max(slowest, messages * size / n / level.bandwidth)
        below *= each
    return latency + slowest


def _direct(size: float, spread: Spread, levels: Sequence[Link]) -> float:
    """One message over the highest level that the group crosses."""
    level = levels[highest(spread)]
    return level.latency + size / level.bandwidth


class Kind(NamedTuple):
    """A collective.

    Args:
        forms: that it has on one level, by name.
        passes: how often its bytes go around a ring of all ranks: nccl-tests' bus bandwidth counts
            so; 0: its buffer goes through once.
        by_level: whether it can be put together of parts, a level at a time.
        shrinks: whether each level leaves the next one a part of the bytes.
    """

    forms: Mapping[str, Form]
    passes: int = 0
    by_level: bool = True
    shrinks: bool = False


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "all_reduce": Kind({"ring": _ring_all_reduce, "tree": _tree_all_reduce}, 2, shrinks=True),
        "all_gather": Kind({"ring": _ring_pass}, 1, shrinks=True),
        "reduce_scatter": Kind({"ring": _ring_pass}, 1, shrinks=True),
        "all_to_all": Kind({"pairwise": _pairwise}, 1),
        "broadcast": Kind({"ring": _ring_broadcast, "tree": _tree_broadcast}),
        "send_recv": Kind({"direct": _direct}, by_level=False),
    }
)
"""The collectives with a cost. Sizes are nccl-tests': all-reduce and broadcast, the buffer;
all-gather and reduce-scatter, n times a rank's part; all-to-all, a rank's whole input, its own part
among it; send/receive, the message."""


class _Level(NamedTuple):
    latency: float
    bandwidth: float


def one_level_time(
    collective: str, algorithm: str, size: float, ranks: int, latency: float, bandwidth: float
) -> float:
    """Seconds of one form on one level, from the level's two numbers alone.

    >>> one_level_time("all_gather", "ring", 8e9, 8, 1e-3, 1e9)
    7.007
    """
    form = KINDS[collective].forms[algorithm]
    return form(size, (ranks,), (_Level(latency, bandwidth),))


# ---- what was measured --------------------------------------------------------------------------

Curve = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Fit:
    """A collective on one level: a form's latency and bandwidth, and what remains beside them.

    Args:
        collective: which.
        level: the name of the level.
        algorithm: the form (see `commgrid.advisor.collectives`) that fits best.
        latency: the form's, in seconds.
        bandwidth: the form's, in bytes a second.
        rest: for each number of ranks that was measured, sizes in bytes with measured time over the
            form's time. Straight lines lie between, over the logarithms of ranks and sizes; outside
            the nearest counts.
    """

    collective: str
    level: str
    algorithm: str
    latency: float
    bandwidth: float
    rest: tuple[tuple[int, Curve], ...] = ()

    def factor(self, ranks: int, size: float) -> float:
        """The factor on the form's time.

        >>> fit = Fit("all_reduce", "node", "ring", 1e-3, 1e9, ((2, ((1e3, 1.0), (1e5, 4.0))),))
        >>> round(fit.factor(2, 1e4), 6), fit.factor(8, 1e6)
        (2.0, 4.0)
        """
        if not self.rest:
            return 1.0
        across = [(math.log(n), math.log(_at(curve, size))) for n, curve in self.rest]
        return math.exp(_line(across, math.log(ranks)))

    @classmethod
    def from_dict(cls, key: str, config: Mapping[str, Any]) -> Fit:
        """A fit from the mapping that YAML holds; see `to_dict`.

        Raises:
            SpecError: a key is missing or unknown, or a number is not above 0.
        """
        check_keys(f"{key}.", config, _KEYS)
        collective, algorithm = str(config["collective"]), str(config["algorithm"])
        if collective not in KINDS:
            raise SpecError(
                f"{key}.collective {collective!r}: expected one of {', '.join(KINDS)}"
                f"{nearest(collective, KINDS)}"
            )
        forms = KINDS[collective].forms
        if algorithm not in forms:
            raise SpecError(f"{key}.algorithm={algorithm!r}: {collective} has {', '.join(forms)}")
        rest = config["rest"]
        if not isinstance(rest, Mapping) or not all(isinstance(c, Mapping) for c in rest.values()):
            raise SpecError(f"{key}.rest={rest!r}: expected ranks: {{bytes: factor}}")
        curves = {
            int(_key(f"{key}.rest", n)): {
                _key(f"{key}.rest.{n}", size): above_zero(f"{key}.rest.{n}.", curve, size)
                for size in curve
            }
            for n, curve in rest.items()
            if curve
        }
        return cls(
            collective,
            str(config["level"]),
            algorithm,
            above_zero(f"{key}.", config, "latency_us") / 1e6,
            above_zero(f"{key}.", config, "gb_per_s") * 1e9,
            tuple((n, tuple(sorted(curves[n].items()))) for n in sorted(curves)),
        )

    def to_dict(self) -> dict[str, Any]:
        """The mapping that `from_dict` reads, in units people use."""
        return {
            "collective": self.collective,
            "level": self.level,
            "algorithm": self.algorithm,
            "latency_us": _short(self.latency * 1e6),
            "gb_per_s": _short(self.bandwidth / 1e9),
            "rest": {n: {round(s): _short(f) for s, f in curve} for n, curve in self.rest},
        }


_KEYS = ("collective", "level", "algorithm", "latency_us", "gb_per_s", "rest")


def fits_from(config: object) -> tuple[Fit, ...]:
    """The fits of a cluster's mapping.

    Raises:
        SpecError: what is no list of fits.
    """
    if not isinstance(config, list):
        raise SpecError(f"fits={config!r}: expected a list, as `commgrid bench -o` writes it")
    return tuple(Fit.from_dict(f"fits[{n}]", each) for n, each in enumerate(config))


def _at(curve: Curve, size: float) -> float:
    points = [(math.log(x), math.log(y)) for x, y in curve]
    return math.exp(_line(points, math.log(max(size, 1.0))))


def _line(points: Sequence[tuple[float, float]], x: float) -> float:
    """Straight lines between points; outside, the nearest point's value."""
    place = bisect_right([at for at, _ in points], x)
    if place in (0, len(points)):
        return points[min(place, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[place - 1 : place + 1]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _short(number: float) -> float:
    return float(f"{number:.6g}")


def _key(where: str, key: object) -> float:
    """A key that is a number."""
    return above_zero(where, {"": key}, "")
