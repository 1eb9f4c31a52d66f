"""`commgrid diff`: what changes between two grids."""

from __future__ import annotations

import argparse
import os
from typing import Any

from commgrid.cli import plan_model
from commgrid.cli.flags import whole
from commgrid.cli.grid_options import (
    add_cluster_options,
    new_command,
    read_changes,
    read_nodes,
    refuse_unused,
    resolve,
)
from commgrid.cli.output import give
from commgrid.errors import SpecError
from commgrid.layout.axis_names import nearest
from commgrid.planning.diff import compare
from commgrid.planning.presets import PRESETS
from commgrid.planning.spec import GridSpec

_EXAMPLES = """examples:
  commgrid diff old.yaml new.yaml --world-size 64
  commgrid diff grid.yaml --set axes.tp=4 --world-size 64
  commgrid diff megatron torchtitan --world-size 64
  commgrid diff megatron --set axes.tp=4 --world-size 64 --model llama3-70b --cluster h100

Nothing is started and torch is not needed.
"""


def add_parser(commands: Any) -> None:
    parser = new_command(
        commands,
        "diff",
        description="Compares two grids: which names keep their ranks, and who gets other peers.",
        examples=_EXAMPLES,
        run=run,
    )
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
        give(args, found.to_dict, lambda: str(found))
        return 0
    model, cluster = plan_model.read_job(args)
    old, new = (plan_model.given_step(spec, model, cluster) for spec in (before, after))
    give(
        args,
        lambda: {**found.to_dict(), "steps": {
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
