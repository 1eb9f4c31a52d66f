"""The time of collectives and redistributions on a cluster.

`Cluster.span` gives the ranks of a group by level: (8, 4) are 8 ranks in each of
4 nodes. Every form takes each level's own latency and bandwidth. A hop over a level takes the
level's latency; what its devices send goes at the level's bandwidth, each over its own links.

| form | all-reduce of S bytes over n ranks on one level | from |
|---|---|---|
| `ring` | 2 (n−1) latency + 2 (n−1)/n · S / bandwidth | Patarasuk & Yuan 2009 |
| `tree` | 2 ⌈log₂ n⌉ latency + 2 S / bandwidth | Sanders, Speck & Träff 2009 |
| `hierarchical` | reduce-scatter inside, all-reduce across, all-gather inside | as the parts |

Sources: Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 69 (2009). Sanders, Speck & Träff, "Two-tree algorithms for full bandwidth broadcast,
reduction and scan", Parallel Computing 35 (2009), which are NCCL's double binary trees. Thakur,
Rabenseifner & Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19
(2005). How a ring's hops divide among levels, and that several rings use all links of a node:
NCCL, `src/graph/tuning.cc`. Sizes and bus bandwidth: nccl-tests, `doc/PERFORMANCE.md`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from commgrid.advisor.cluster import Cluster, Level, highest
from commgrid.advisor.fit import FORMS
from commgrid.errors import SpecError
from commgrid.planning.names import nearest

Spread = Sequence[int]
Levels = Sequence[Level]

COLLECTIVES = tuple(FORMS)
"""Collectives with a cost. Sizes are nccl-tests': all-reduce and broadcast, the buffer; all-gather
and reduce-scatter, n times a rank's part; all-to-all, a rank's whole input, its own part among it;
send/receive, the message."""


def collective_time(
    collective: str, size: float, spread: Spread, cluster: Cluster, *, algorithm: str | None = None
) -> float:
    """Seconds that a collective takes on a group.

    Args:
        collective: one of `COLLECTIVES`.
        size: bytes, as nccl-tests counts them; see `COLLECTIVES`.
        spread: ranks of the group by level: `narrow` of `Cluster.span`.
        cluster: with the latency and bandwidth of each level.
        algorithm: `ring`, `tree`, `hierarchical`, or `pairwise` (all-to-all) and `direct`
            (send/receive); None: the cheapest that the collective has. If a crossed level was
            measured (`commgrid bench -o`), its fit counts, level by level.

    Raises:
        SpecError: an unknown collective, an algorithm that it does not have, a negative size, or a
            spread that does not fit the cluster.

    Example:
        >>> from commgrid.advisor.cluster import CLUSTERS
        >>> inside = collective_time("all_reduce", 1e9, (8, 1), CLUSTERS["h100"])
        >>> across = collective_time("all_reduce", 1e9, (1, 8), CLUSTERS["h100"])
        >>> f"{inside * 1e3:.1f} ms in a node, {across * 1e3:.1f} ms between 8 nodes"
        '3.9 ms in a node, 35.1 ms between 8 nodes'
    """
    _check(collective, size, spread, cluster)
    known = algorithms(collective)
    if algorithm is not None and algorithm not in known:
        raise SpecError(
            f"algorithm={algorithm!r}: {collective} has {', '.join(known)}"
            f"{nearest(str(algorithm), known)}"
        )
    crossed = [place for place, n in enumerate(spread) if n > 1]
    if not crossed:
        return 0.0
    if algorithm == HIERARCHICAL:
        return _hierarchical(collective, size, spread, cluster)
    forms = _FORMS[collective]
    if algorithm is not None:
        return forms[algorithm](size, spread, cluster.levels)
    if collective == "send_recv":
        return _on_level(collective, size, spread[crossed[-1]], crossed[-1], cluster)
    cheapest = math.inf
    if collective in _LEVEL_BY_LEVEL or len(crossed) == 1:
        cheapest = _hierarchical(collective, size, spread, cluster)
        parts = ("all_reduce", "reduce_scatter", "all_gather")
        used = parts if collective == "all_reduce" and len(crossed) > 1 else (collective,)
        names = [cluster.levels[place].name for place in crossed]
        if any(fit.collective in used and fit.level in names for fit in cluster.fits):
            return cheapest
    return min(cheapest, *(form(size, spread, cluster.levels) for form in forms.values()))


HIERARCHICAL = "hierarchical"


def algorithms(collective: str) -> tuple[str, ...]:
    """The forms that a collective has.

    >>> algorithms("all_reduce")
    ('ring', 'tree', 'hierarchical')
    """
    forms = _FORMS[_known(collective)]
    return (*forms, HIERARCHICAL) if collective in _LEVEL_BY_LEVEL else tuple(forms)


def bus_factor(collective: str, ranks: int) -> float:
    """The factor on size / time that gives nccl-tests' bus bandwidth, the speed of the links
    for any number of ranks.

    >>> bus_factor("all_reduce", 8), bus_factor("all_gather", 8), bus_factor("broadcast", 8)
    (1.75, 0.875, 1.0)
    """
    _known(collective)
    if ranks <= 1:
        return 1.0
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if collective in _SPLIT else 1.0


def bus_bandwidth(collective: str, size: float, ranks: int, seconds: float) -> float:
    """nccl-tests' bus bandwidth, in bytes a second.

    Args:
        collective: one of `COLLECTIVES`.
        size: bytes, as nccl-tests counts them; see `COLLECTIVES`.
        ranks: of the group.
        seconds: that it took.

    >>> bus_bandwidth("all_reduce", 8e9, 8, 1.0) / 1e9
    14.0
    """
    return bus_factor(collective, ranks) * size / seconds if seconds else math.inf


_SPLIT = ("all_gather", "reduce_scatter", "all_to_all")
_LEVEL_BY_LEVEL = ("all_reduce", *_SPLIT, "broadcast")


def _known(collective: str) -> str:
    if collective not in COLLECTIVES:
        raise SpecError(
            f"collective {collective!r}: expected one of {', '.join(COLLECTIVES)}"
            f"{nearest(str(collective), COLLECTIVES)}"
        )
    return collective


def _check(collective: str, size: float, spread: Spread, cluster: Cluster) -> None:
    _known(collective)
    if not 0 <= size < math.inf:
        raise SpecError(f"size={size!r}: expected a number of bytes from 0 on")
    if len(spread) != len(cluster.levels) or any(n < 1 for n in spread):
        names = ", ".join(level.name for level in cluster.levels)
        raise SpecError(
            f"spread={tuple(spread)!r}: expected a number from 1 on for each level of cluster "
            f"{cluster.name!r} ({names}), as its span(ranks).narrow gives"
        )


# ---- forms ------------------------------------------------------------------------------------


def _hops(spread: Spread, levels: Levels) -> float:
    """Latency of once around a ring that visits unit after unit: of (8, 4) 28 hops inside nodes
    and 3 between them."""
    return sum(
        (n - 1) * math.prod(spread[place + 1 :]) * levels[place].latency
        for place, n in enumerate(spread)
    )


def _climb(spread: Spread, levels: Levels) -> float:
    """Latency from leaf to root of a tree, within units and then across them."""
    return sum(
        math.ceil(math.log2(n)) * level.latency for n, level in zip(spread, levels, strict=True)
    )


def _stream(size: float, spread: Spread, levels: Levels) -> float:
    """Seconds that bytes take through every unit in turn, at the pace of the slowest level.

    Bytes leave a unit over the links of all the group's ranks in it: 8 rings over 8 adapters.
    """
    slowest, width = 0.0, 1
    for n, level in zip(spread, levels, strict=True):
        if n > 1:
            slowest = max(slowest, size / (level.bandwidth * width))
        width *= n
    return slowest


def _ring_pass(size: float, spread: Spread, levels: Levels) -> float:
    """An all-gather or reduce-scatter as a ring: n − 1 steps of size / n (Thakur et al. 2005)."""
    n = math.prod(spread)
    return _hops(spread, levels) + _stream((n - 1) / n * size, spread, levels)


def _ring_all_reduce(size: float, spread: Spread, levels: Levels) -> float:
    """A reduce-scatter and an all-gather (Patarasuk & Yuan 2009)."""
    return 2 * _ring_pass(size, spread, levels)


def _ring_broadcast(size: float, spread: Spread, levels: Levels) -> float:
    """A pipeline through all ranks, in slices so small that only its latency is added."""
    return _hops(spread, levels) + _stream(size, spread, levels)


def _tree_broadcast(size: float, spread: Spread, levels: Levels) -> float:
    """Two trees with half of the bytes each: who is inside one is a leaf of the other, so all send
    at full bandwidth (Sanders, Speck & Träff 2009)."""
    return _climb(spread, levels) + _stream(size, spread, levels)


def _tree_all_reduce(size: float, spread: Spread, levels: Levels) -> float:
    """To the roots of two trees and back (Sanders, Speck & Träff 2009; NCCL since 2.4)."""
    return 2 * _tree_broadcast(size, spread, levels)


def _pairwise(size: float, spread: Spread, levels: Levels) -> float:
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


def _direct(size: float, spread: Spread, levels: Levels) -> float:
    """One message over the highest level that the group crosses."""
    level = levels[highest(spread)]
    return level.latency + size / level.bandwidth


_Form = Callable[[float, Spread, Levels], float]
_FORMS: Mapping[str, Mapping[str, _Form]] = MappingProxyType(
    {
        "all_reduce": {"ring": _ring_all_reduce, "tree": _tree_all_reduce},
        "all_gather": {"ring": _ring_pass},
        "reduce_scatter": {"ring": _ring_pass},
        "all_to_all": {"pairwise": _pairwise},
        "broadcast": {"ring": _ring_broadcast, "tree": _tree_broadcast},
        "send_recv": {"direct": _direct},
    }
)


# ---- level by level -----------------------------------------------------------------------------


def _hierarchical(collective: str, size: float, spread: Spread, cluster: Cluster) -> float:
    """One level after the other, each by its fit, or by the best of the forms on it.

    All-reduce of (8, 4): reduce-scatter in each node, all-reduce of an eighth across nodes by 8
    groups at once, all-gather in each node. All-gather goes from the highest level down, and
    reduce-scatter up; an all-to-all moves all bytes at each level, in fewer and larger messages
    (Hwang et al., "Tutel", MLSys 2023: two-dimensional all-to-all).
    """
    top = highest(spread)
    total, part = 0.0, size
    for place, n in enumerate(spread):
        if n == 1:
            continue
        if collective != "all_reduce":
            total += _on_level(collective, part, n, place, cluster)
        elif place == top:
            total += _on_level("all_reduce", part, n, place, cluster)
        else:
            total += _on_level("reduce_scatter", part, n, place, cluster)
            total += _on_level("all_gather", part, n, place, cluster)
        if collective in _SHRINKING:
            part /= n
    return total


_SHRINKING = ("all_reduce", "all_gather", "reduce_scatter")


def _on_level(collective: str, size: float, ranks: int, place: int, cluster: Cluster) -> float:
    """A group on one level alone."""
    level = cluster.levels[place]
    for fit in cluster.fits:
        if fit.collective == collective and fit.level == level.name:
            seconds = one_level_time(
                collective, fit.algorithm, size, ranks, fit.latency, fit.bandwidth
            )
            return seconds * fit.factor(ranks, size)
    return min(form(size, (ranks,), (level,)) for form in _FORMS[collective].values())


def one_level_time(
    collective: str, algorithm: str, size: float, ranks: int, latency: float, bandwidth: float
) -> float:
    """Seconds of one form on one level, from the level's two numbers alone.

    >>> one_level_time("all_gather", "ring", 8e9, 8, 1e-3, 1e9)
    7.007
    """
    return _FORMS[collective][algorithm](size, (ranks,), (Level("", None, bandwidth, latency),))
