"""How the groups of a choice lie on a cluster's levels, in closed form."""

from __future__ import annotations

import math
from functools import lru_cache

from commgrid.planning.choice import ORDERS, Choice
from commgrid.planning.cluster import Cluster

Spread = tuple[int, ...]


def spread_of(cluster: Cluster, axes: tuple[tuple[int, int], ...], world: int) -> Spread:
    """`Cluster.spread` of the groups made of axes, of the one that crosses most.

    Args:
        axes: size and stride of each.
        world: ranks there are.

    >>> from commgrid.planning.cluster import CLUSTERS
    >>> spread_of(CLUSTERS["h100"], ((4, 8), (2, 1)), 32)
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
                return _counted(cluster, axes, world)
        found.append(int(held) // inside)
        inside = int(held)
    return tuple(found)


@lru_cache(maxsize=50_000)
def _counted(cluster: Cluster, axes: tuple[tuple[int, int], ...], world: int) -> Spread:
    """Of sizes that do not fill units: the group that crosses most, since all wait for it.

    Of tp 6 on nodes of 8 ranks 0 to 5 share a node, and 6 to 11 do not.
    """
    offsets = [0]
    for size, stride in axes:
        offsets = [rank + place * stride for rank in offsets for place in range(size)]
    starts = (
        start
        for start in range(min(world, _STARTS))
        if all(start // stride % size == 0 for size, stride in axes)
    )
    found = [cluster.spread([start + offset for offset in offsets]) for start in starts]
    return max(found, key=lambda spread: spread[::-1])


_STARTS = 144
"""Ranks that may start a group, among which the worst is looked for: two of the largest units."""


def groups(choice: Choice, cluster: Cluster) -> dict[str, Spread]:
    """The spread of each group that a step communicates on, by its name."""
    first = choice.order == ORDERS[0]
    tp, cp, pp, dp = choice.tp, choice.cp, choice.pp, choice.dp
    dp_stride, pp_stride = (tp * cp, tp * cp * dp) if first else (tp * cp * pp, tp * cp)
    world = choice.world_size

    def of(*axes: tuple[int, int]) -> Spread:
        return spread_of(cluster, axes, world)

    found = {
        "tp": of((tp, 1)),
        "cp": of((cp, tp)),
        "pp": of((pp, pp_stride)),
        "dp_cp": of((dp, dp_stride), (cp, tp)),
    }
    if choice.ep > 1 or choice.etp is not None:
        etp, ep = choice.expert_tp, choice.ep
        found["etp"] = of((etp, 1))
        found["ep"] = of((ep, etp))
        found["edp"] = of((choice.edp, etp * ep if first else etp * ep * pp))
    return found
