"""`commgrid diff`: what changes between two grids: sizes, order, and the ranks of each name."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from commgrid.cli.commands import plan_model
from commgrid.cli.flags import whole
from commgrid.cli.grid_options import (
    add_cluster_options,
    read_changes,
    read_nodes,
    refuse_unused,
    resolve,
)
from commgrid.cli.output import give
from commgrid.errors import SpecError
from commgrid.layout.axis_names import nearest
from commgrid.layout.rank_text import describe_ranks, listed_ranks, pack
from commgrid.layout.ranks import RankSet
from commgrid.planning.group import find_name
from commgrid.planning.plan import GroupPlan
from commgrid.planning.presets import PRESETS
from commgrid.planning.spec import GridSpec

DESCRIPTION = "Compares two grids: which names keep their ranks, and who gets other peers."
EXAMPLES = """examples:
  commgrid diff old.yaml new.yaml --world-size 64
  commgrid diff grid.yaml --set axes.tp=4 --world-size 64
  commgrid diff megatron torchtitan --world-size 64
  commgrid diff megatron --set axes.tp=4 --world-size 64 --model llama3-70b --cluster h100

Nothing is started and torch is not needed.
"""

MOST_RANKS = 500_000
"""Of the largest grids whose differing groups are compared, rank by rank."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="BEFORE", help="a YAML file, or a preset's name")
    parser.add_argument(
        "after", nargs="?", metavar="AFTER", help="likewise (default: BEFORE, changed by --set)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="changes",
        help="another value of a key of AFTER, such as axes.tp=2; may be repeated",
    )
    parser.add_argument("--world-size", type=whole(), metavar="N", help="number of ranks of both")
    parser.add_argument(
        "--model", metavar="NAME", help="of whose step time and memory are compared"
    )
    add_cluster_options(parser)


def run(args: argparse.Namespace) -> int:
    read_nodes(args)
    changes = read_changes(args.changes)
    if args.after is None and not changes:
        raise SpecError(
            f"diff {args.before}: there is nothing to compare it with; give AFTER, or --set "
            "KEY=VALUE"
        )
    before = resolve(_read(args.before, {}), args.world_size)
    changed = args.before if args.after is None else args.after
    after = resolve(_read(changed, changes), args.world_size)
    found = compare(before, after)
    if args.model is None:
        why = "is for a step's time and memory; give --model NAME as well"
        refuse_unused(args, [] if args.nodes else ["cluster", "gpus_per_node"], why)
        give(args, lambda: asdict(found), lambda: str(found))
        return 0
    model, cluster = plan_model.read_job(args)
    old, new = (plan_model.given_step(spec, model, cluster) for spec in (before, after))
    give(
        args,
        lambda: {**asdict(found), "steps": {
            "before": plan_model.step_json(old), "after": plan_model.step_json(new)}},
        lambda: "\n".join([str(found), "", *plan_model.change_text(old, new)]),
    )  # fmt: skip
    return 0


def _read(given: str, changes: dict[str, Any]) -> GridSpec:
    if given in PRESETS:  # a file of this name is ./NAME
        return GridSpec.from_preset(given, changes=changes)
    if not os.path.isfile(given):  # unlike pathlib's, of any name
        raise SpecError(
            f"{given or repr(given)}: neither a file nor a preset; expected GRID.yaml, or one of "
            f"{', '.join(PRESETS)}{nearest(given, PRESETS)}"
        )
    return GridSpec.from_yaml(given, changes=changes)


@dataclass(frozen=True)
class GroupChange:
    """A name whose groups differ between the two grids.

    Args:
        name: which.
        sizes: of its groups, before and after; of the largest where they differ.
        moved: how many ranks have another group under it, or the same in another order.
        rank: the first of them.
        before, after: its group, () where it is in none.
    """

    name: str
    sizes: tuple[int, int]
    moved: int
    rank: int
    before: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(frozen=True)
class GridDiff:
    """Two grids beside each other.

    Args:
        ranks: how many each has.
        covers: which, in words.
        same_ranks: whether they are the same.
        axes: the sizes that differ, before and after, by axis; None where there is no such axis.
        orders: by region, where they differ; the region's axes before and after.
        same: names of the same groups.
        changed: names of other groups; empty where the grids have other ranks.
        gone, new: names that only one of them creates.
        options: by name, what its communicator is created with, where that differs.
        placing: `within` and `place` before and after, where they differ.
        communicators, connecting: of the first rank, before and after.
    """

    ranks: tuple[int, int]
    covers: tuple[str, str]
    same_ranks: bool
    axes: dict[str, tuple[int | None, int | None]]
    orders: dict[str, tuple[str, str]]
    same: tuple[str, ...]
    changed: tuple[GroupChange, ...]
    gone: tuple[str, ...]
    new: tuple[str, ...]
    options: dict[str, tuple[dict[str, Any], dict[str, Any]]]
    placing: dict[str, tuple[Any, Any]]
    communicators: tuple[int, int]
    connecting: tuple[int, int]

    @property
    def is_empty(self) -> bool:
        """Whether nothing differs, but for how communicators are shared."""
        differs = (self.axes, self.orders, self.changed, self.gone, self.new, self.options,
                   self.placing)  # fmt: skip
        return not any(differs) and self.same_ranks

    def __str__(self) -> str:
        """The difference in words, a few lines however many ranks there are."""
        lines = [f"{_arrow(*self.ranks)} rank{'s' * (self.ranks != (1, 1))}"]
        if not self.same_ranks:
            lines.append(f"  {_arrow(*self.covers)}")
        if self.axes:
            sizes = (f"{axis} {_arrow(*sizes)}" for axis, sizes in self.axes.items())
            lines.append(f"  {', '.join(sizes)}")
        lines += [f"  order of {r}: {_arrow(*orders)}" for r, orders in self.orders.items()]
        lines += [f"  {key}: {_arrow(*rules)}" for key, rules in self.placing.items()]
        lines.append(
            f"  {_arrow(*self.communicators)} communicator{'s' * (self.communicators != (1, 1))} a "
            f"rank, {_arrow(*self.connecting)} of which connect at start"
        )
        if self.is_empty:
            return "\n".join([*lines, "", "the same groups under the same names"])
        if self.same_ranks:
            lines += ["", f"same ranks ({len(self.same)}){_listed(self.same)}"]
        if self.changed:
            lines += ["", f"other ranks ({len(self.changed)})"]
            width = max(len(change.name) for change in self.changed)
            lines += [_of_change(change, width, self.ranks[1]) for change in self.changed]
        for what, names in (("no longer there", self.gone), ("new", self.new)):
            if names:
                lines += ["", f"{what} ({len(names)}){_listed(names)}"]
        if self.options:
            lines += ["", "created otherwise"]
            lines += [
                f"  {name}: {_arrow(*(one or 'as the grid' for one in pair))}"
                for name, pair in self.options.items()
            ]
        return "\n".join(lines)


def compare(before: GridSpec, after: GridSpec) -> GridDiff:
    """Compare two grids.

    Args:
        before, after: resolved.

    Raises:
        SpecError: a size is still open.

    Example:
        >>> one, other = (GridSpec.build(tp=tp).resolve(8) for tp in (2, 4))
        >>> found = compare(one, other)
        >>> found.axes, found.changed[0].before, found.changed[0].after
        ({'tp': (2, 4), 'dp': (4, 2)}, (0, 1), (0, 1, 2, 3))
        >>> found.same[:2]
        ('cp', 'pp')
    """
    for spec in (before, after):
        spec.check_resolved()
    plans = [GroupPlan.for_rank(spec, spec.grid_ranks[0]) for spec in (before, after)]
    names = [plan.created for plan in plans]
    # Another order spells combinations otherwise, pp_dp as dp_pp; each grid knows both.
    spelled = {name: find_name(name, after.definitions, after.words) for name in names[0]}
    both = {name: other for name, other in spelled.items() if other in names[1]}
    changes = {}
    ranks = [spec.grid_ranks for spec in (before, after)]
    if same_ranks := ranks[0] == ranks[1] or (
        len(ranks[0]) == len(ranks[1]) and {*ranks[0]} == {*ranks[1]}
    ):
        changes = {name: _groups_of(name, other, before, after) for name, other in both.items()}
    options = (
        {name: names[0][name].options.to_dict() for name in both},
        {name: names[1][other].options.to_dict() for name, other in both.items()},
    )
    placing = (
        {"within": ", ".join(f"{name}={level}" for name, level in spec.within) or None,
         "place": spec.place}
        for spec in (before, after)
    )  # fmt: skip
    held = [plan.communicators for plan in plans]
    return GridDiff(
        ranks=(before.world_size, after.world_size),
        covers=(listed_ranks(ranks[0]), listed_ranks(ranks[1])),
        same_ranks=same_ranks,
        axes=_differing(before.shape, after.shape),
        orders=_orders(before, after),
        same=tuple(name for name in both if same_ranks and changes[name] is None),
        changed=tuple(change for change in changes.values() if change is not None),
        gone=tuple(name for name in names[0] if name not in both),
        new=tuple(name for name in names[1] if name not in both.values()),
        options=_differing(*options),
        placing=_differing(*placing),
        communicators=(len(held[0]), len(held[1])),
        connecting=(sum(c.connect for c in held[0]), sum(c.connect for c in held[1])),
    )


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The values that differ, by key; None where there is no such key."""
    keys = dict.fromkeys((*one, *other))
    return {key: (one.get(key), other.get(key)) for key in keys if one.get(key) != other.get(key)}


def _orders(before: GridSpec, after: GridSpec) -> dict[str, tuple[str, str]]:
    """Axes of size 1 have no place, so they are left out."""
    orders = [
        {r.name: "-".join(a for a in r.axes if spec.shape[a] > 1) for r in spec.regions}
        for spec in (before, after)
    ]
    shared = [name for name in orders[0] if name in orders[1]]
    found = {}
    for name in shared:
        one, other = orders[0][name], orders[1][name]
        common = set(one.split("-")) & set(other.split("-"))
        kept = [[axis for axis in order.split("-") if axis in common] for order in (one, other)]
        if kept[0] != kept[1]:
            found[name] = (one, other)
    return found


def _groups_of(name: str, other: str, before: GridSpec, after: GridSpec) -> GroupChange | None:
    """How the groups of a name, which `after` may spell otherwise, change; None if they do not."""
    definitions = ((before, before.definitions[name]), (after, after.definitions[other]))
    if before.grid_ranks == after.grid_ranks and all(d.is_whole for _, d in definitions):
        modes = [
            RankSet(0, tuple(m for a in d.axes for m in spec.layout(d.region).axis(a).modes))
            for spec, d in definitions
        ]
        if modes[0] == modes[1]:
            return None
    if before.world_size > MOST_RANKS:
        raise SpecError(
            f"world_size={before.world_size}: {name} has other ranks, and more than "
            f"{MOST_RANKS:,} are not compared one by one; compare fewer"
        )
    old, new = (
        {*definition.all_ranks(spec.layout(definition.region))} for spec, definition in definitions
    )
    if old == new:
        return None
    moved = {rank for group in old ^ new for rank in group}
    first = min(moved)
    mine = [next((group for group in groups if first in group), ()) for groups in (old, new)]
    sizes = [max(map(len, groups), default=0) for groups in (old, new)]
    return GroupChange(name, (sizes[0], sizes[1]), len(moved), first, mine[0], mine[1])


def _of_change(change: GroupChange, width: int, world: int) -> str:
    moved = "every rank" if change.moved == world else f"{change.moved} of {world} ranks"
    groups = (_written(one) if one else "none" for one in (change.before, change.after))
    return (
        f"  {change.name:{width}}  of {_arrow(*change.sizes)}, on {moved}; rank {change.rank}: "
        f"{' → '.join(groups)}"
    )


def _written(ranks: tuple[int, ...]) -> str:
    """As `--ranks` takes them; of very many runs the first ones, in words."""
    text = pack(ranks)
    return describe_ranks(ranks) if text.startswith("x") else text


def _arrow(one: object, other: object) -> str:
    if one == other:
        return f"{one}"
    return " → ".join("–" if each in (None, ()) else f"{each}" for each in (one, other))


def _listed(names: tuple[str, ...]) -> str:
    return f": {', '.join(names)}" if names else ""
