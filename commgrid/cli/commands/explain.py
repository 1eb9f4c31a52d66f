"""`commgrid explain`: where one rank sits, and who its peers are in every group."""

from __future__ import annotations

import argparse
import math
from typing import Any

from commgrid.cli.flags import whole
from commgrid.cli.grid_options import (
    add_cluster_options,
    add_grid_options,
    read_cluster,
    read_nodes,
    read_spec,
    resolve,
)
from commgrid.cli.output import give, names_of
from commgrid.cost_model.cluster import Cluster
from commgrid.cost_model.crossing import check_within
from commgrid.errors import SpecError
from commgrid.layout.ranks import Ranks, RankSet, highest_rank
from commgrid.planning.plan import GroupPlan, PlannedCommunicator
from commgrid.wording import around, several

DESCRIPTION = "Shows one rank's coordinate and the ranks it shares each group with."
EXAMPLES = """examples:
  commgrid explain --tp 2 --pp 2 --world-size 16 --rank 5
  commgrid explain grid.yaml --world-size 64 --rank 37 --json
  commgrid explain --tp 2 --ranks 5,2,0,7 --rank 7
  commgrid explain --tp 8 --pp 4 --world-size 4096 --rank 37 --cluster h100
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_grid_options(parser)
    parser.add_argument(
        "--rank", type=whole(0), default=0, metavar="R", help="the global rank (default 0)"
    )
    add_cluster_options(parser)


def run(args: argparse.Namespace) -> int:
    read_nodes(args)
    spec, cluster = resolve(read_spec(args), args.world_size), read_cluster(args)
    plan = GroupPlan.for_rank(spec, args.rank)
    if cluster is not None:
        cluster.check_placed(spec)
        check_within(spec, cluster)
    if args.json and (listed := sum(map(len, plan.members.values()))) > _MOST_LISTED:
        raise SpecError(
            f"--json: would list {listed:,} ranks, and at most {_MOST_LISTED:,} are listed; leave "
            "it out"
        )
    give(args, lambda: as_json(plan, cluster), lambda: as_text(plan, cluster))
    return 0


_MOST_LISTED = 20_000_000


def as_json(plan: GroupPlan, cluster: Cluster | None = None) -> dict[str, Any]:
    """The rank for machines; the shape is part of the contract."""
    found: dict[str, Any] = {
        "rank": plan.rank,
        "world_size": plan.spec.world_size,
        "coordinate": plan.coordinate,
        "groups": {name: list(ranks) for name, ranks in plan.groups.items()},
        "communicators": len(plan.communicators),
    }
    if cluster is not None:
        found["node"] = cluster.node(plan.rank)
        found["within"] = {name: _level(cluster, ranks) for name, ranks in plan.members.items()}
    return found


def as_text(plan: GroupPlan, cluster: Cluster | None = None) -> str:
    """The rank as a table: a line for each set of peers, this rank in brackets."""
    lines = [f"rank {plan.rank} of {plan.spec.world_size:,}: {plan.place}"]
    if cluster is not None:
        nodes = cluster.node(highest_rank(plan.spec.grid_ranks)) + 1
        lines.append(f"on node {cluster.node(plan.rank)} of {nodes:,}; *: on another node")
    lines.append("")
    rows: dict[Ranks, list[PlannedCommunicator]] = {}
    for communicator in plan.communicators:
        rows.setdefault(communicator.members, []).append(communicator)
    told = {members: names_of(first, others) for members, (first, *others) in rows.items()}
    width = min(44, max(map(len, told.values()), default=0))
    levels = 0 if cluster is None else max(len(level.name) for level in cluster.levels)
    for members, names in told.items():
        if cluster is None:
            peers = around(members, plan.rank)
        else:
            level = _level(cluster, members) if len(members) > 1 else ""
            peers = f"{level:{levels}}  {_around(cluster, members, plan.rank)}"
        lines.append(f"  {names:{width}}  {peers}")
    absent = [name for name in plan.created if name not in plan.members]
    if absent:
        lines.append(f"  not in: {', '.join(absent)}")
    return "\n".join([*lines, "", several(len(plan.communicators), "communicator")])


def _level(cluster: Cluster, ranks: Ranks) -> str:
    """The lowest level of which one unit holds the whole group."""
    # All others are between these two, and units have no gaps.
    ends = (min(ranks) if isinstance(ranks, tuple) else ranks[0], highest_rank(ranks))
    return cluster.levels[cluster.span(ends).place].name


def _around(cluster: Cluster, members: Ranks, rank: int) -> str:
    """The members, those on other nodes marked; of many, how many are on this one."""
    node = cluster.node(rank)
    text = around(members, rank, lambda other: cluster.node(other) != node)
    if not text.endswith(" ranks)"):
        return text
    unit = cluster.unit_size(cluster.node_level)
    if math.isinf(unit):
        return text
    held = members if isinstance(members, RankSet) else frozenset(members)
    here = sum(other in held for other in range(node * int(unit), (node + 1) * int(unit)))
    return f"{text[:-1]}, {here} on this node)"
