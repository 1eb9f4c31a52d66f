"""From regions and table rows to every group name and what it means."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace

from commgrid.errors import SpecError
from commgrid.layout import axis_names as names
from commgrid.planning.group_rows import GroupEntry
from commgrid.planning.groups import GroupDef

Sizes = Mapping[str, Mapping[str, int]]
"""Region to axis to size."""


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
                raise SpecError(f"groups.{entry.name}: {definition.name!r} is taken already")
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
