"""What communication costs on a cluster: each collective's time, and a redistribution's.

A group lies on the levels of a cluster as its `Cluster.spread` says: (8, 4) are 8 ranks in each of
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

from commgrid.errors import SpecError
from commgrid.planning.cluster import Cluster
from commgrid.planning.names import nearest

Spread = Sequence[int]

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "send_recv",
)
"""What has a cost. The sizes are nccl-tests': all-reduce and broadcast, the buffer; all-gather and
reduce-scatter, the whole of it, n times what a rank contributes or keeps; all-to-all, what one rank
sends to all, itself among them; send/receive, the message."""


def collective_time(
    collective: str, size: float, spread: Spread, cluster: Cluster, *, algorithm: str | None = None
) -> float:
    """Seconds that a collective takes on a group.

    Args:
        collective: one of `COLLECTIVES`.
        size: bytes, as nccl-tests counts them; see `COLLECTIVES`.
        spread: how the group lies on the cluster's levels, from `Cluster.spread`.
        cluster: with the latency and bandwidth of each level.
        algorithm: `ring`, `tree`, `hierarchical`, or `pairwise` (all-to-all) and `direct`
            (send/receive); None: the cheapest that the collective has.

    Raises:
        SpecError: an unknown collective, an algorithm that it does not have, a negative size, or a
            spread that does not fit the cluster.

    Example:
        >>> from commgrid.planning.cluster import CLUSTERS
        >>> inside = collective_time("all_reduce", 1e9, (8, 1), CLUSTERS["h100"])
        >>> across = collective_time("all_reduce", 1e9, (1, 8), CLUSTERS["h100"])
        >>> f"{inside * 1e3:.1f} ms in a node, {across * 1e3:.1f} ms between 8 nodes"
        '3.9 ms in a node, 35.1 ms between 8 nodes'
    """
    forms = _FORMS[_check(collective, size, spread, cluster)]
    if algorithm is not None and algorithm not in forms:
        raise SpecError(
            f"algorithm={algorithm!r}: {collective} has {', '.join(forms)}"
            f"{nearest(str(algorithm), forms)}"
        )
    if math.prod(spread) == 1:
        return 0.0
    if algorithm is not None:
        return forms[algorithm](size, spread, cluster)
    return min(form(size, spread, cluster) for form in forms.values())


def algorithms(collective: str) -> tuple[str, ...]:
    """The forms that a collective has.

    >>> algorithms("all_reduce")
    ('ring', 'tree', 'hierarchical')
    """
    return tuple(_FORMS[_known(collective)])


def bus_factor(collective: str, ranks: int) -> float:
    """What nccl-tests multiplies size / time by, so that the product is the speed of the links
    whatever the number of ranks.

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


def _known(collective: str) -> str:
    if collective not in COLLECTIVES:
        raise SpecError(
            f"collective {collective!r}: expected one of {', '.join(COLLECTIVES)}"
            f"{nearest(str(collective), COLLECTIVES)}"
        )
    return collective


def _check(collective: str, size: float, spread: Spread, cluster: Cluster) -> str:
    if not 0 <= size < math.inf:
        raise SpecError(f"size={size!r}: expected a number of bytes from 0 on")
    if len(spread) != len(cluster.levels) or any(n < 1 for n in spread):
        names = ", ".join(level.name for level in cluster.levels)
        raise SpecError(
            f"spread={tuple(spread)!r}: expected a number from 1 on for each level of cluster "
            f"{cluster.name!r} ({names}), as its spread(ranks) gives"
        )
    return _known(collective)


# ---- forms ------------------------------------------------------------------------------------


def _hops(spread: Spread, cluster: Cluster) -> float:
    """Latency of once around a ring that visits unit after unit: of (8, 4) 28 hops inside nodes
    and 3 between them."""
    return sum(
        (n - 1) * math.prod(spread[place + 1 :]) * cluster.levels[place].latency
        for place, n in enumerate(spread)
    )


def _climb(spread: Spread, cluster: Cluster) -> float:
    """Latency from the leaves of a tree in every unit, and of one over units, to its root."""
    return sum(
        math.ceil(math.log2(n)) * level.latency
        for n, level in zip(spread, cluster.levels, strict=True)
    )


def _stream(size: float, spread: Spread, cluster: Cluster) -> float:
    """Seconds that bytes take through every unit in turn, at the pace of the slowest level.

    What leaves a unit goes over the links of all the group's ranks in it: 8 rings over 8 adapters.
    """
    slowest, width = 0.0, 1
    for n, level in zip(spread, cluster.levels, strict=True):
        if n > 1:
            slowest = max(slowest, size / (level.bandwidth * width))
        width *= n
    return slowest


def _ring_pass(size: float, spread: Spread, cluster: Cluster) -> float:
    """An all-gather or reduce-scatter as a ring: n − 1 steps of size / n (Thakur et al. 2005)."""
    n = math.prod(spread)
    return _hops(spread, cluster) + _stream((n - 1) / n * size, spread, cluster)


def _ring_all_reduce(size: float, spread: Spread, cluster: Cluster) -> float:
    """A reduce-scatter and an all-gather (Patarasuk & Yuan 2009)."""
    return 2 * _ring_pass(size, spread, cluster)


def _ring_broadcast(size: float, spread: Spread, cluster: Cluster) -> float:
    """A pipeline through all ranks, in slices so small that only its latency is added."""
    return _hops(spread, cluster) + _stream(size, spread, cluster)


def _tree_broadcast(size: float, spread: Spread, cluster: Cluster) -> float:
    """Two trees with half of the bytes each: who is inside one is a leaf of the other, so all send
    at full bandwidth (Sanders, Speck & Träff 2009)."""
    return _climb(spread, cluster) + _stream(size, spread, cluster)


def _tree_all_reduce(size: float, spread: Spread, cluster: Cluster) -> float:
    """To the roots of two trees and back (Sanders, Speck & Träff 2009; NCCL since 2.4)."""
    return 2 * _tree_broadcast(size, spread, cluster)


def _hierarchical_pass(size: float, spread: Spread, cluster: Cluster) -> float:
    """An all-gather from the highest level down, or a reduce-scatter from the lowest up.

    Of (8, 4): rings of 4 over an eighth of the bytes, 8 at once, and rings of 8 inside nodes.
    """
    total, part = 0.0, size
    for place, n in enumerate(spread):
        if n > 1:
            total += _ring_pass(part, _alone(spread, place), cluster)
        part /= n
    return total


def _hierarchical_all_reduce(size: float, spread: Spread, cluster: Cluster) -> float:
    """Reduce-scatter inside every unit, all-reduce across by the best form, all-gather inside."""
    highest = cluster.highest(spread)
    inner, part = 0.0, size
    for place in range(highest):
        inner += _ring_pass(part, _alone(spread, place), cluster)
        part /= spread[place]
    across = _alone(spread, highest)
    top = min(_ring_all_reduce(part, across, cluster), _tree_all_reduce(part, across, cluster))
    return 2 * inner + top


def _pairwise(size: float, spread: Spread, cluster: Cluster) -> float:
    """An all-to-all of n − 1 messages of size / n (Thakur et al. 2005).

    Those over different levels use different links, so that the slowest level's bytes decide.
    """
    n = math.prod(spread)
    latency, slowest, below = 0.0, 0.0, 1
    for each, level in zip(spread, cluster.levels, strict=True):
        messages = (each - 1) * below
        latency += messages * level.latency
        slowest = max(slowest, messages * size / n / level.bandwidth)
        below *= each
    return latency + slowest


def _hierarchical_all_to_all(size: float, spread: Spread, cluster: Cluster) -> float:
    """All-to-alls inside units, then across: every byte moves at each level, in fewer and larger
    messages (Hwang et al., "Tutel", MLSys 2023, §3.4: two-dimensional all-to-all)."""
    return sum(
        _pairwise(size, _alone(spread, place), cluster) for place, n in enumerate(spread) if n > 1
    )


def _direct(size: float, spread: Spread, cluster: Cluster) -> float:
    """One message over the highest level that the group crosses."""
    level = cluster.levels[cluster.highest(spread)]
    return level.latency + size / level.bandwidth


def _alone(spread: Spread, place: int) -> tuple[int, ...]:
    """The part of a group that lies on one level: one of the groups of a level's step."""
    return tuple(n if level == place else 1 for level, n in enumerate(spread))


_Form = Callable[[float, Spread, Cluster], float]
_FORMS: Mapping[str, Mapping[str, _Form]] = MappingProxyType(
    {
        "all_reduce": {
            "ring": _ring_all_reduce,
            "tree": _tree_all_reduce,
            "hierarchical": _hierarchical_all_reduce,
        },
        "all_gather": {"ring": _ring_pass, "hierarchical": _hierarchical_pass},
        "reduce_scatter": {"ring": _ring_pass, "hierarchical": _hierarchical_pass},
        "all_to_all": {"pairwise": _pairwise, "hierarchical": _hierarchical_all_to_all},
        "broadcast": {"ring": _ring_broadcast, "tree": _tree_broadcast},
        "send_recv": {"direct": _direct},
    }
)
