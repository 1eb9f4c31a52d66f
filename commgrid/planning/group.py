"""Group definitions: what each name of a spec means, before any rank or torch comes into it.

A spec's regions name every combination of their axes; the rows of the groups table add other
names, own communicators, picks, splits, listed groups and options.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from commgrid.errors import SpecError
from commgrid.layout import axis_names as names
from commgrid.layout.rank_layout import RankLayout
from commgrid.layout.ranks import Ranks, RankTuple
from commgrid.planning.group_row import UNWANTED, GroupEntry, GroupOptions

Sizes = Mapping[str, Mapping[str, int]]
"""Region to axis to size."""


@dataclass(frozen=True)
class GroupDef:
    """The meaning of a group name.

    Args:
        name: the canonical name, or the groups table's.
        region: the region whose layout its axes belong to.
        axes: the axes it runs along, slowest-varying first; of listed groups none.
        pick: positions of the members within the axes' group, as the table gives them.
        part: the (size, stride) in positions of a split's part.
        own: the name under which it has a communicator of its own, else None.
        options: what its communicator is created with.
        same_as: the group this is merely another name of.
        lists: the members of each group of this name, in its order, where no axes say them.
    """

    name: str
    region: str
    axes: tuple[str, ...]
    pick: tuple[int | str, ...] | None = None
    part: tuple[int, int] | None = None
    own: str | None = None
    options: GroupOptions = field(default_factory=GroupOptions)
    same_as: str | None = None
    lists: tuple[RankTuple, ...] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it has all ranks along its axes: no pick, no part, no list."""
        return self.pick is None and self.part is None and self.lists is None

    def places(self, size: int, at: int = 0) -> Sequence[int]:
        """Positions of the members in a whole group of `size`, ascending; of a split's part, of the
        one that position `at` is in."""
        if self.part is not None:
            extent, stride = self.part
            first = at - at // stride % extent * stride
            return range(first, first + extent * stride, stride)
        if self.pick is None:
            return range(size)
        named = {"first": 0, "last": size - 1}
        return tuple(sorted({named[p] if isinstance(p, str) else p for p in self.pick}))

    def ranks(self, layout: RankLayout, rank: int) -> Ranks:
        """The group that goes with `rank`; after a pick `rank` itself may not be in it.

        Empty for a rank that is in no list of a listed group.
        """
        if self.lists is not None:
            whole: Ranks = next((ranks for ranks in self.lists if rank in ranks), RankTuple())
        else:
            whole = layout.group(rank, *self.axes)
        if not whole or (self.pick is None and self.part is None):
            return whole
        return whole.take(self.places(len(whole), 0 if self.part is None else whole.index(rank)))

    def all_ranks(self, layout: RankLayout) -> list[tuple[int, ...]]:
        """Every group of this name, ordered by the place of its first member in the layout."""
        wholes = [tuple(ranks) for ranks in self.lists or layout.groups(*self.axes)]
        if self.is_whole:  # in order as the layout gives them
            return wholes
        found = [
            tuple(whole[position] for position in places)
            for whole in wholes
            for places in dict.fromkeys(
                self.places(len(whole), at) for at in range(1 if self.part is None else len(whole))
            )
        ]
        place = {rank: place for place, rank in enumerate(layout.ranks)}
        return sorted(found, key=lambda group: place[group[0]])

    def size(self, sizes: Mapping[str, int]) -> int:
        """The number of members, given the sizes of the region's axes; of the largest list."""
        if self.lists is not None:
            return len(self.places(max(map(len, self.lists))))
        return len(self.places(math.prod(sizes[axis] for axis in self.axes)))

    def key(self, share: str, layout: RankLayout, rank: int) -> tuple[object, ...]:
        """Names with equal keys share one communicator.

        All members of a group have the same names with equal keys. Groups of one rank communicate
        nothing, and share if `own` and `options` are the same. Of the others, `share="aliases"`
        leaves only mere aliases equal; `"region"` drops axes of size 1; `"all"` looks at nothing
        but the ranks. Listed groups are their own (`own`), and share with groups made of them
        alone.
        """
        sizes = layout.shape
        if self.lists is not None:
            of_lists = share != "aliases"
            ranks = self.ranks(layout, rank) if of_lists else self.same_as or self.name
            return ("listed", self.own, self.options, ranks)
        if self.size(sizes) == 1:
            return (self.own, self.options)
        if share == "aliases":
            return (self.same_as or self.name,)
        if share == "all":
            return (self.own, self.options, self.ranks(layout, rank))
        axes = tuple(axis for axis in self.axes if sizes[axis] > 1)
        whole = math.prod(sizes[axis] for axis in axes)
        part = None if self.part is not None and self.part[0] == whole else self.part
        picked = self.pick and self.places(whole)
        return (self.own, self.options, self.region, axes, picked, part)

    def with_entry(self, entry: GroupEntry, size: int | None) -> GroupDef:
        """The group that a row without split makes of this one of `size` (None: not known yet).

        Raises:
            SpecError: the row picks a position outside `size`, or from another pick or a part.
        """
        if entry.pick is not None and (self.pick or self.part):
            raise SpecError(
                f"groups.{entry.name}: {entry.of!r} is itself a pick or a part; "
                "pick from a combination of axes"
            )
        for position in entry.pick or ():
            if size is not None and isinstance(position, int) and not 0 <= position < size:
                raise SpecError(
                    f"groups.{entry.name}.pick: position {position} is outside "
                    f"{entry.of!r} of size {size} (positions 0 to {size - 1})"
                    + ("; that is its smallest list" if self.lists is not None else "")
                )
        alias = not entry.own and entry.pick is None and entry.options == GroupOptions()
        return replace(
            self,
            name=entry.name,
            pick=entry.pick or self.pick,
            own=entry.name if entry.own else self.own,
            options=entry.options.over(self.options),
            same_as=(self.same_as or self.name) if alias else None,
        )

    def split(self, entry: GroupEntry, size: int | None) -> list[GroupDef]:
        """The groups that a row with a split makes of this one of `size` (None: not known yet).

        Raises:
            SpecError: the parts do not multiply to `size`, or this is itself a pick or part.
        """
        assert entry.split is not None
        if not self.is_whole:
            what = "has listed ranks" if self.lists is not None else "is itself a pick or a part"
            raise SpecError(
                f"groups.{entry.name}: {entry.of!r} {what}; split a combination of axes"
            )
        parts = dict(entry.split)
        if size is not None:
            parts = _fill(entry, parts, size)
        made, stride = [], 1
        for part, extent in reversed(parts.items()):
            own = part if entry.own else self.own
            options = entry.options.over(self.options)
            if part != UNWANTED:
                made.append(
                    replace(self, name=part, part=(extent, stride), own=own, options=options,
                            same_as=None)
                )  # fmt: skip
            stride *= extent
        return made[::-1]


def _fill(entry: GroupEntry, parts: dict[str, int], size: int) -> dict[str, int]:
    known = math.prod(extent for extent in parts.values() if extent > 0)
    given = "·".join(f"{part}={extent}" for part, extent in parts.items())
    if size % known or (-1 not in parts.values() and known != size):
        raise SpecError(
            f"groups.{entry.name}.split: {given} does not make {entry.of!r}, which has size {size}"
        )
    return {part: extent if extent > 0 else size // known for part, extent in parts.items()}


def define_groups(
    regions: Mapping[str, tuple[str, ...]],
    sizes: Sizes | None,
    entries: Iterable[GroupEntry],
    words: names.Words,
) -> dict[str, GroupDef]:
    """Every group by name, in creation order: combinations, `dp` names, then the table's.

    Args:
        regions: region to its axes, fastest-varying first.
        sizes: what `split` and `pick` are checked against; None while they are open.
        entries: the rows of the groups table.
        words: what names are made of.

    Raises:
        SpecError: a row that names nothing, shadows a name, loops or does not fit.
    """
    found: dict[str, GroupDef] = {}
    for region, axes in regions.items():
        for count in range(1, len(axes) + 1):
            for chosen in itertools.combinations(axes, count):
                name = names.canonical(chosen, axes)
                found.setdefault(name, GroupDef(name, region, chosen[::-1]))
    entries = list(entries)
    for entry in entries:
        if entry.of is None and entry.lists is None:
            target = find_name(entry.name, found, words)
            if target is None:
                raise SpecError(
                    f"groups.{entry.name}: no group has this name; give `of`, the group it is "
                    f"made from{names.nearest(entry.name, found)}"
                )
            options = entry.options.over(found[target].options)  # of one group in two spellings
            found[target] = replace(found[target], options=options)
    found.update(_umbrella(found, words))
    made = [entry for entry in entries if entry.of is not None or entry.lists is not None]
    _add_entries(found, made, sizes, words)
    return found


def find_name(name: str, found: Mapping[str, GroupDef], words: names.Words) -> str | None:
    """The key of `found` that a name in any spelling means, or None."""
    if name in found:
        return name
    axes = names.parse(name, words)
    plain = (d for d in found.values() if d.is_whole)
    return next((d.name for d in plain if axes == frozenset(d.axes)), None)


def _umbrella(found: Mapping[str, GroupDef], words: names.Words) -> dict[str, GroupDef]:
    """With dp_replicate and dp_shard, every combination of both under its name with `dp`."""
    parts = set(words.get("dp", ()))
    made = {}
    for definition in found.values():
        if len(parts) > 1 and parts <= set(definition.axes):
            spelled = ["dp" if a == "dp_replicate" else a for a in definition.axes]
            name = "_".join(a for a in spelled if a not in parts)
            made[name] = replace(definition, name=name, same_as=definition.name)
    return made


def _add_entries(
    found: dict[str, GroupDef], waiting: list[GroupEntry], sizes: Sizes | None, words: names.Words
) -> None:
    """Adds the rows that make new groups, each after the one it is made of."""
    for entry in waiting:
        for name in (entry.name, *dict(entry.split or ())):
            if names.parse(name, words) is not None:
                raise SpecError(
                    f"groups.{entry.name}: {name!r} already names a combination of axes, which "
                    "it would shadow; choose another name"
                )
    while waiting:
        ready = ((e, find_name(e.of or "", found, words)) for e in waiting)
        entry, source = next(
            ((e, s) for e, s in ready if s is not None or e.lists is not None), (waiting[0], None)
        )
        if source is None and entry.lists is None:
            loop = any(entry.of == other.name for other in waiting)
            why = "these entries are made of each other" if loop else "no group has this name"
            near = names.nearest(entry.of or "", found)
            raise SpecError(f"groups.{entry.name}.of={entry.of!r}: {why}{near}")
        waiting.remove(entry)
        made = _listed(entry, found) if source is None else _apply(entry, found[source], sizes)
        for definition in made:
            if definition.name in found:
                raise SpecError(
                    f"groups.{entry.name}: {definition.name!r} is taken already; "
                    "choose another name"
                )
            found[definition.name] = definition


def _listed(entry: GroupEntry, found: Mapping[str, GroupDef]) -> list[GroupDef]:
    """Groups of listed ranks; they have no axes, and count to the first region."""
    region = next(iter(found.values())).region
    made = GroupDef(entry.name, region, (), own=entry.name, options=entry.options)
    return [replace(made, lists=entry.lists)]


def _apply(entry: GroupEntry, source: GroupDef, sizes: Sizes | None) -> list[GroupDef]:
    size = None if sizes is None else source.size(sizes[source.region])
    if source.lists is not None:
        size = min(map(len, source.lists))
    return [source.with_entry(entry, size)] if entry.split is None else source.split(entry, size)
