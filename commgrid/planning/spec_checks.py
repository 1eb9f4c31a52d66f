"""Checks of a spec's parts against each other: names, listed ranks, axes of regions, levels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from commgrid.errors import SpecError
from commgrid.layout import axis_names as names
from commgrid.layout.rank_layout import RankLayout
from commgrid.layout.rank_text import describe_ranks
from commgrid.layout.ranks import RankTuple
from commgrid.planning.group import GroupDef, find_name
from commgrid.planning.group_row import UNWANTED, GroupEntry
from commgrid.planning.region import Region
from commgrid.planning.yaml_keys import OPTIONS


def check_word(key: str, value: object, also: str = "") -> None:
    """Refuse a value that is no word of the option; `also` tells what else it may be.

    Raises:
        SpecError: it is none.
    """
    words = OPTIONS[key].words
    if value not in words:
        near = names.nearest(str(value), words)
        raise SpecError(f"{key}={value!r}: expected {', '.join(words)}{also}{near}")


def canonical(
    key: str,
    given: Iterable[object],
    definitions: Mapping[str, GroupDef],
    words: names.Words,
) -> tuple[str, ...]:
    """Return the canonical names of the groups that an option lists.

    Raises:
        SpecError: no group of a name.
    """
    made = []
    for name in given:
        found = find_name(name, definitions, words) if isinstance(name, str) else None
        if found is None:
            near = names.nearest(str(name), tuple(definitions))
            raise SpecError(f"{key}: no group is named {name!r}{near}")
        made.append(found)
    return tuple(made)


def check_listed_ranks(rows: Iterable[GroupEntry], grid_ranks: range | tuple[int, ...]) -> None:
    """Refuse rows that list ranks outside of the grid."""
    covered = frozenset(grid_ranks) if isinstance(grid_ranks, tuple) else grid_ranks
    for entry in rows:
        strange = [r for ranks in entry.lists or () for r in ranks if r not in covered]
        if strange:
            raise SpecError(
                f"groups.{entry.name}.ranks: {describe_ranks(RankTuple(strange))} outside this "
                f"grid, which covers {describe_ranks(grid_ranks)}; list global ranks of the grid"
            )


def check_regions_agree(
    regions: Iterable[Region], layouts: Mapping[str, RankLayout], start: int
) -> None:
    """Refuse an axis of two regions with other groups in one; both start at rank `start`."""
    first: dict[str, Region] = {}
    for region in regions:
        for axis in region.axes:
            known = first.setdefault(axis, region)
            if known is region:
                continue
            # Both layouts start at the same rank without gaps, so if the axis has the same
            # group there it has the same size and stride, hence the same groups everywhere.
            ours = layouts[known.name].group(start, axis)
            theirs = layouts[region.name].group(start, axis)
            if ours != theirs:
                raise SpecError(
                    f"order: {axis} groups differ between regions: rank {start} has {axis} "
                    f"group {ours[:]} in {known.name} and {theirs[:]} in {region.name}; put "
                    f"{axis} last in both orders, or give the axes before it equal products"
                )


def levels_of_groups(
    within: Iterable[tuple[str, str]],
    rows: Iterable[GroupEntry],
    definitions: Mapping[str, GroupDef],
    words: names.Words,
) -> dict[str, str]:
    """Return, by canonical name, the level that its groups must stay within.

    Raises:
        SpecError: no such group, or two levels for one.
    """
    given = [(f"within.{name}", name, level) for name, level in within]
    for row in rows:
        if row.within:
            key, level = f"groups.{row.name}.within", row.within
            parts = dict(row.split or {row.name: 0})
            given += [(key, part, level) for part in parts if part != UNWANTED]
    found: dict[str, str] = {}
    for key, spelled, level in given:
        (name,) = canonical(f"{key}={level!r}", [spelled], definitions, words)
        if found.setdefault(name, level) != level:
            raise SpecError(
                f"{key}={level!r}: group {name!r} is to stay within a {found[name]} too; give "
                "one of them"
            )
    return found
