"""Fit: what was measured of one collective on one level of a cluster, as a few numbers."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from commgrid.errors import SpecError
from commgrid.planning.checks import above_zero, check_keys
from commgrid.planning.names import nearest

Curve = tuple[tuple[float, float], ...]

FORMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "all_reduce": ("ring", "tree"),
        "all_gather": ("ring",),
        "reduce_scatter": ("ring",),
        "all_to_all": ("pairwise",),
        "broadcast": ("ring", "tree"),
        "send_recv": ("direct",),
    }
)
"""The collectives, and the forms that each has on one level."""


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
        if collective not in FORMS:
            raise SpecError(
                f"{key}.collective {collective!r}: expected one of {', '.join(FORMS)}"
                f"{nearest(collective, FORMS)}"
            )
        if algorithm not in FORMS[collective]:
            raise SpecError(
                f"{key}.algorithm={algorithm!r}: {collective} has {', '.join(FORMS[collective])}"
            )
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
