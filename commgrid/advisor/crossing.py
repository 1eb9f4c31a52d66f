"""Levels of a cluster that groups cross, and the links they use.

A group crosses a level when it has ranks in several of the units that make one up: tensor
parallelism over 16 ranks on nodes of 8 crosses `cluster`, and its traffic the links between nodes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from commgrid.advisor.cluster import Cluster, Hosts, Level, Span, highest, widest
from commgrid.errors import SpecError
from commgrid.planning.groups import GroupDef
from commgrid.planning.layout import RankLayout
from commgrid.planning.ranks import RankSet, RankTuple, divisors
from commgrid.planning.spec import GridSpec


@dataclass(frozen=True)
class Crossing:
    """How the groups of one name lie on a cluster; where they differ, how the worst one does.

    Args:
        name: of the groups.
        size: ranks of the worst one.
        spread: as `Cluster.spread` has it: ranks in a node, nodes in a unit of the next level, …
        levels: of the cluster, the lowest first.
        at_once: how many groups of this name share the link that a unit of the level below has
            to the others of the level it crosses, as training runs them: all at once.

    Example:
        >>> from commgrid.advisor.cluster import CLUSTERS
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
    def bandwidth(self) -> float:
        """Bytes a second that each device sends there while all do."""
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
        ranks = f"{self.spread[0]} rank{'s' * (self.spread[0] > 1)}"
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
    check_room(spec, cluster, hosts)
    units = Units(cluster, spec, hosts)
    known: dict[Hashable, Crossing] = {}
    found = {}
    for name, definition in spec.definitions.items():
        if name in spec.created_names:
            layout = spec.layouts[definition.region]
            alike = _key(definition, layout)
            if alike not in known:
                known[alike] = units.crossing(definition, layout)
            found[name] = replace(known[alike], name=name)
    return found


def check_room(spec: GridSpec, cluster: Cluster, hosts: Hosts | None) -> None:
    """Refuse ranks that a cluster has no devices for.

    Raises:
        SpecError: they do not fill nodes, or are more than the cluster has devices.
    """
    if hosts is not None:
        return
    if spec.ranks is None:
        cluster.check_world(spec.world_size)
    else:
        cluster.check_ranks(spec.grid_ranks)


class Units:
    """The unit of every level that each rank is in, looked up once."""

    def __init__(self, cluster: Cluster, spec: GridSpec, hosts: Hosts | None) -> None:
        self.levels = cluster.levels
        ranks = spec.grid_ranks
        self.unit = dict(zip(ranks, cluster.lowest_units(ranks, hosts), strict=True))

    def above(self, units: Iterable[int], level: int) -> list[int]:
        """The unit of a level that each unit of the one below is in."""
        size = self.levels[level].size
        return [0 if size is None else unit // size for unit in units]

    def held(self, ranks: Iterable[int], level: int) -> set[int]:
        """The units of a level that ranks are in."""
        found = {self.unit[rank] for rank in ranks}
        for each in range(1, level + 1):
            found = set(self.above(found, each))
        return found

    def span(self, ranks: Iterable[int]) -> Span:
        """As `Cluster.span`."""
        unit = self.unit
        return Span.of([unit[rank] for rank in ranks], self.levels)

    def most_ranks(self) -> tuple[int, ...]:
        """For each level, the most ranks that a unit has."""
        counts, found = Counter(self.unit.values()), []
        for level in range(len(self.levels)):
            found.append(max(counts.values()))
            if level + 1 < len(self.levels):
                above: Counter[int] = Counter()
                for unit, count in counts.items():
                    above[self.above([unit], level + 1)[0]] += count
                counts = above
        return tuple(found)

    def worst(self, definition: GroupDef, layout: RankLayout) -> Span:
        """The widest of the groups of a name."""
        return widest({self.span(ranks) for ranks in members_of(definition, layout)})

    def crossing(self, definition: GroupDef, layout: RankLayout) -> Crossing:
        """The worst group of a name, and how many share a link there."""
        groups = list(members_of(definition, layout))
        spreads = [self.span(ranks).spread for ranks in groups]
        spread = max(set(spreads), key=lambda each: each[::-1])
        worst = groups[spreads.index(spread)]
        made = Crossing(definition.name, len(worst), spread, self.levels, 1)
        place = made.place
        if place == 0:
            return made
        sharing: Counter[int] = Counter()
        for ranks, each in zip(groups, spreads, strict=True):
            if each[place] > 1:
                sharing.update(self.held(ranks, place - 1))
        return replace(made, at_once=max(sharing.values()))


def _key(definition: GroupDef, layout: RankLayout) -> Hashable:
    """Names with equal keys have the same ranks: axes of size 1 change nothing."""
    sizes = layout.shape
    axes = tuple(axis for axis in definition.axes if sizes[axis] > 1)
    return (definition.region, axes, definition.pick, definition.part, definition.lists)


def members_of(definition: GroupDef, layout: RankLayout) -> Iterator[Sequence[int]]:
    """The ranks of every group of a name; many times faster than `GroupDef.all_ranks`, in no order
    that is promised."""
    if not definition.is_whole:
        yield from definition.all_ranks(layout)
        return
    modes = tuple(mode for name in definition.axes for mode in layout.axis(name).modes)
    rest = (mode for a in layout.axes if a.name not in definition.axes for mode in a.modes)
    steps = tuple(RankSet(0, modes))
    listed = layout.listed
    for base in RankSet(layout.offset, tuple(rest)):
        places = [base + step for step in steps]
        yield places if listed is None else [listed[place] for place in places]


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
        >>> from commgrid.advisor.cluster import CLUSTERS
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
        below = crossing.place - 1
        fast, slow = cluster.levels[below].bandwidth, crossing.bandwidth
        if slow >= fast:  # NaN, where speeds are not known, is not
            continue
        unit = int(cluster.unit_size(below))
        inner = _inner(spec, axis)
        if inner and math.prod(inner.values()) * crossing.size > unit:
            continue  # it cannot fit beside tensor parallelism, which comes first
        what = cluster.levels[below].name
        over = (
            f"goes between {what}s"
            if math.isnan(fast)
            else f"goes over {slow / 1e9:g} GB/s instead of {fast / 1e9:g}"
        )
        spans = f"{axis} spans {_count(crossing, below)}: {traffic} {over}"
        told.append(f"{spans}; {_fix(axis, crossing.size, what, unit, inner)}")
    return told


def _count(crossing: Crossing, below: int) -> str:
    count = math.prod(crossing.spread[below + 1 :])
    return f"{count} {crossing.levels[below].name}s"


def _inner(spec: GridSpec, axis: str) -> dict[str, int]:
    """The axis that ranks which share a layer are nearest along, and its size, before this one."""
    first = {"cp": "tp", "ep": "etp"}.get(axis)
    return {} if first is None else {first: spec.shape.get(first, 1)}


def _fix(
    axis: str, size: int, what: str, unit: int, inner: Mapping[str, int] = MappingProxyType({})
) -> str:
    """How a group comes to fit a unit of so many devices, inside which `inner` varies faster."""
    before = math.prod(inner.values())
    if size * before > unit:
        most = max(n for n in divisors(unit) if size % n == 0)
        return f"a {what} has {unit} devices, so that {axis}={most} stays within one"
    if unit % (size * before):
        known = "".join(f"{name}={n} · " for name, n in inner.items() if n > 1)
        near = [n for n in divisors(unit // before) if unit % (n * before) == 0]
        fits = [n for n in near if n < size][-1:] + [n for n in near if n > size][:1]
        instead = f"; {axis}={' or '.join(map(str, fits))} does" if fits else ""
        return f"{known}{axis}={size} does not divide a {what}'s {unit} devices{instead}"
    return f"{size} ranks fit a {what} of {unit} devices: put {axis} earlier in order"


# -- what must not cross ----------------------------------------------------------------


def check_within(spec: GridSpec, cluster: Cluster) -> None:
    """Refuse a spec with a group that leaves the unit given by `within`.

    Args:
        spec: a resolved one; rank r runs on device r.
        cluster: its devices.

    Raises:
        SpecError: a group does, or the cluster has no such level.
    """
    units = Units(cluster, spec, None) if spec.constraints else None
    for name, level in spec.constraints.items():
        assert units is not None
        try:
            place = cluster.find_level(level)
        except SpecError as error:
            raise SpecError(f"within.{name}={level!r}: {error}") from error
        definition = spec.definitions[name]
        for ranks in members_of(definition, spec.layouts[definition.region]):
            held = units.held(ranks, place)
            if len(held) > 1:
                unit = int(cluster.unit_size(place))
                raise SpecError(
                    f"within.{name}={level!r}: {RankTuple(ranks).describe()}, a group of {name}, "
                    f"lie on {len(held)} {level}s of {unit} devices; "
                    f"{_fix(name, len(ranks), level, unit)}"
                )
