"""GridSpec: the axes, regions and groups of a grid, as numbers and names.

A spec is frozen and knows no ranks but those it covers; `resolve` fills what was left
open. It reads and writes dicts and YAML, imports no torch, and raises `SpecError`
naming the key, the value and a fix before anything of it becomes a communicator.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from commgrid.errors import SpecError, UnknownGroupError
from commgrid.layout import axis_names as names
from commgrid.layout.rank_layout import RankLayout
from commgrid.layout.rank_text import listed_ranks
from commgrid.layout.ranks import MOST_RANK, as_ranks, highest_rank, whole_number
from commgrid.planning.group import GroupDef, define_groups, find_name
from commgrid.planning.group_row import UNWANTED, GroupEntry
from commgrid.planning.region import HSDP, Region
from commgrid.planning.spec_checks import (
    canonical,
    check_listed_ranks,
    check_regions_agree,
    check_word,
    levels_of_groups,
)
from commgrid.planning.spec_mapping import read_mapping
from commgrid.planning.yaml import changed, from_file
from commgrid.planning.yaml_keys import BY_RANK, DEFAULT_ORDER, DEFAULT_SHARE, OPTIONS, check_place
from commgrid.wording import listed, several


@dataclass(frozen=True)
class GridSpec:
    """A grid described: what there is to create, before any of it exists.

    Build one with `build`, `from_dict` or `from_yaml`, fix its size with `resolve`.

    Args:
        regions: the dense region first.
        create: `"all"`, or the names to create (the groups table's are created too).
        connect: `"axes"`, `"all"`, `"none"`, or the names that connect during start-up.
        share: names of equal rank sets that are one communicator. `"aliases"`: those that say
            they are the same. `"region"`: also those of one region that differ by axes of size 1.
            `"all"`: every name. The last two ask all members to issue collectives on names that
            share in one order. Groups of one rank are always one communicator, but for options.
        groups: the rows of the groups table.
        ranks: the distinct global ranks it covers, in any order: the place in the list is the place
            in the grid. Evenly spaced rising ones are kept as a range; None: from 0.
        within: pairs of a group's name and a level of the cluster, such as `node`: no group of the
            name may have ranks in two of its units.
        place: `"by_rank"`, or `"by_host"`: the ranks of one host come one after another, for any
            their numbers; `initialize` finds out which these are.

    Example:
        >>> spec = GridSpec.build(tp=2, pp=2, dp=-1).resolve(world_size=16)
        >>> spec.shape
        {'tp': 2, 'cp': 1, 'dp': 4, 'pp': 2}
        >>> spec.layout("dense").groups("pp")[0][:]
        (0, 8)
    """

    regions: tuple[Region, ...]
    create: str | tuple[str, ...] = OPTIONS["create"].default
    connect: str | tuple[str, ...] = OPTIONS["connect"].default
    share: str = DEFAULT_SHARE
    groups: tuple[GroupEntry, ...] = ()
    ranks: range | tuple[int, ...] | None = None
    within: tuple[tuple[str, str], ...] = ()
    place: str = BY_RANK

    def __post_init__(self) -> None:
        if self.ranks is not None:
            object.__setattr__(self, "ranks", as_ranks(self.ranks))
        found = names.ambiguity(tuple(self.words.items()))
        if found:
            name, one, other = found
            raise SpecError(
                f"group name {name!r} would mean both {_axes(one)} and {_axes(other)}; "
                "rename one of these axes"
            )
        if self.share == "none":
            raise SpecError(
                "share='none': this is now called 'aliases', and the default; expected "
                f"{', '.join(OPTIONS['share'].words)}"
            )
        check_word("share", self.share)
        if self.is_resolved and self.world_size > MOST_RANK:
            raise SpecError(f"axes: the sizes make more ranks than there can be, {MOST_RANK}")
        if self.is_resolved and len(self.grid_ranks) != self.world_size:
            raise SpecError(
                f"ranks={listed_ranks(self.grid_ranks)}: {len(self.grid_ranks)} ranks, but the "
                f"sizes make {self.world_size}"
            )
        if self.is_resolved:
            for region in self.regions:
                if region.product != self.world_size:  # says what would fit
                    region.resolve(self.world_size, dict(self.regions[0].numbers))
            check_regions_agree(self.regions, self.layouts, self.grid_ranks[0])
        for key in ("create", "connect"):
            chosen = getattr(self, key)
            if isinstance(chosen, tuple):
                object.__setattr__(self, key, canonical(key, chosen, self.definitions, self.words))
            else:
                check_word(key, chosen, ", or a list of group names")
        for name in () if isinstance(self.connect, str) else self.connect:
            if name not in self.created_names:
                raise SpecError(f"connect: group {name!r} is not created; add it to create")
        if self.is_resolved:
            check_listed_ranks(self.groups, self.grid_ranks)
        check_place(self.place, self.ranks)
        if self.within or self.groups:  # what is wrong with them is an error now
            _ = self.constraints

    def __str__(self) -> str:
        """A few lines, however many ranks and groups there are.

        >>> print(GridSpec.build(tp=2, pp=2).resolve(8))
        grid of 8 ranks
          dense   tp 2 · cp 1 · dp 2 · pp 2   (fastest first)
          create=all, connect=axes, share=aliases
        """
        head = "grid of any number of ranks"
        if self.ranks is not None:
            head = f"grid of {several(len(self.ranks), 'rank')}: {listed_ranks(self.ranks)}"
        elif self.is_resolved:
            head = f"grid of {several(self.world_size, 'rank')}"
        choices = [f"{key}={listed(getattr(self, key))}" for key in ("create", "connect", "share")]
        lines = [head, *(f"  {region}" for region in self.regions), f"  {', '.join(choices)}"]
        if self.groups:
            lines.append(f"  groups: {listed(self.table_names)}")
        return "\n".join(lines)

    # -- making one ---------------------------------------------------------------------

    @classmethod
    def build(
        cls,
        *,
        dp: int = -1,
        tp: int = 1,
        pp: int = 1,
        cp: int = 1,
        ep: int = 1,
        etp: int | None = None,
        order: str = DEFAULT_ORDER,
        create: str | Sequence[str] = "all",
        connect: str | Sequence[str] = "axes",
        share: str = DEFAULT_SHARE,
        groups: Mapping[str, Any] | None = None,
        ranks: range | Sequence[int] | str | None = None,
        within: Mapping[str, str] | None = None,
        place: str = BY_RANK,
        **axes: int,
    ) -> GridSpec:
        """A spec from sizes, as `commgrid.initialize` takes them.

        The expert region exists when `ep` is above 1 or `etp` is given; its axes are
        the dense ones with tp replaced by etp, dp by edp, and everything else but pp
        folded into edp, as in Megatron-core's `parallel_state`.

        Args:
            dp, tp, pp, cp: sizes of the dense axes; one -1 is filled by `resolve`.
            ep, etp: expert and expert tensor parallel sizes; etp None means tp.
            order: axes fastest-varying first; axes of size 1 may be left out.
            create, connect, share, groups, ranks, place: see `GridSpec`.
            within: names of groups to levels of a cluster, as `{"tp": "node"}`.
            **axes: sizes of further axes, named in `order`; `dp_replicate` and
                `dp_shard` stand in for dp.

        Raises:
            SpecError: naming the key that is wrong.
        """
        config = {
            "axes": {"tp": tp, "cp": cp, "dp": dp, "pp": pp, "ep": ep, "etp": etp, **axes},
            "order": order, "create": create, "connect": connect, "share": share, "groups": groups,
            "ranks": ranks, "within": within, "place": place,
        }  # fmt: skip
        return cls(**read_mapping(config, arguments=True))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> GridSpec:
        """A spec from the mapping that YAML holds, as `to_dict` gives it.

        Raises:
            SpecError: an unknown or missing key, or a value that does not fit.
        """
        return cls(**read_mapping(config))

    @classmethod
    def from_yaml(cls, path: str | Path, *, changes: Mapping[str, Any] | None = None) -> GridSpec:
        """A spec from a YAML file, safely loaded.

        Args:
            path: of the file.
            changes: values that are others than in the file, by key, as `{"axes.tp": 2}`.

        Raises:
            SpecError: the file is not there, not YAML, not a mapping, or describes no grid.
        """
        return from_file(path, lambda config: cls.from_dict(changed(config, changes or {})))

    @classmethod
    def from_preset(
        cls,
        name: str,
        *,
        ranks: range | Sequence[int] | str | None = None,
        changes: Mapping[str, Any] | None = None,
        **sizes: int,
    ) -> GridSpec:
        """A spec that another system uses, by name; `commgrid presets` lists them.

        Args:
            name: of the preset.
            ranks: see `GridSpec`.
            changes: values of its YAML that are others, by key, as `{"share": "region"}`.
            **sizes: of its axes; those not given are the preset's.

        Raises:
            SpecError: no such preset, an axis that it does not have, or a value that does not fit.

        Example:
            >>> GridSpec.from_preset("hsdp", dp_shard=4).resolve(32).shape
            {'tp': 1, 'cp': 1, 'dp_shard': 4, 'dp_replicate': 8, 'pp': 1}
        """
        from commgrid.planning.presets import PRESETS  # most grids are of none

        config = PRESETS.find(name).with_sizes(sizes, changes)
        try:
            spec = cls.from_dict(config)
        except SpecError as error:
            raise SpecError(f"preset {name!r}: {error}") from error
        return spec if ranks is None else replace(spec, ranks=as_ranks(ranks))

    @classmethod
    def from_config(cls, config: str | Path | Mapping[str, Any] | GridSpec) -> GridSpec:
        """A spec from the `config` of `initialize`: YAML path, dict or GridSpec."""
        if isinstance(config, GridSpec):
            return config
        if isinstance(config, str | Path):
            return cls.from_yaml(config)
        return cls.from_dict(config)

    # -- reading it ---------------------------------------------------------------------

    @cached_property
    def is_resolved(self) -> bool:
        """Whether every size is a number."""
        return all(region.is_resolved for region in self.regions)

    @property
    def shape(self) -> dict[str, int]:
        """Axis to size, fastest-varying first, of every region; -1 where open."""
        dense = dict(self.regions[0].numbers)
        found = dict(dense)
        for region in self.regions[1:]:
            for axis, size in region.sizes:
                found.setdefault(axis, dense.get(size, -1) if isinstance(size, str) else size)
        return found

    @property
    def order(self) -> str:
        """The dense axes fastest-varying first, dash-joined."""
        return "-".join(self.regions[0].axes)

    @property
    def world_size(self) -> int:
        """The number of ranks in the grid.

        Raises:
            SpecError: the spec is not resolved.
        """
        self.check_resolved()
        return self.regions[0].product

    def check_resolved(self) -> None:
        """Refuse a spec with open sizes.

        Raises:
            SpecError: it has some.
        """
        if not self.is_resolved:
            raise SpecError("the spec has open sizes (-1); call spec.resolve(world_size=…) first")

    @property
    def grid_ranks(self) -> range | tuple[int, ...]:
        """The global ranks of the grid, in its order; needs a resolved spec."""
        return range(self.world_size) if self.ranks is None else self.ranks

    @cached_property
    def words(self) -> dict[str, tuple[str, ...]]:
        """Words of group names: every axis, and `dp` if its two parts stand in for it."""
        words: dict[str, tuple[str, ...]] = {
            axis: (axis,) for region in self.regions for axis in region.axes
        }
        if words.keys() >= {*HSDP}:
            words["dp"] = HSDP
        return words

    @cached_property
    def definitions(self) -> dict[str, GroupDef]:
        """Every group name and what it means, in creation order: combinations, then the table."""
        sizes = {r.name: dict(r.numbers) for r in self.regions} if self.is_resolved else None
        return define_groups({r.name: r.axes for r in self.regions}, sizes, self.groups, self.words)

    @cached_property
    def table_names(self) -> tuple[str, ...]:
        """The names that the groups table adds or sets options on."""
        parts = (part for e in self.groups for part in dict(e.split or {e.name: 0}))
        made = [part for part in parts if part != UNWANTED]
        return tuple(find_name(n, self.definitions, self.words) or n for n in made)

    @cached_property
    def constraints(self) -> dict[str, str]:
        """The level that no group of a name may leave, by canonical name, of `within` and of rows.

        Raises:
            SpecError: no such group, or two levels for one.
        """
        return levels_of_groups(self.within, self.groups, self.definitions, self.words)

    @cached_property
    def created_names(self) -> frozenset[str]:
        """The names that `create` asks for, all of the groups table among them."""
        if self.create == "all":
            return frozenset(self.definitions)
        wanted = {*self.create, *self.table_names}
        wanted |= {self.definitions[name].same_as or name for name in wanted}
        return frozenset(n for n, d in self.definitions.items() if wanted & {n, d.same_as})

    @cached_property
    def connecting_names(self) -> frozenset[str]:
        """The names that `connect` asks to connect during start-up."""
        if self.connect == "all":
            return frozenset(self.definitions)
        if self.connect == "axes":
            axes = (axis for region in self.regions for axis in region.axes)
            return frozenset((*axes, *self.table_names))
        return frozenset() if self.connect == "none" else frozenset(self.connect)

    def resolve_name(self, *spelled: str) -> str:
        """The canonical name for a name in any spelling, or for several axes or names.

        >>> GridSpec.build().resolve_name("cp", "dp")
        'dp_cp'

        Raises:
            UnknownGroupError: listing the known names and the nearest.
        """
        if not all(isinstance(word, str) for word in spelled):
            given = ", ".join(map(repr, spelled))
            raise UnknownGroupError(
                f"no group is named {given}: expected names, of several axes one after the other, "
                "as get_group('dp', 'tp') or get_group('dp_tp')"
            )
        name = "_".join(spelled) or names.canonical(self.regions[0].axes, self.regions[0].axes)
        found = find_name(name, self.definitions, self.words)
        if found is None:
            known = list(self.definitions)
            joined = find_name(re.sub(r"\W+", "_", name), self.definitions, self.words)
            meant = f"; did you mean {joined!r}?" if joined else names.nearest(name, known)
            raise UnknownGroupError(
                f"no group is named {name!r}{meant} (there are {', '.join(known)})"
            )
        return found

    @cached_property
    def layouts(self) -> dict[str, RankLayout]:
        """Region to the ranks of a resolved spec under its axes."""
        return {
            region.name: RankLayout.from_sizes(dict(region.numbers), ranks=self.grid_ranks)
            for region in self.regions
        }

    def layout(self, region: str) -> RankLayout:
        """The ranks of a resolved spec under a region's axes."""
        return self.layouts[region]

    # -- fixing its size ----------------------------------------------------------------

    def resolve(
        self, world_size: int | None = None, ranks: range | Sequence[int] | None = None
    ) -> GridSpec:
        """The same spec with every size a number.

        Args:
            world_size: how many ranks there are; None where `ranks` says it.
            ranks: the ranks this grid covers, in its order; None: the spec's, or else all of the
                world.

        Raises:
            SpecError: the sizes do not make the number of ranks.
        """
        covered = self.ranks if ranks is None else as_ranks(ranks)
        size = None if world_size is None else whole_number("world_size", world_size, 1, MOST_RANK)
        if covered is None:
            if size is None:
                raise SpecError("resolve needs world_size or ranks")
            covered = range(size)
        elif size is not None and highest_rank(covered) >= size:
            raise SpecError(
                f"ranks={listed_ranks(covered)}: the world has only ranks 0-{size - 1}; "
                "leave the others out, or start more"
            )
        everyone = ranks is None and self.ranks is None
        if self.is_resolved and covered == self.grid_ranks and (everyone or covered == self.ranks):
            return self  # and its cached properties
        dense = self.regions[0].resolve(len(covered), {})
        rest = [r.resolve(len(covered), dict(dense.numbers)) for r in self.regions[1:]]
        return replace(self, regions=(dense, *rest), ranks=None if everyone else covered)

    # -- writing it ---------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The mapping that `from_dict` reads back to an equal spec."""
        dense, *others = self.regions
        made: dict[str, Any] = {"axes": dict(dense.sizes), "order": self.order}
        if others:
            made["regions"] = {
                r.name: {"axes": dict(r.sizes), "order": "-".join(r.axes)} for r in others
            }
        for key in ("create", "connect", "share"):
            chosen = getattr(self, key)
            made[key] = chosen if isinstance(chosen, str) else list(chosen)
        if self.groups:
            made["groups"] = {entry.name: entry.to_dict() for entry in self.groups}
        if isinstance(self.ranks, range):
            span = self.ranks
            made["ranks"] = {"start": span.start, "stop": span.stop, "step": span.step}
        elif self.ranks is not None:
            made["ranks"] = list(self.ranks)
        if self.within:
            made["within"] = dict(self.within)
        if self.place != BY_RANK:
            made["place"] = self.place
        return made

    def to_yaml(self) -> str:
        """The spec as YAML text that `from_yaml` reads back."""
        import yaml

        return str(yaml.safe_dump(self.to_dict(), sort_keys=False, default_flow_style=None))


def _axes(axes: Iterable[str]) -> str:
    return " × ".join(sorted(axes))
