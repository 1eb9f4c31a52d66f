"""Where a grid's ranks lie on a cluster: which levels each group spans, and what a unit holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from commgrid.advisor.cluster import Cluster, Hosts
from commgrid.advisor.config import ORDERS, ParallelConfig
from commgrid.advisor.crossing import Units, check_room
from commgrid.planning.ranks import Mode, RankSet
from commgrid.planning.spec import GridSpec

Spread = tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """A grid on a cluster.

    Args:
        spreads: `Cluster.spread` of each group that a step communicates on, by name, of the one
            that crosses most.
        held: for each level, the most of the grid's ranks that a unit has.
    """

    spreads: Mapping[str, Spread]
    held: tuple[int, ...]


def spread_of(cluster: Cluster, axes: tuple[tuple[int, int], ...], world: int) -> Spread:
    """`Cluster.spread` of the groups along axes; the group that crosses most counts.

    Args:
        axes: size and stride of each.
        world: ranks there are.

    >>> from commgrid.advisor.cluster import CLUSTERS
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

    Of tp 6 on nodes of 8 ranks 0 to 5 share a node, and 6 to 11 do not. Groups whose first ranks
    are a multiple of the largest unit apart lie alike.
    """
    largest = max(
        (int(size) for level in range(len(cluster.levels))
         if math.isfinite(size := cluster.unit_size(level))),
        default=1,
    )  # fmt: skip
    offsets = RankSet(0, tuple(Mode(*axis) for axis in axes))[:]
    starts: dict[int, int] = {}
    for start in RankSet(0, tuple(_between(axes, world))):
        starts.setdefault(start % largest, start)
        if len(starts) == largest:
            break
    found = [cluster.spread([start + offset for offset in offsets]) for start in starts.values()]
    return max(found, key=lambda spread: spread[::-1])


def _between(axes: tuple[tuple[int, int], ...], world: int) -> Iterator[Mode]:
    """Modes of the groups' first ranks, which the axes leave."""
    stride = 1
    for size, at in sorted(axes, key=lambda axis: axis[1]):
        yield Mode(at // stride, stride)
        stride = size * at
    yield Mode(max(world // stride, 1), stride)


def of_spec(spec: GridSpec, cluster: Cluster, hosts: Hosts | None = None) -> Placement:
    """The placement of a grid.

    Args:
        spec: a resolved one, in any order and over any ranks.
        cluster: what its ranks run on.
        hosts: by rank, the number of the node it runs on; None: rank // nodes' size.

    Raises:
        SpecError: the ranks do not fill nodes, or are more than the cluster has devices.
    """
    check_room(spec, cluster, hosts)
    units = None if spec.ranks is None and hosts is None else Units(cluster, spec, hosts)
    data = [axis for axis in spec.regions[0].axes if axis.startswith("dp")]
    found: dict[str, Spread] = {}
    for region, names in (
        ("dense", {"tp": ["tp"], "cp": ["cp"], "pp": ["pp"], "dp_cp": [*data, "cp"],
                   "dp_shard_cp": ["dp_shard", "cp"], "dp_replicate": ["dp_replicate"]}),
        ("expert", {"etp": ["etp"], "ep": ["ep"], "edp": ["edp"]}),
    ):  # fmt: skip
        layout = spec.layouts.get(region)
        for name, along in names.items() if layout is not None else ():
            assert layout is not None
            axes = [axis for axis in along if axis in layout.shape]
            if units is None:
                modes = (mode for axis in axes for mode in layout.axis(axis).modes)
                found[name] = spread_of(cluster, tuple(modes), spec.world_size)
            else:
                found[name] = units.worst_spread(layout, axes)
    held = _held(cluster, spec.world_size) if units is None else units.most_ranks()
    return Placement(found, held)


def _held(cluster: Cluster, world_size: int) -> tuple[int, ...]:
    """Of ranks that fill one unit after another."""
    return tuple(
        int(min(cluster.unit_size(level), world_size)) for level in range(len(cluster.levels))
    )


def of_choice(choice: ParallelConfig, cluster: Cluster) -> Placement:
    """The placement of a grid whose ranks are numbered as its order says, one of `ORDERS`."""
    assert choice.order in ORDERS, choice.order
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
    return Placement(found, _held(cluster, world))
