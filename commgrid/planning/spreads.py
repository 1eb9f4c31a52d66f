"""How the groups of a choice lie on a cluster's levels, in closed form."""

from __future__ import annotations

import math

from commgrid.planning.choice import ORDERS, Choice
from commgrid.planning.cluster import Cluster

Spread = tuple[int, ...]


def spread_of(cluster: Cluster, axes: tuple[tuple[int, int], ...]) -> Spread:
    """`Cluster.spread` of a group made of axes.

    Args:
        axes: size and stride of each.

    >>> from commgrid.planning.cluster import CLUSTERS
    >>> spread_of(CLUSTERS["h100"], ((4, 8), (2, 1)))
    (2, 4)
    """
    axes = tuple((size, stride) for size, stride in axes if size > 1)
    found, inside = [], 1
    for level in range(len(cluster.levels)):
        unit = cluster.unit_size(level)
        held = 1.0
        for size, stride in axes:
            span = size * stride
            if math.isinf(unit) or unit % span == 0:
                held *= size
            elif unit % stride == 0 and span % unit == 0:
                held *= unit // stride
            elif stride % unit:
                return _counted(cluster, axes)
        found.append(int(held) // inside)
        inside = int(held)
    return tuple(found)


def _counted(cluster: Cluster, axes: tuple[tuple[int, int], ...]) -> Spread:
    ranks = [0]
    for size, stride in axes:
        ranks = [rank + place * stride for rank in ranks for place in range(size)]
    return cluster.spread(ranks)


def groups(choice: Choice, cluster: Cluster) -> dict[str, Spread]:
    """The spread of each group that a step communicates on, by its name."""
    first = choice.order == ORDERS[0]
    tp, cp, pp, dp = choice.tp, choice.cp, choice.pp, choice.dp
    dp_stride, pp_stride = (tp * cp, tp * cp * dp) if first else (tp * cp * pp, tp * cp)
    found = {
        "tp": spread_of(cluster, ((tp, 1),)),
        "cp": spread_of(cluster, ((cp, tp),)),
        "pp": spread_of(cluster, ((pp, pp_stride),)),
        "dp_cp": spread_of(cluster, ((dp, dp_stride), (cp, tp))),
    }
    if choice.ep > 1 or choice.etp is not None:
        etp, ep = choice.expert_tp, choice.ep
        found["etp"] = spread_of(cluster, ((etp, 1),))
        found["ep"] = spread_of(cluster, ((ep, etp),))
        found["edp"] = spread_of(cluster, ((choice.edp, etp * ep if first else etp * ep * pp),))
    return found
