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
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from commgrid.errors import SpecError
from commgrid.layout.axis_names import check_word
from commgrid.planning.yaml_keys import above_zero, check_keys


class Link(NamedTuple):
    """The two numbers of a level: seconds, and bytes a second."""

    latency: float
    bandwidth: float


Spread = Sequence[int]
"""Ranks of a group by level: (8, 4) are 8 ranks in each of 4 nodes."""
Form = Callable[[float, Spread, Sequence[Link]], float]
"""Seconds, from a size, a spread and the levels."""


def highest(spread: Spread) -> int:
    """The place of the highest level that a group of this spread crosses; 0 for one rank."""
    return max((place for place, count in enumerate(spread) if count > 1), default=0)


class Span(NamedTuple):
    """A group on a cluster: two numbers for each level, the lowest first.

    Args:
        spread: the most of its ranks in a node, then the most nodes in a unit of the next level,
            and so on.
        narrow: the same of the units with fewest of its ranks, whose few links its collectives
            wait for. It is `spread` where all units have as many, and their product is then the
            group's size.
    """

    spread: tuple[int, ...]
    narrow: tuple[int, ...]

    @property
    def place(self) -> int:
        """The place of the highest level that the group crosses; 0 for one rank."""
        return highest(self.spread)

    @classmethod
    def of(cls, units: Sequence[int], sizes: Sequence[int | None]) -> Span:
        """Count a group's ranks.

        Args:
            units: the unit of the lowest level that each rank is in.
            sizes: of the cluster's levels, as their `size`.

        Example:
            >>> Span.of([0, 0, 0, 0, 1, 1], [8, None])
            Span(spread=(4, 2), narrow=(2, 3))
        """
        if len(set(units)) == 1:
            alone = (len(units), *[1] * (len(sizes) - 1))
            return cls(alone, alone)
        held = Counter(units)
        fewest = min(held.values(), default=0)
        spread, narrow = [max(held.values(), default=0)], [fewest]
        for size in sizes[1:]:
            ranks: Counter[int] = Counter()
            below: Counter[int] = Counter()
            for unit, count in held.items():
                above = 0 if size is None else unit // size
                ranks[above] += count
                below[above] += 1
            spread.append(max(below.values(), default=0))
            before, fewest = max(fewest, 1), min(ranks.values(), default=0)
            narrow.append(-(-fewest // before))
            held = ranks
        return cls(tuple(spread), tuple(narrow))


def widest(spans: Collection[Span]) -> Span:
    """Of all groups of a name the spread that crosses most, and where they cross it, the narrowest
    units: the others wait for these."""
    spread = max((span.spread for span in spans), key=lambda each: each[::-1])
    return Span(spread, min(span.narrow for span in spans if span.place == highest(spread)))


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


def one_level_time(
    collective: str, algorithm: str, size: float, ranks: int, latency: float, bandwidth: float
) -> float:
    """Seconds of one form on one level, from the level's two numbers alone.

    >>> one_level_time("all_gather", "ring", 8e9, 8, 1e-3, 1e9)
    7.007
    """
    form = KINDS[collective].forms[algorithm]
    return form(size, (ranks,), (Link(latency, bandwidth),))


# -- what was measured -------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """A collective on one level: a form, and its latency and bandwidth.

    Args:
        collective: which.
        level: the name of the level.
        algorithm: the form (see `commgrid.cost_model.collective`) that fits best.
        latency: the form's, in seconds.
        bandwidth: the form's, in bytes a second.
    """

    collective: str
    level: str
    algorithm: str
    latency: float
    bandwidth: float

    def seconds(self, size: float, ranks: int) -> float:
        """The time of a message, by the form.

        >>> Fit("all_gather", "node", "ring", 1e-3, 1e9).seconds(8e9, 8)
        7.007
        """
        return one_level_time(
            self.collective, self.algorithm, size, ranks, self.latency, self.bandwidth
        )

    @classmethod
    def from_dict(cls, key: str, config: Mapping[str, Any]) -> Fit:
        """A fit from the mapping that YAML holds; see `to_dict`.

        Raises:
            SpecError: a key is missing or unknown, or a number is not above 0.
        """
        check_keys(f"{key}.", config, (*_KEYS, "rest"), ("rest",))
        _check_rest(f"{key}.rest", config.get("rest", {}))
        collective, algorithm = str(config["collective"]), str(config["algorithm"])
        check_word(f"{key}.collective ", collective, KINDS)
        forms = KINDS[collective].forms
        if algorithm not in forms:
            raise SpecError(f"{key}.algorithm={algorithm!r}: {collective} has {', '.join(forms)}")
        return cls(
            collective,
            str(config["level"]),
            algorithm,
            above_zero(f"{key}.", config, "latency_us") / 1e6,
            above_zero(f"{key}.", config, "gb_per_s") * 1e9,
        )

    def to_dict(self) -> dict[str, Any]:
        """The mapping that `from_dict` reads, in units people use."""
        return {
            "collective": self.collective,
            "level": self.level,
            "algorithm": self.algorithm,
            "latency_us": _short(self.latency * 1e6),
            "gb_per_s": _short(self.bandwidth / 1e9),
        }


_KEYS = ("collective", "level", "algorithm", "latency_us", "gb_per_s")


def _check_rest(key: str, rest: object) -> None:
    """What fits had beside the form until 0.2, and files may have until 0.3; it is not used.

    Raises:
        SpecError: it is something else.
    """
    if not isinstance(rest, Mapping) or not all(isinstance(c, Mapping) for c in rest.values()):
        raise SpecError(f"{key}={rest!r}: expected ranks: {{bytes: factor}}")
    for ranks, curve in rest.items():
        above_zero(key, {"": ranks}, "")
        for size in curve:
            above_zero(f"{key}.{ranks}", {"": size}, "")
            above_zero(f"{key}.{ranks}.", curve, size)


def _short(number: float) -> float:
    return float(f"{number:.6g}")
