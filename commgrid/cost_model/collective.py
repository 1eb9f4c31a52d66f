"""The time of collectives on a cluster: on one level by their forms, over several by the cheapest.

`Cluster.span` gives the ranks of a group by level: (8, 4) are 8 ranks in each of 4 nodes. Beside
the forms of `collective_form.py` over all levels at once, there is `hierarchical`: one level after
the other, of an all-reduce reduce-scatter inside, all-reduce across, all-gather inside.
"""

from __future__ import annotations

import math

from commgrid.cost_model.cluster import Cluster
from commgrid.cost_model.collective_form import KINDS, Link, Spread, highest
from commgrid.errors import SpecError
from commgrid.layout.axis_names import check_word, nearest

COLLECTIVES = tuple(KINDS)
"""Collectives with a cost; `collective_form.KINDS` says how their sizes are counted."""


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
            measured (`fit_cluster.py`), its fit counts, level by level.

    Raises:
        SpecError: an unknown collective, an algorithm that it does not have, a negative size, or a
            spread that does not fit the cluster.

    Example:
        >>> from commgrid.cost_model.cluster import CLUSTERS
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
    if algorithm is None and not cluster.fits:
        spread = as_fabrics(spread, cluster)
    crossed = [place for place, n in enumerate(spread) if n > 1]
    if not crossed:
        return 0.0
    if algorithm == HIERARCHICAL:
        return _hierarchical(collective, size, spread, cluster)
    kind = KINDS[collective]
    links = [
        level.link if n > 1 else Link(0.0, math.inf)  # of levels that it does not cross any
        for n, level in zip(spread, cluster.levels, strict=True)
    ]
    if algorithm is not None:
        return kind.forms[algorithm](size, spread, links)
    if collective == "send_recv":
        return _on_level(collective, size, spread[crossed[-1]], crossed[-1], cluster)
    cheapest = math.inf
    if kind.by_level or len(crossed) == 1:
        cheapest = _hierarchical(collective, size, spread, cluster)
        parts = ("all_reduce", "reduce_scatter", "all_gather")
        used = parts if collective == "all_reduce" and len(crossed) > 1 else (collective,)
        names = [cluster.levels[place].name for place in crossed]
        if any(fit.collective in used and fit.level in names for fit in cluster.fits):
            return cheapest
    return min(cheapest, *(form(size, spread, links) for form in kind.forms.values()))


def as_fabrics(spread: Spread, cluster: Cluster) -> tuple[int, ...]:
    """A spread in which the levels of one fabric are one.

    >>> from commgrid.cost_model.cluster import CLUSTERS
    >>> as_fabrics((4, 8, 2), CLUSTERS["gb200"])
    (32, 1, 2)
    """
    found = [1] * len(spread)
    for place, count in enumerate(spread):
        lowest = next(low for low in range(place + 1) if cluster.fabric(low) >= place)
        found[lowest] *= count
    return tuple(found)


HIERARCHICAL = "hierarchical"


def algorithms(collective: str) -> tuple[str, ...]:
    """The forms that a collective has.

    >>> algorithms("all_reduce")
    ('ring', 'tree', 'hierarchical')
    """
    kind = KINDS[_known(collective)]
    return (*kind.forms, HIERARCHICAL) if kind.by_level else tuple(kind.forms)


def bus_factor(collective: str, ranks: int) -> float:
    """The factor on size / time that gives nccl-tests' bus bandwidth, the speed of the links
    for any number of ranks.

    >>> bus_factor("all_reduce", 8), bus_factor("all_gather", 8), bus_factor("broadcast", 8)
    (1.75, 0.875, 1.0)
    """
    passes = KINDS[_known(collective)].passes
    return passes * (ranks - 1) / ranks if passes and ranks > 1 else 1.0


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


def _known(collective: str) -> str:
    check_word("collective ", collective, COLLECTIVES)
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
        if KINDS[collective].shrinks:
            part /= n
    return total


def _on_level(collective: str, size: float, ranks: int, place: int, cluster: Cluster) -> float:
    """A group on one level alone."""
    level = cluster.levels[place]
    for fit in cluster.fits:
        if fit.collective == collective and fit.level == level.name:
            return fit.seconds(size, ranks)
    return min(form(size, (ranks,), (level.link,)) for form in KINDS[collective].forms.values())
