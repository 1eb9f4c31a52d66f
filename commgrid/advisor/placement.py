"""Where a grid's ranks lie on a cluster: which levels each group spans, and what a unit holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from commgrid.advisor.cluster import Cluster, Hosts, Span, widest
from commgrid.advisor.config import ORDERS, ParallelConfig
from commgrid.advisor.crossing import Units, check_room
from commgrid.planning.groups import GroupDef
from commgrid.planning.ranks import Mode, RankSet
from commgrid.planning.spec import GridSpec

Spread = tuple[int, ...]
Axes = tuple[tuple[int, int], ...]
"""Size and stride of each axis that a group runs along."""


@dataclass(frozen=True)
class Placement:
    """A grid on a cluster.

    Args:
        spans: of each group that a step communicates on, by name.
        held: for each level, the most of the grid's ranks that a unit has.
    """

    spans: Mapping[str, Span]
    held: tuple[int, ...]

    @property
    def spreads(self) -> dict[str, Spread]:
        """`Cluster.spread` by name, of the group that crosses most."""
        return {name: span.spread for name, span in self.spans.items()}

    def timed(self, name: str) -> Spread:
        """The spread that a group's collectives take as long as: that of its narrowest units.

        Experts that are split as all else is have the groups of the dense layers.
        """
        span = self.spans.get(name) or self.spans.get(_INSTEAD.get(name, ""))
        return () if span is None else span.narrow


_INSTEAD = {"etp": "tp", "edp": "dp_cp", "edp_shard": "dp_shard_cp"}


def spread_of(cluster: Cluster, axes: Axes, world: int) -> Spread:
    """`Cluster.spread` of the groups along axes; the group that crosses most counts.

    Args:
        axes: size and stride of each.
        world: ranks there are.

    >>> from commgrid.advisor.cluster import CLUSTERS
    >>> spread_of(CLUSTERS["h100"], ((4, 8), (2, 1)), 32)
    (2, 4)
    """
    return span_of(cluster, axes, world).spread


def span_of(cluster: Cluster, axes: Axes, world: int) -> Span:
    """How the groups along axes lie; arguments as of `spread_of`."""
    axes = tuple((size, stride) for size, stride in axes if size > 1)
    found, inside = [], 1
    for level in range(len(cluster.levels)):
        unit = cluster.unit_size(level)
        held = 1.0
        for size, stride in axes:
            reach = size * stride
            if math.isinf(unit) or unit % reach == 0:
                held *= size
            elif unit % stride == 0 and reach % unit == 0:
                held *= unit // stride
            elif stride % unit:
                return _counted(cluster, axes, world)
        found.append(int(held) // inside)
        inside = int(held)
    return Span(tuple(found), tuple(found))


@lru_cache(maxsize=50_000)
def _counted(cluster: Cluster, axes: Axes, world: int) -> Span:
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
    return widest(
        {cluster.span([start + offset for offset in offsets]) for start in starts.values()}
    )


def _between(axes: Axes, world: int) -> Iterator[Mode]:
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
    data = tuple(axis for axis in spec.regions[0].axes if axis.startswith("dp"))
    groups = [GroupDef(axis, "dense", (axis,)) for axis in ("tp", "cp", "pp", "dp_replicate")]
    groups += [GroupDef(axis, "expert", (axis,)) for axis in ("etp", "ep", "edp")]
    groups += [
        GroupDef("dp_cp", "dense", (*data, "cp")),
        GroupDef("dp_shard_cp", "dense", ("dp_shard", "cp")),
    ]
    shape = spec.shape
    if "edp" in shape and shape.get("dp_replicate", 1) > 1:
        # Shards of experts: of edp the ranks that are not copies, which an inner axis puts first.
        inner = data.index("dp_shard") < data.index("dp_replicate")
        part = (shape["edp"] // shape["dp_replicate"], 1) if inner else None
        groups.append(GroupDef("edp_shard", "expert", ("edp",), part=part))
    found: dict[str, Span] = {}
    for group in groups:
        layout = spec.layouts.get(group.region)
        if layout is None:
            continue
        axes = tuple(axis for axis in group.axes if axis in layout.shape)
        definition = replace(group, axes=axes)
        if units is not None or group.part is not None:
            units = units or Units(cluster, spec, hosts)
            found[group.name] = units.worst(definition, layout)
        else:
            modes = tuple(mode for axis in axes for mode in layout.axis(axis).modes)
            found[group.name] = span_of(cluster, modes, spec.world_size)
    held = _held(cluster, spec.world_size) if units is None else units.most_ranks()
    return Placement(found, held)


def _held(cluster: Cluster, world_size: int) -> tuple[int, ...]:
    """Of ranks that fill one unit after another."""
    return tuple(
        int(min(cluster.unit_size(level), world_size)) for level in range(len(cluster.levels))
    )


def of_config(config: ParallelConfig, cluster: Cluster) -> Placement:
    """The placement of a grid whose ranks are numbered as its order says, one of `ORDERS`."""
    assert config.order in ORDERS, config.order
    first = config.order == ORDERS[0]
    tp, cp, pp, dp = config.tp, config.cp, config.pp, config.dp
    dp_stride, pp_stride = (tp * cp, tp * cp * dp) if first else (tp * cp * pp, tp * cp)
    axes: dict[str, Axes] = {
        "tp": ((tp, 1),),
        "cp": ((cp, tp),),
        "pp": ((pp, pp_stride),),
        "dp_cp": ((dp, dp_stride), (cp, tp)),
    }
    if config.ep > 1 or config.etp is not None:
        etp, ep = config.expert_tp, config.ep
        axes["etp"] = ((etp, 1),)
        axes["ep"] = ((ep, etp),)
        axes["edp"] = ((config.edp, etp * ep if first else etp * ep * pp),)
    world = config.world_size
    spans = {name: span_of(cluster, along, world) for name, along in axes.items()}
    return Placement(spans, _held(cluster, world))
