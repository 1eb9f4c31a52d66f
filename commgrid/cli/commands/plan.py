"""`commgrid plan`: what groups a grid has, and what starting it will cost."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from commgrid.cli.commands import plan_options
from commgrid.cli.flags import file_of
from commgrid.cli.grid_options import (
    add_cluster_options,
    add_grid_options,
    read_cluster,
    read_nodes,
    read_spec,
    refuse_unused,
    resolve,
)
from commgrid.cli.output import give, names_of, write_grid, written
from commgrid.errors import SpecError
from commgrid.layout.rank_text import listed_ranks
from commgrid.planning.plan import NCCL_GB, GroupPlan, PlannedCommunicator
from commgrid.planning.spec import GridSpec
from commgrid.viz.figure import SUFFIXES
from commgrid.wording import several

if TYPE_CHECKING:  # what most plans do without, and is slow to load
    from commgrid.cost_model.cluster import Cluster
    from commgrid.cost_model.crossing import Crossing
    from commgrid.cost_model.why import Why

DESCRIPTION = "Shows the groups of a grid, the communicators one rank holds, and their cost."
EXAMPLES = """examples:
  commgrid plan --tp 8 --pp 4 --world-size 1024
  commgrid plan --tp 4 --ep 8 --etp 1 --world-size 64 --share region
  commgrid plan grid.yaml --world-size 64 --json
  commgrid plan --tp 2 --ranks 0-2,4,5,7
  commgrid plan --tp 16 --world-size 64 --cluster h100
  commgrid plan --tp 8 --world-size 64 --gpus-per-node 4
  commgrid plan --auto --model gpt-175b --batch 1536 --cluster h100 --world-size 1024
  commgrid plan --auto --model llama3-70b --cluster h100 --nodes 32 -o grid.yaml
  commgrid plan --model gpt-175b --cluster h100 --tp 8 --pp 8 --world-size 128 --why

Nothing is started and torch is not needed: any number of ranks plans in milliseconds.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_grid_options(parser)
    parser.add_argument(
        "-o", "--output", type=file_of(".yaml", ".yml", *SUFFIXES), action="append", default=[],
        metavar="FILE",
        help="GRID.yaml: the grid, or the best of --auto, for initialize(config=...); .svg, .png "
        "or .pdf: the steps' times in parts; may be repeated",
    )  # fmt: skip
    add_cluster_options(parser)
    plan_options.add_options(parser)


def run(args: argparse.Namespace) -> int:
    read_nodes(args)
    has_steps = args.auto or args.model is not None
    for path in args.output:
        if path.suffix in SUFFIXES and not has_steps:
            raise SpecError(f"-o {path}: a picture is of a step's time; add --model NAME")
    if has_steps:
        from commgrid.cli.commands import plan_model  # only a step needs it

        return plan_model.run(args, as_text)
    refuse_unused(args, plan_options.FLAGS, "says how a step of a model is run; give --model NAME")
    given = read_spec(args)
    spec = resolve(given, args.world_size)
    cluster = read_cluster(args)
    if cluster is not None:
        from commgrid.cost_model.crossing import check_within

        check_within(spec, cluster)
    for path in args.output:
        write_grid(path, given, f"of `commgrid {shlex.join(args.words)}`")
    give(
        args,
        lambda: as_json(spec, cluster, why=args.why),
        lambda: "\n".join([as_text(spec, cluster, why=args.why), *written(args.output)]),
    )
    return 0


def as_json(spec: GridSpec, cluster: Cluster | None = None, *, why: bool = False) -> dict[str, Any]:
    """The plan for machines."""
    told = {"why": [asdict(each) for each in _why(spec)]} if why else {}
    held, connecting = _counts(spec)
    placed: dict[str, Any] = {}
    if cluster is not None:
        from commgrid.cli.commands import plan_cluster

        placed = plan_cluster.as_json(spec, cluster)
    return {
        "version": 2,  # 1 had what `share` saves, and open files
        "world_size": spec.world_size,
        "spec": spec.to_dict(),
        "groups": {
            name: {"size": group.size(spec.layouts[group.region].shape),
                   "count": _group_count(spec, name)}
            for name, group in _plans(spec)[0].created.items()
        },
        "communicators": [
            {"names": list(c.names), "size": c.size, "connect": c.connect,
             "options": c.options.to_dict()}
            for c in _kinds(spec)
        ],
        "per_rank": {"communicators": held, "connect": connecting},
        "nccl_gb": [connecting * gb for gb in NCCL_GB],
        "savings": [
            {"change": change, "communicators": fewer, "connect": connects}
            for change, fewer, connects in _savings(spec)
        ],
        **placed,
        **told,
    }  # fmt: skip


def as_text(
    spec: GridSpec,
    cluster: Cluster | None = None,
    *,
    why: bool = False,
) -> str:
    """The plan as a table a person reads, with the cost below it."""
    lines = [several(spec.world_size, "rank")]
    if spec.ranks is not None:
        lines[0] += f": {listed_ranks(spec.layout('dense').ranks)}"
    lines += [f"  {region}" for region in spec.regions]
    found: Mapping[str, Crossing] = {}
    below: list[str] = []
    if cluster is not None:
        from commgrid.cli.commands import plan_cluster
        from commgrid.cost_model.crossing import find_crossings

        found = find_crossings(spec, cluster)
        below = ["", *plan_cluster.as_lines(spec, cluster, found, _kinds(spec))]
    elif spec.constraints:
        rules = ", ".join(f"{name}={level}" for name, level in spec.constraints.items())
        below = [
            "", f"within {rules}: checked at start; here with --cluster or --gpus-per-node"
        ]  # fmt: skip
    heads = f"  {'size':>7} {'groups':>8}  {'starts':<9} "
    lines += ["", f"{heads}{_within('within', found)}names of one communicator"]
    small = [c for c in _kinds(spec) if c.size == 1]
    for communicator, *others in _of_equal_ranks(spec):
        count = _group_count(spec, communicator.name, communicator.size)
        when = "connects" if communicator.connect else "first use"
        level = found[communicator.name].level.name if found else ""
        numbers = f"  {communicator.size:7,} {count:8,}  {when:<9} "
        lines.append(f"{numbers}{_within(level, found)}{names_of(communicator, others)}")
    if small:
        alone = [name for c in small for name in c.names]
        count = max(_group_count(spec, name, 1) for name in alone)
        numbers = f"  {1:7} {count:8,}  {'never':<9} "
        lines.append(f"{numbers}{_within('', found)}{', '.join(alone)}")
    lines += [*below, "", *_cost(spec)]
    if why:
        from commgrid.cost_model.why import as_lines

        lines += as_lines(_why(spec))
    return "\n".join(lines)


def _within(level: str, found: Mapping[str, Crossing]) -> str:
    """The column that says which level's unit holds a whole group; nothing without a cluster."""
    if not found:
        return ""
    return f"{level:<{max(len('within'), *(len(c.level.name) for c in found.values()))}}  "


def _why(spec: GridSpec) -> list[Why]:
    """Where the numbers of memory are from."""
    from commgrid.cost_model.calibration import SOURCES
    from commgrid.cost_model.why import Why

    _, connecting = _counts(spec)
    low, high = (connecting * gb for gb in NCCL_GB)
    return [
        Why(
            "device memory",
            f"{low:.1f}-{high:.1f} GB",
            f"{connecting} communicators that connect · {NCCL_GB[0]} to {NCCL_GB[1]} GB; what "
            "another create, connect or share saves is computed in the same way",
            SOURCES["nccl"],
        ),
    ]


def _cost(spec: GridSpec) -> list[str]:
    held, connecting = _counts(spec)
    low, high = (connecting * gb for gb in NCCL_GB)
    lines = [
        "Start-up, per rank:",
        f"  {several(held, 'communicator')}, {connecting} of which connect "
        f"(create={_show(spec.create)}, connect={_show(spec.connect)}, share={spec.share})",
        f"  over NCCL about {low:.1f} to {high:.1f} GB of device memory ({NCCL_GB[0]} to "
        f"{NCCL_GB[1]} GB each has been reported), and as much again for each later connection",
    ]
    savings = _savings(spec)
    if not savings:
        return [*lines, "  no other create, connect or share would save anything"]
    change, fewer, connects = savings[0]
    less = f", {_gb(connecting - connects)} less at start" if connecting > connects else ""
    left = several(fewer, "communicator")
    return [*lines, f"  {change} saves most: {left}, {connects} connect{less}"]


def _gb(communicators: int) -> str:
    return " to ".join(f"{communicators * gb:.1f}" for gb in NCCL_GB) + " GB"


def _show(choice: str | tuple[str, ...]) -> str:
    return choice if isinstance(choice, str) else ",".join(choice)


@lru_cache(maxsize=16)  # tables and sums of one output ask again
def _plans(spec: GridSpec) -> tuple[GroupPlan, ...]:
    """Plans of one rank for each way of being in picks and lists, which leave ranks out."""
    layouts = spec.layouts
    picks = [d for d in spec.definitions.values() if d.pick and d.lists is None]
    sizes: dict[int, dict[str, int]] = {}
    for definition in spec.definitions.values():
        for members in definition.lists or ():
            for position in definition.places(len(members)):
                sizes.setdefault(members[position], {})[definition.name] = len(members)

    def way(rank: int) -> tuple[object, ...]:
        picked = (rank in d.ranks(layouts[d.region], rank) for d in picks)
        return (*picked, *sizes.get(rank, {}).items())

    first = spec.grid_ranks[0]
    waiting = [first, *sizes]
    found: dict[tuple[object, ...], int] = {}
    while waiting:
        rank = waiting.pop()
        if (known := way(rank)) not in found:
            found[known] = rank
            for definition in picks:
                waiting += definition.ranks(layouts[definition.region], rank)
    return tuple(GroupPlan.for_rank(spec, rank) for rank in sorted({first, *found.values()}))


def _kinds(spec: GridSpec) -> list[PlannedCommunicator]:
    """One communicator of each kind in creation order, with the names that it has on any rank."""
    order = list(spec.definitions)
    found: dict[tuple[str, int], PlannedCommunicator] = {}
    for plan in _plans(spec):
        for communicator in plan.communicators:
            key = (communicator.name, communicator.size)
            known = found.setdefault(key, communicator)
            names = {*known.names, *communicator.names}
            found[key] = replace(known, names=tuple(name for name in order if name in names))
    return sorted(found.values(), key=lambda c: (order.index(c.name), -c.size))


def _of_equal_ranks(spec: GridSpec) -> list[list[PlannedCommunicator]]:
    """The communicators of several ranks, those together that have equal ranks."""
    found: dict[object, list[PlannedCommunicator]] = {}
    for communicator in _kinds(spec):
        if communicator.size > 1:
            name, definition = communicator.name, spec.definitions[communicator.name]
            alike: object = (name, communicator.size)
            if definition.pick is None and definition.lists is None:
                members = [plan.members[name] for plan in _plans(spec) if name in plan.members]
                alike = (definition.region, *members)
            found.setdefault(alike, []).append(communicator)
    return list(found.values())


def _counts(spec: GridSpec) -> tuple[int, int]:
    """The most communicators that a rank holds, and the most that connect."""
    held = [plan.communicators for plan in _plans(spec)]
    return max(map(len, held)), max(sum(c.connect for c in each) for each in held)


def _savings(spec: GridSpec) -> list[tuple[str, int, int]]:
    """Changes of create, connect and share that save something, with their counts; those with
    fewest connections at start come first."""
    axes = tuple(dict.fromkeys(axis for region in spec.regions for axis in region.axes))
    connects = "" if spec.connect == "axes" else " with connect=axes"
    other: dict[str, GridSpec] = {
        "connect=none": replace(spec, connect="none"),
        "share=region": replace(spec, share="region"),
        "share=all": replace(spec, share="all"),
        f"create={','.join(axes)}{connects}": replace(spec, create=axes, connect="axes"),
    }
    held, connecting = _counts(spec)
    counted = [(change, *_counts(tried)) for change, tried in other.items()]
    better = [row for row in counted if row[1] < held or row[2] < connecting]
    return sorted(better, key=lambda row: (row[2], row[1]))


def _group_count(spec: GridSpec, name: str, size: int | None = None) -> int:
    """How many groups of this name there are, and of listed ones of this size.

    A pick leaves some ranks out.
    """
    definition = spec.definitions[name]
    if definition.lists is not None:
        layout = spec.layout(definition.region)
        return sum(size in (None, len(group)) for group in definition.all_ranks(layout))
    whole = replace(definition, pick=None).size(spec.layouts[definition.region].shape)
    return spec.world_size // whole
