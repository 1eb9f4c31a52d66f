"""The flags of a grid and of a cluster, for every command."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from commgrid.advisor.cluster import CLUSTERS, Cluster, find_cluster, nodes_of
from commgrid.cli.commands import COMMANDS
from commgrid.cli.terminal import fit
from commgrid.errors import SpecError
from commgrid.planning.constraints import BY_RANK, PLACE_CHOICES
from commgrid.planning.ranks import as_ranks
from commgrid.planning.region import AXES, SIZED
from commgrid.planning.spec import (
    CONNECT_CHOICES,
    DEFAULT_ORDER,
    DEFAULT_SHARE,
    SHARE_CHOICES,
    GridSpec,
)
from commgrid.planning.yaml_io import read_change


class _Help(argparse.RawDescriptionHelpFormatter):
    """argparse's help, whose examples and notes fit the terminal as well."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = textwrap.dedent(text).strip().split("\n\n")
        return "\n\n".join(
            fit(each, width) if "\n  " in each else textwrap.fill(each, width)
            for each in paragraphs
        )


def new_command(
    commands: Any,
    name: str,
    *,
    description: str,
    examples: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    """Adds a command: its help, and `--json`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=COMMANDS[name],
        description=description,
        epilog=examples,
        formatter_class=_Help,
    )
    parser.add_argument("--json", action="store_true", help="print JSON for machines")
    parser.set_defaults(run=run)
    return parser


def add_command(commands: Any, name: str, *, world_size: bool = True, **about: Any) -> Any:
    """Adds a command on a grid: as `new_command`, with the grid's flags."""
    parser = new_command(commands, name, **about)
    add_grid_options(parser, world_size=world_size)
    return parser


def add_grid_options(parser: argparse.ArgumentParser, *, world_size: bool = True) -> None:
    """Adds the grid's flags."""
    grid = parser.add_argument_group("grid", "a YAML file, a preset, or sizes; one size may be -1")
    grid.add_argument("yaml", nargs="?", metavar="GRID.yaml", help="a spec, see docs/yaml.md")
    grid.add_argument(
        "--preset", metavar="NAME", help="a grid that others use; `commgrid presets` lists them"
    )
    grid.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="changes",
        help="another value of a key of the file or preset, such as axes.tp=2; may be repeated",
    )  # fmt: skip
    for name, meaning in ((axis, AXES[axis]) for axis in SIZED):
        flag = f"--{name.replace('_', '-')}"
        grid.add_argument(flag, dest=name, metavar="N", help=meaning)
    grid.add_argument(
        "--axis", action="append", default=[], metavar="NAME=N", help="a further axis, in --order"
    )
    grid.add_argument("--order", help=f"axes, fastest first (default {DEFAULT_ORDER})")
    grid.add_argument("--create", metavar="NAMES", help="all, or names with commas")
    grid.add_argument(
        "--connect",
        metavar="NAMES",
        help=f"{', '.join(CONNECT_CHOICES)}, or names with commas",
    )
    grid.add_argument(
        "--ranks",
        metavar="LIST",
        help="the global ranks in the grid's order, as 0,1,2,4 or 0-3,6 or 0-14/2 (every second); "
        "also beside GRID.yaml, where the key ranks takes the same (default: all)",
    )
    grid.add_argument("--share", help=f"{', '.join(SHARE_CHOICES)} (default {DEFAULT_SHARE})")
    grid.add_argument(
        "--within", action="append", default=[], metavar="NAME=LEVEL",
        help="a group that may not leave a node or another level, as tp=node; may be repeated",
    )  # fmt: skip
    grid.add_argument("--place", help=f"{' or '.join(PLACE_CHOICES)} (default {BY_RANK})")
    if world_size:
        grid.add_argument("--world-size", metavar="N", help="number of ranks, one per device")


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say what the grid runs on."""
    group = parser.add_argument_group("cluster", "what the ranks run on: rank r on device r")
    group.add_argument(
        "--cluster", metavar="NAME|FILE", help=f"{', '.join(CLUSTERS)}, or a YAML file"
    )
    group.add_argument(
        "--gpus-per-node", metavar="N",
        help="devices of a node; `launcher`: as torchrun's or SLURM's variables say",
    )  # fmt: skip
    group.add_argument("--nodes", metavar="N", help="how many, in place of --world-size")


def read_nodes(args: argparse.Namespace) -> None:
    """Set the number of ranks by that of nodes, where it is given.

    Raises:
        SpecError: the number of ranks is given as well, or the size of a node is not known.
    """
    if args.nodes is None:
        return
    if args.world_size is not None:
        raise SpecError(f"--nodes {args.nodes} beside --world-size: give one of them")
    nodes, cluster = whole("nodes", args.nodes, 1), read_cluster(args)
    if cluster is None or math.isinf(cluster.unit_size(cluster.node_level)):
        raise SpecError(
            f"--nodes {nodes}: how many devices a node has is not known; add --cluster NAME or "
            "--gpus-per-node N, or give --world-size"
        )
    args.world_size = str(nodes * cluster.per_node)


def read_cluster(args: argparse.Namespace) -> Cluster | None:
    """The cluster that the flags give; None: none.

    Raises:
        SpecError: naming the flag, or the key of the cluster's file.
    """
    base = None if args.cluster is None else find_cluster(args.cluster)
    if args.gpus_per_node is None:
        return base
    if args.gpus_per_node == "launcher":
        return Cluster.from_launcher(base)
    devices = whole("gpus_per_node", args.gpus_per_node, 1)
    return nodes_of(devices) if base is None else base.with_node(devices)


GRID_FLAGS = (
    *SIZED, "yaml", "preset", "changes", "axis", "order", "create", "connect", "ranks", "share",
    "within", "place", "world_size",
)  # fmt: skip
"""Flags that describe a grid."""


def grid_flags_given(args: argparse.Namespace) -> bool:
    """Whether a file or any flag says something of a grid."""
    return any(getattr(args, key, None) not in (None, []) for key in GRID_FLAGS)


def read_sizes(args: argparse.Namespace) -> dict[str, int]:
    """The sizes that flags give, by axis."""
    return {name: whole(name, getattr(args, name)) for name in SIZED if getattr(args, name)}


def read_spec(args: argparse.Namespace) -> GridSpec:
    """The spec that the flags describe, its sizes perhaps still open.

    Raises:
        SpecError: naming the flag or the file's key.
    """
    sizes: dict[str, Any] = {**read_sizes(args)}
    for given in args.axis:
        name, _, size = given.partition("=")
        if not size:
            raise SpecError(f"--axis {given}: expected NAME=N, such as --axis node=4")
        if name in sizes:
            raise SpecError(f"--axis {given}: {name} is {sizes[name]} already; give it once")
        sizes[name] = whole(f"axis {name}", size)
    rest: dict[str, Any] = {
        k: getattr(args, k) for k in ("order", "share", "place") if getattr(args, k)
    }
    if args.within:
        rest["within"] = levels = dict(map(_level_of, args.within))
        if len(levels) < len(set(args.within)):
            given = " ".join(f"--within {each}" for each in args.within)
            raise SpecError(f"{given}: says two things of a name; keep the lowest level of each")
    for key, words in (("create", ("all",)), ("connect", CONNECT_CHOICES)):
        value = getattr(args, key)
        if value:
            rest[key] = value if value in words else value.split(",")
    changes = dict(map(read_change, args.changes))
    if args.preset is not None:
        if args.yaml is not None:
            raise SpecError(f"--preset {args.preset} beside {args.yaml}: give one of them")
        return GridSpec.from_preset(
            args.preset, ranks=args.ranks, changes={**rest, **changes}, **sizes
        )
    if args.yaml is None:
        if changes:
            raise SpecError(
                f"--set {args.changes[0]}: changes a file or a preset, and there is none; give "
                "GRID.yaml or --preset NAME, or sizes as flags"
            )
        return GridSpec.build(**sizes, **rest, ranks=args.ranks)
    if sizes or rest:
        beside = ", ".join(f"--{key.replace('_', '-')}" for key in (*sizes, *rest))
        raise SpecError(
            f"{beside} beside {args.yaml}: the file describes the whole grid; change it with "
            "--set, as --set axes.tp=2"
        )
    spec = GridSpec.from_yaml(args.yaml, changes=changes)
    return spec if args.ranks is None else replace(spec, ranks=as_ranks(args.ranks))


def resolve(spec: GridSpec, world_size: str | None) -> GridSpec:
    """The spec over `--world-size` ranks, or over the product of its sizes."""
    if world_size is not None:
        return spec.resolve(whole("world_size", world_size))
    if spec.ranks is not None:
        return spec.resolve()
    if not spec.regions[0].is_resolved:
        axis = next(axis for axis, size in spec.regions[0].numbers if size < 1)
        raise SpecError(f"--world-size: needed, since the grid has a size to fill ({axis} is -1)")
    return spec.resolve(spec.world_size)


def refuse_unused(args: argparse.Namespace, flags: Iterable[str], why: str) -> None:
    """Refuse flags that would change nothing.

    Args:
        flags: their names, as `max_memory`.
        why: what they go with, after `it`.

    Raises:
        SpecError: one of them is given.
    """
    for flag in flags:
        given = getattr(args, flag, None)
        if given not in (None, False, []):
            value = "" if given is True else f" {given[0] if isinstance(given, list) else given}"
            raise SpecError(f"--{flag.replace('_', '-')}{value}: would change nothing; it {why}")


def _level_of(given: str) -> tuple[str, str]:
    name, _, level = given.partition("=")
    if not level:
        raise SpecError(f"--within {given}: expected NAME=LEVEL, such as --within tp=node")
    return name, level


def whole(name: str, text: str, least: int | None = None) -> int:
    """The number that a flag gives.

    Args:
        name: of the flag, such as `world_size`.
        text: as typed.
        least: the smallest that is allowed; None: any.

    Raises:
        SpecError: it is none.
    """
    try:
        number = int(text)
    except ValueError:
        number = None
    if number is None or (least is not None and number < least):
        least_one = "" if least is None else f" from {least} on"
        raise SpecError(f"--{name.replace('_', '-')} {text}: expected a whole number{least_one}")
    return number
