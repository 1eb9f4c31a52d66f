"""Levels of a cluster that groups cross, and the links they use.

A group crosses a level when it has ranks in several of the units that make one up: tensor
parallelism over 16 ranks on nodes of 8 crosses `cluster`, and its traffic the links between nodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from commgrid.cost_model.cluster import Cluster, Hosts, Level
from commgrid.cost_model.collective_form import highest
from commgrid.cost_model.placement import RankPlaces
from commgrid.errors import SpecError
from commgrid.layout.rank_text import describe_ranks
from commgrid.layout.ranks import RankTuple, divisors
from commgrid.planning.spec import GridSpec


@dataclass(frozen=True)
class Crossing:
    """How the groups of one name lie on a cluster; where they differ, how the worst one does.

    Args:
        name: of the groups.
        size: ranks of the largest one.
        spread: as `Cluster.spread` has it: ranks in a node, nodes in a unit of the next level, …
        levels: of the cluster, the lowest first.
        at_once: groups that use one node's (or rack's) link to the others at the same time, as
            training runs them.

    Example:
        >>> from commgrid.cost_model.cluster import CLUSTERS
        >>> spec = GridSpec.build(tp=8).resolve(256)
        >>> dp = find_crossings(spec, CLUSTERS["h100"])["dp"]
        >>> dp.spread, dp.level.name, dp.describe()
        ((1, 32), 'cluster', "1 rank of each of 32 nodes; 8 groups at once on a node's link")
    """

    name: str
    size: int
    spread: tuple[int, ...]
    levels: tuple[Level, ...]
    at_once: int

    @property
    def place(self) -> int:
        """The place of the highest level that it crosses; 0 also for a group of one rank."""
        return highest(self.spread)

    @property
    def level(self) -> Level:
        """The highest level that it crosses, whose links are the slowest of those it uses."""
        return self.levels[self.place]

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second that each device sends there while all do; None: not known."""
        return self.level.bandwidth

    def describe(self) -> str:
        """Where its ranks are, and who shares the links that it crosses, in words."""
        if self.place == 0:
            return f"within a {self.levels[0].name}"
        each = [
            f" of each of {count} {below.name}s"
            for count, below in zip(self.spread[1:], self.levels, strict=False)
            if count > 1
        ]
        most = "up to " * (math.prod(self.spread) != self.size)
        ranks = f"{most}{self.spread[0]} rank{'s' * (self.spread[0] > 1)}"
        groups = f"{self.at_once} group{'s' * (self.at_once > 1)}"
        unit = self.levels[self.place - 1].name
        return f"{ranks}{''.join(each)}; {groups} at once on a {unit}'s link"


def find_crossings(
    spec: GridSpec, cluster: Cluster, hosts: Hosts | None = None
) -> dict[str, Crossing]:
    """Find the levels that each created name crosses, in creation order.

    Args:
        spec: a resolved one.
        cluster: what its ranks run on.
        hosts: by rank, the number of the node it runs on; None: rank // nodes' size.

    Raises:
        SpecError: the ranks do not fill nodes, or are more than the cluster has devices.
    """
    places = RankPlaces(spec, cluster, hosts)
    found = {}
    for name, group in spec.definitions.items():
        if name in spec.created_names:
            span, size = places.span(group), group.size(dict(spec.layouts[group.region].shape))
            at_once = places.load(group).groups
            found[name] = Crossing(name, size, span.spread, cluster.levels, at_once)
    return found


# -- what of it is slow -----------------------------------------------------------------

_TRAFFIC = {
    "tp": "each layer's all-reduce",
    "etp": "each expert layer's all-reduce",
    "cp": "each layer's exchange of keys and values",
    "ep": "each expert layer's all-to-all",
}
"""Axes that every layer waits for, and what it waits for."""


def warnings(spec: GridSpec, cluster: Cluster, found: Mapping[str, Crossing]) -> list[str]:
    """Describe slow groups of a placement, each with its fix.

    Tensor parallelism over links slower than a node's is always told; context and expert
    parallelism where the ranks that share a layer would fit where links are faster.

    Args:
        spec: a resolved one.
        cluster: where its ranks run.
        found: what `find_crossings` says of them.

    Example:
        >>> from commgrid.cost_model.cluster import CLUSTERS
        >>> spec, h100 = GridSpec.build(tp=16).resolve(32), CLUSTERS["h100"]
        >>> for told in warnings(spec, h100, find_crossings(spec, h100)):
        ...     print(told)
        tp spans 2 nodes: each layer's all-reduce goes over 50 GB/s instead of 450; a node has 8 \
devices, so that tp=8 stays within one
    """
    told = []
    for axis, traffic in _TRAFFIC.items():
        crossing = found.get(axis)
        if crossing is None or crossing.place == 0:
            continue
        # The largest units below with the fastest links are where it should be.
        speeds = [level.bandwidth or 0.0 for level in cluster.levels[: crossing.place]]
        at = max(range(len(speeds)), key=lambda place: (speeds[place], place))
        fast, slow = speeds[at], crossing.bandwidth
        if slow is not None and slow >= fast:
            continue
        unit, inner = int(cluster.unit_size(at)), _inner(spec, axis)
        if inner and math.prod(inner.values()) * crossing.size > unit:
            continue  # it cannot fit beside tensor parallelism, which comes first
        what = cluster.levels[at].name
        over = (
            f"goes between {what}s"
            if slow is None
            else f"goes over {slow / 1e9:g} GB/s instead of {fast / 1e9:g}"
        )
        count = math.prod(crossing.spread[at + 1 :])
        fix = _fix(spec, (axis,), crossing.size, what, unit, inner)
        told.append(f"{axis} spans {count} {what}s: {traffic} {over}; {fix}")
    return told


def _inner(spec: GridSpec, axis: str) -> dict[str, int]:
    """The axis that should vary faster than this one, and its size."""
    first = {"cp": "tp", "ep": "etp"}.get(axis)
    return {} if first is None else {first: spec.shape.get(first, 1)}


def _fix(
    spec: GridSpec,
    axes: tuple[str, ...],
    size: int,
    what: str,
    unit: int,
    inner: Mapping[str, int],
) -> str:
    """How a group along axes comes to fit a unit of so many devices, inside which `inner` varies
    faster."""
    if len(axes) != 1:
        return f"a {what} has {unit} devices: give {' and '.join(axes) or 'it'} fewer ranks"
    (axis,), before = axes, math.prod(inner.values())
    known = "".join(f"{name}={n} · " for name, n in inner.items() if n > 1)
    if size * before > unit:
        fits = [n for n in divisors(unit) if unit % (n * before) == 0 and n > 1]
        best = max((n for n in fits if size % n == 0), default=max(fits, default=0))
        if not best:
            return f"put {axis} earlier in order"
        return f"a {what} has {unit} devices, so that {known}{axis}={best} stays within one"
    if unit % (size * before):
        near = [n for n in divisors(unit // before) if unit % (n * before) == 0]
        fits = [n for n in near if n < size][-1:] + [n for n in near if n > size][:1]
        instead = f"; {axis}={' or '.join(map(str, fits))} does" if fits else ""
        return f"{known}{axis}={size} does not divide a {what}'s {unit} devices{instead}"
    fits_one = f"{size} ranks fit a {what} of {unit} devices"
    if spec.ranks is not None:
        return f"{fits_one}: list ranks that begin where one does"
    return f"{fits_one}: put {axis} earlier in order"


# -- what must not cross ----------------------------------------------------------------


def check_within(spec: GridSpec, cluster: Cluster) -> None:
    """Refuse a spec with a group that leaves the unit given by `within`.

    Args:
        spec: a resolved one; rank r runs on device r.
        cluster: its devices.

    Raises:
        SpecError: a group does, or the cluster has no such level.
    """
    places = RankPlaces(spec, cluster) if spec.constraints else None
    for name, level in spec.constraints.items():
        assert places is not None
        try:
            place = cluster.fabric(cluster.find_level(level))
        except SpecError as error:
            raise SpecError(f"within.{name}={level!r}: {error}") from error
        leaving = places.leaving(spec.definitions[name], place)
        if leaving is not None:
            ranks, units = leaving
            unit, group = int(cluster.unit_size(place)), spec.definitions[name]
            layout = spec.layouts[group.region]
            axes = list(layout.shape)
            faster = axes[: axes.index(group.axes[0])] if len(group.axes) == 1 else []
            inner = {axis: layout.shape[axis] for axis in faster}
            what = cluster.levels[place].name
            fix = _fix(spec, group.axes, len(ranks), what, unit, inner)
            raise SpecError(
                f"within.{name}={level!r}: {describe_ranks(RankTuple(ranks))}, a group of {name}, "
                f"lie on {units} {what}s of {unit} devices; {fix}"
            )
