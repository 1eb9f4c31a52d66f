"""`commgrid explain`: where one rank sits, and who its peers are in every group."""

from __future__ import annotations

import argparse
from typing import Any

from commgrid.cli.grid_options import add_command, read_spec, resolve
from commgrid.cli.output import give
from commgrid.errors import SpecError
from commgrid.planning.plan import GroupPlan
from commgrid.planning.summary import around, several, where

_EXAMPLES = """examples:
  commgrid explain --tp 2 --pp 2 --world-size 16 --rank 5
  commgrid explain grid.yaml --world-size 64 --rank 37 --json
  commgrid explain --tp 2 --ranks 5,2,0,7 --rank 7
"""


def add_parser(commands: Any) -> None:
    parser = add_command(
        commands,
        "explain",
        summary="one rank's coordinate, and its peers in every group",
        description="Shows one rank's coordinate and the ranks it shares each group with.",
        examples=_EXAMPLES,
        run=run,
    )
    parser.add_argument("--rank", required=True, metavar="R", help="the global rank")


def run(args: argparse.Namespace) -> int:
    spec = resolve(read_spec(args), args.world_size)
    if not args.rank.isdigit():
        raise SpecError(f"--rank {args.rank}: expected a rank from 0 on")
    plan = GroupPlan.for_rank(spec, int(args.rank))
    give(args, lambda: as_json(plan), lambda: as_text(plan))
    return 0


def as_json(plan: GroupPlan) -> dict[str, Any]:
    """The rank for machines; the shape is part of the contract."""
    return {
        "rank": plan.rank,
        "world_size": plan.spec.world_size,
        "coordinate": plan.coordinate,
        "groups": {name: list(ranks) for name, ranks in plan.groups.items()},
        "communicators": len(plan.communicators),
    }


def as_text(plan: GroupPlan) -> str:
    """The rank as a table: one line a communicator, this rank in brackets."""
    lines = [f"rank {plan.rank} of {plan.spec.world_size:,}: {where(plan)}", ""]
    width = min(44, max(len(", ".join(c.names)) for c in plan.communicators))
    for communicator in plan.communicators:
        names = ", ".join(communicator.names)
        lines.append(f"  {names:{width}}  {around(communicator.members, plan.rank)}")
    absent = [name for name in plan.created if name not in plan.members]
    if absent:
        lines.append(f"  not in: {', '.join(absent)}")
    return "\n".join([*lines, "", several(len(plan.communicators), "communicator")])
