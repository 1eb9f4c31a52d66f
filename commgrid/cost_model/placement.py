"""Where a grid's ranks lie on a cluster: the levels that each group spans, and shared links."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from typing import NamedTuple

from commgrid.cost_model.cluster import Cluster, Hosts
from commgrid.cost_model.collective_form import Span, widest
from commgrid.cost_model.config import expert_axes
from commgrid.errors import SpecError
from commgrid.layout.rank_layout import RankLayout
from commgrid.layout.ranks import Mode, RankSet
from commgrid.planning.group import GroupDef
from commgrid.planning.spec import GridSpec

Spread = tuple[int, ...]
Axes = tuple[tuple[int, int], ...]
"""Size and stride of each axis that a group runs along."""


class Load(NamedTuple):
    """Load on the link that leaves the most loaded unit.

    Units are of the level just below the highest that the groups of a name cross.

    Args:
        groups: that use the link at once; 1 where none crosses a level.
        outward: summed over the unit's ranks, the share of a rank's group that is outside the unit:
            what an all-to-all sends out for each byte of a rank.
    """

    groups: int
    outward: float


@dataclass(frozen=True)
class GridPlacement:
    """A grid on a cluster.

    Args:
        spans: of each group that a step communicates on, by name.
        load_of: the load of the groups of a name, which may have to be counted.
    """

    spans: Mapping[str, Span]
    load_of: Callable[[str], Load] = field(compare=False, repr=False)

    @property
    def spreads(self) -> dict[str, Spread]:
        """`Cluster.spread` by name, of the group that crosses most."""
        return {name: span.spread for name, span in self.spans.items()}

    def timed(self, name: str) -> Spread:
        """The spread that a group's collectives are timed with: where units hold fewest of it.

        Experts that are split as all else is have the groups of the dense layers.
        """
        span = self.spans.get(self._placed(name))
        return () if span is None else span.narrow

    def place(self, name: str) -> int:
        """The place of the highest level that the groups of a name cross."""
        return self.spans[self._placed(name)].place

    def load(self, name: str) -> Load:
        """The load of the groups of a name."""
        return self.load_of(self._placed(name))

    def _placed(self, name: str) -> str:
        return name if name in self.spans else _INSTEAD.get(name, name)


_INSTEAD = {"etp": "tp", "edp": "dp_cp", "edp_shard": "dp_shard_cp"}


def _even_load(span: Span, cluster: Cluster, world: int) -> Load:
    """Of groups that lie alike."""
    if span.place == 0:
        return Load(1, 0.0)
    inside, ranks = math.prod(span.spread[: span.place]), math.prod(span.spread)
    groups = int(min(cluster.unit_size(span.place - 1), world)) // inside
    return Load(groups, groups * inside * (ranks - inside) / ranks)


def _load(groups: Iterable[Sequence[int]], place: int, unit: Callable[[int], int]) -> Load:
    """Count the groups that leave each unit of the level below a place."""
    if place == 0:
        return Load(1, 0.0)
    leaving: Counter[int] = Counter()
    outward: defaultdict[int, float] = defaultdict(float)
    for ranks in groups:
        inside = Counter(map(unit, ranks))
        if len(inside) > 1:
            leaving.update(inside.keys())
            for at, count in inside.items():
                outward[at] += count * (len(ranks) - count) / len(ranks)
    return Load(max(leaving.values()), max(outward.values()))


def _closed(cluster: Cluster, axes: Axes) -> Span | None:
    """Of sizes that fill units or are filled by them, so that all groups lie alike; else None."""
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
                return None
        found.append(int(held) // inside)
        inside = int(held)
    return Span(tuple(found), tuple(found))


@lru_cache(maxsize=50_000)
def _counted(cluster: Cluster, axes: Axes, world: int) -> Span:
    """Of sizes that do not fill units: the group that crosses most, since all wait for it.

    Of tp 6 on nodes of 8 ranks 0 to 5 share a node, and 6 to 11 do not. Groups whose first ranks
    are a multiple of the largest unit apart lie alike.
    """
    if math.prod(size for size, _ in axes) > MOST_COUNTED:
        check_counted(world)
    largest = max(
        (int(size) for level in range(len(cluster.levels))
         if math.isfinite(size := cluster.unit_size(level))),
        default=1,
    )  # fmt: skip
    starts: dict[int, int] = {}
    for start in RankSet(0, tuple(_between(axes, world))):
        starts.setdefault(start % largest, start)
        if len(starts) == largest:
            break
    offsets = RankSet(0, tuple(Mode(*axis) for axis in axes))[:]
    return widest(
        {cluster.span([start + offset for offset in offsets]) for start in starts.values()}
    )


def _between(axes: Axes, world: int) -> Iterator[Mode]:
    """The modes that axes leave of so many ranks."""
    stride = 1
    for size, at in sorted(axes, key=lambda axis: axis[1]):
        yield Mode(at // stride, stride)
        stride = size * at
    yield Mode(max(world // stride, 1), stride)


class RankPlaces:
    """Where the ranks of a grid are.

    In closed form where ranks are numbered as devices and a group has all ranks along its axes,
    else by counting, rank by rank.

    Args:
        spec: a resolved one, in any order and over any ranks.
        cluster: what its ranks run on.
        hosts: by rank, the number of the node it runs on; None: rank // nodes' size.

    Raises:
        SpecError: the ranks do not fill nodes, or are more than the cluster has devices.
    """

    def __init__(self, spec: GridSpec, cluster: Cluster, hosts: Hosts | None = None) -> None:
        if hosts is None:
            cluster.check_placed(spec)
        self.spec, self.cluster, self.hosts = spec, cluster, hosts
        self._is_numbered = hosts is None and spec.ranks is None
        self._known: dict[Hashable, tuple[Span, Load]] = {}
        self._units = cache(self._looked_up)

    def span(self, group: GroupDef) -> Span:
        """The span of a name's groups: the widest."""
        modes = self._modes(group)
        if modes is None:
            return self._counted(group)[0]
        return _closed(self.cluster, modes) or _counted(self.cluster, modes, self.spec.world_size)

    def load(self, group: GroupDef) -> Load:
        """The load of the groups of a name."""
        modes = self._modes(group)
        if modes is None:
            return self._counted(group)[1]
        span = _closed(self.cluster, modes)
        if span is not None:
            return _even_load(span, self.cluster, self.spec.world_size)
        check_counted(self.spec.world_size)
        place = self.span(group).place
        groups = members_of(group, self.spec.layouts[group.region])
        return _load(groups, place, partial(self.cluster.unit, place - 1))

    def _modes(self, group: GroupDef) -> Axes | None:
        """The axes above 1 of a group of numbered ranks; None: its ranks have to be counted."""
        if not self._is_numbered or group.pick is not None or group.lists is not None:
            return None
        layout = self.spec.layouts[group.region]
        modes: Axes | None = tuple(m for axis in group.axes for m in layout.axis(axis).modes)
        if modes and group.part is not None:
            modes = _within(modes, *group.part)
        return modes and tuple(mode for mode in modes if mode[0] > 1)

    def leaving(self, group: GroupDef, level: int) -> tuple[Sequence[int], int] | None:
        """The first group that is in several units of a level: its ranks, and how many units; None
        if no group is."""
        if self.span(group).place <= level:
            return None
        unit = self._units(level).__getitem__ if self._modes(group) is None else None
        for ranks in members_of(group, self.spec.layouts[group.region]):
            units = {unit(rank) if unit else self.cluster.unit(level, rank) for rank in ranks}
            if len(units) > 1:
                return ranks, len(units)
        raise AssertionError("a group that crosses a level has ranks in two of its units")

    def _counted(self, group: GroupDef) -> tuple[Span, Load]:
        layout = self.spec.layouts[group.region]
        # Names with equal keys have the same ranks, since axes of size 1 change nothing.
        axes = tuple(axis for axis in group.axes if layout.shape[axis] > 1)
        key = (group.region, axes, group.pick, group.part, group.lists)
        if key not in self._known:
            self._known[key] = self._count(replace(group, axes=axes), layout)
        return self._known[key]

    def _count(self, group: GroupDef, layout: RankLayout) -> tuple[Span, Load]:
        unit = self._units(0)
        groups = list(members_of(group, layout))
        sizes = [level.size for level in self.cluster.levels]
        spans = {Span.of([unit[rank] for rank in ranks], sizes) for ranks in groups}
        span = widest(spans)
        below = self._units(max(span.place - 1, 0))
        return span, _load(groups, span.place, below.__getitem__)

    def _looked_up(self, level: int) -> dict[int, int]:
        """The unit of a level that each rank is in.

        Raises:
            SpecError: there are too many ranks to look up.
        """
        ranks = self.spec.grid_ranks
        check_counted(len(ranks))
        if level == 0:
            return dict(zip(ranks, self.cluster.lowest_units(ranks, self.hosts), strict=True))
        size = self.cluster.levels[level].size
        below = self._units(level - 1)
        return {rank: 0 if size is None else unit // size for rank, unit in below.items()}


MOST_COUNTED = 200_000
"""The most ranks to look up one by one, for each name; so many take about 6 s."""


def check_counted(ranks: int) -> None:
    """Refuse to look up too many ranks one by one.

    Raises:
        SpecError: they are more than `MOST_COUNTED`.
    """
    if ranks > MOST_COUNTED:
        raise SpecError(
            f"world_size={ranks}: more than {MOST_COUNTED:,} ranks are not counted one by one, as "
            "listed ranks, picks and groups that do not fill nodes need; leave the cluster out"
        )


def _within(modes: Axes, extent: int, stride: int) -> Axes | None:
    """The axes of the first `extent` positions of a group; None if they are no axes.

    >>> _within(((2, 4), (4, 8)), 4, 1)
    ((2, 4), (2, 8))
    """
    if stride != 1:
        return None
    found, left = [], extent
    for size, at in sorted(modes, key=lambda mode: mode[1]):
        taken = min(size, left)
        if size % taken or left % taken:
            return None
        found.append((taken, at))
        left //= taken
    return tuple(found)


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


def of_spec(spec: GridSpec, cluster: Cluster, hosts: Hosts | None = None) -> GridPlacement:
    """The placement of a grid; arguments and errors as of `RankPlaces`."""
    places, shape = RankPlaces(spec, cluster, hosts), spec.shape
    data = tuple(axis for axis in spec.regions[0].axes if axis.startswith("dp"))
    groups = [GroupDef(axis, "dense", (axis,)) for axis in ("tp", "cp", "pp", "dp_replicate")]
    groups += [
        GroupDef("dp_cp", "dense", (*data, "cp")),
        GroupDef("dp_shard_cp", "dense", ("dp_shard", "cp")),
    ]
    if "expert" in spec.layouts:
        experts = expert_axes(spec)
        groups += [GroupDef(name, "expert", axes) for name, axes in experts.items()]
        if (replicas := shape.get("dp_replicate", 1)) > 1:
            groups.append(_shards(spec, experts["edp"], replicas))
    found: dict[str, GroupDef] = {}
    for group in groups:
        layout = spec.layouts.get(group.region)
        if layout is not None:
            axes = tuple(axis for axis in group.axes if axis in layout.shape)
            found[group.name] = replace(group, axes=axes)
    spans = {name: places.span(group) for name, group in found.items()}
    return GridPlacement(spans, lambda name: places.load(found[name]))


def _shards(spec: GridSpec, copies: tuple[str, ...], replicas: int) -> GroupDef:
    """The ranks of one copy of experts, over which HSDP shards them."""
    if "dp_replicate" in copies:
        return GroupDef("edp_shard", "expert", tuple(a for a in copies if a != "dp_replicate"))
    if spec.order.find("dp_shard") > spec.order.find("dp_replicate"):
        raise SpecError(
            f"order={spec.order}: experts of one copy are then not next to each other, which a "
            "step's model does not know; put dp_shard before dp_replicate"
        )
    size = math.prod(spec.layouts["expert"].shape[axis] for axis in copies)
    return GroupDef("edp_shard", "expert", copies, part=(size // replicas, 1))
