"""The flags of a grid and of a cluster, for every command."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from commgrid.cli.flags import names, pair, sized, whole
from commgrid.errors import SpecError
from commgrid.layout.ranks import as_ranks
from commgrid.planning.region import AXES, SIZED
from commgrid.planning.spec import GridSpec
from commgrid.planning.yaml import changed, read_change
from commgrid.planning.yaml_keys import OPTIONS

if TYPE_CHECKING:
    from commgrid.cost_model.cluster import Cluster


def flag_of(key: str) -> str:
    """A flag by its name in Python: `--dp-shard` of `dp_shard`."""
    return f"--{key.replace('_', '-')}"


_ORDER = ("tp", "pp", "dp", "cp", "ep", "etp", "dp_shard", "dp_replicate")
RARE = frozenset({"axis", "create", "connect", "share", "within", "place"})
"""Flags that only `--help-all` shows."""


def add_sizes(parser: Any) -> None:
    """Adds a flag for the size of each axis that has a meaning."""
    for axis in sorted(SIZED, key=_ORDER.index):
        parser.add_argument(flag_of(axis), dest=axis, type=whole(), metavar="N", help=AXES[axis])


def add_grid_options(parser: argparse.ArgumentParser, *, world_size: bool = True) -> None:
    """Adds the grid's flags."""
    parser.usage = f"{parser.prog} [GRID.yaml] [--tp N] [--pp N] [--dp N] [--cp N] [flags]"
    parser.rare = RARE  # type: ignore[attr-defined]
    grid = parser.add_argument_group("grid", "a YAML file, a preset, or sizes; one size may be -1")
    grid.add_argument("yaml", nargs="?", metavar="GRID.yaml", help="a spec, see docs/yaml.md")
    grid.add_argument(
        "--preset", metavar="NAME", help="a grid that others use; `commgrid presets` lists them"
    )
    grid.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="changes",
        help="another value of a key of docs/yaml.md, such as axes.tp=2; may be repeated",
    )  # fmt: skip
    add_sizes(grid)
    grid.add_argument(
        "--axis", action="append", default=[], type=sized, metavar="NAME=N",
        help="a further axis, in --order; may be repeated",
    )  # fmt: skip
    for key, option in OPTIONS.items():
        if option.metavar:
            words = ", ".join(filter(None, (*option.words, option.value)))
            default = "" if option.default is None else f" (default {option.default})"
            repeated: dict[str, Any] = {}
            if "=" in option.metavar:
                level = partial(pair, such_as="NAME=LEVEL, such as --within tp=node")
                repeated = {"action": "append", "default": [], "type": level}
                words = "may be repeated"
            grid.add_argument(
                flag_of(key), metavar=option.metavar, help=f"{option.about}: {words}{default}",
                **repeated,
            )  # fmt: skip
    if world_size:
        grid.add_argument(
            "--world-size", type=whole(), metavar="N", help="number of ranks, one per device"
        )


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say what the grid runs on."""
    group = parser.add_argument_group("cluster", "what the ranks run on: rank r on device r")
    group.add_argument(
        "--cluster", metavar="NAME|FILE", help="a known one such as h100, or a YAML file"
    )
    group.add_argument(
        "--gpus-per-node", type=whole(1), metavar="N",
        help="devices of a node",
    )  # fmt: skip
    group.add_argument(
        "--nodes", type=whole(1), metavar="N", help="how many, in place of --world-size"
    )


def read_nodes(args: argparse.Namespace) -> None:
    """Set the number of ranks by that of nodes, where it is given.

    Raises:
        SpecError: the number of ranks is given as well, or the size of a node is not known.
    """
    if args.nodes is None:
        return
    if args.world_size is not None:
        raise SpecError(f"--nodes {args.nodes} beside --world-size: give one of them")
    cluster = read_cluster(args)
    if cluster is None or math.isinf(cluster.unit_size(cluster.node_level)):
        fix = "--cluster NAME or --gpus-per-node N" if cluster is None else "--gpus-per-node N"
        raise SpecError(
            f"--nodes {args.nodes}: how many devices a node has is not known; add {fix}, or give "
            "--world-size"
        )
    args.world_size = args.nodes * cluster.per_node


def read_cluster(args: argparse.Namespace) -> Cluster | None:
    """The cluster that the flags give; None: none.

    Raises:
        SpecError: naming the flag, or the key of the cluster's file.
    """
    if args.cluster is None and args.gpus_per_node is None:
        return None
    from commgrid.cost_model.cluster import find_cluster, nodes_of  # slow, and often unused

    base = None if args.cluster is None else find_cluster(args.cluster)
    devices = args.gpus_per_node
    if devices is None:
        return base
    return nodes_of(devices) if base is None else base.with_node(devices)


GRID_FLAGS = (
    *SIZED, *(key for key, option in OPTIONS.items() if option.metavar), "yaml", "preset",
    "changes", "axis", "world_size",
)  # fmt: skip
"""Flags that describe a grid."""


def is_given(args: argparse.Namespace, key: str) -> bool:
    """Whether a flag is there."""
    value = getattr(args, key, None)
    return value is not None and value is not False and value != []


def read_sizes(args: argparse.Namespace) -> dict[str, int]:
    """The sizes that flags give, by axis."""
    return {axis: getattr(args, axis) for axis in SIZED if is_given(args, axis)}


def read_spec(args: argparse.Namespace) -> GridSpec:
    """The spec that the flags describe, its sizes perhaps still open.

    Raises:
        SpecError: naming the flag or the file's key.
    """
    sizes: dict[str, Any] = {**read_sizes(args)}
    for name, size in args.axis:
        if name in _ARGUMENTS:
            raise SpecError(
                f"--axis {name}={size}: {name} is an argument of its own; choose another name"
            )
        if name in sizes:
            raise SpecError(f"--axis {name}={size}: {name} is {sizes[name]} already; give it once")
        sizes[name] = size
    options = {
        key: _value(key, getattr(args, key))
        for key, option in OPTIONS.items()
        if option.metavar and key != "ranks" and is_given(args, key)
    }
    changes = read_changes(args.changes)
    if args.ranks is not None and "ranks" in changes:
        raise SpecError(f"--ranks {args.ranks} beside --set ranks: give one of them")
    if args.preset is not None:
        if args.yaml is not None:
            raise SpecError(f"--preset {args.preset} beside {args.yaml}: give one of them")
        for key in options:
            if key in changes:
                raise SpecError(f"{flag_of(key)} beside --set {key}: give one of them")
        return GridSpec.from_preset(
            args.preset, ranks=args.ranks, changes={**options, **changes}, **sizes
        )
    if args.yaml == "":
        raise SpecError("GRID.yaml '': expected the path of a file")
    if args.yaml is None:
        for key in changes:
            own = key.removeprefix("axes.")
            if own in sizes or own in options:
                raise SpecError(f"{flag_of(own)} beside --set {key}: give one of them")
        spec = GridSpec.build(**sizes, **options, ranks=args.ranks)
        return GridSpec.from_dict(changed(spec.to_dict(), changes)) if changes else spec
    if sizes or options:
        beside = ", ".join(map(flag_of, (*sizes, *options)))
        raise SpecError(
            f"{beside} beside {args.yaml}: the file describes the whole grid; change it with "
            "--set, as --set axes.tp=2"
        )
    spec = GridSpec.from_yaml(args.yaml, changes=changes)
    return spec if args.ranks is None else replace(spec, ranks=as_ranks(args.ranks))


_ARGUMENTS = {*OPTIONS, "name", "changes", "cls"} - {"axes", "regions"}
"""Of `GridSpec.build` and `GridSpec.from_preset`, beside sizes."""


def read_changes(given: Iterable[str]) -> dict[str, Any]:
    """The values of `--set` by key.

    Raises:
        SpecError: one is no KEY=VALUE, or a key is there twice.
    """
    found: dict[str, Any] = {}
    for text in given:
        key, value = read_change(text)
        if key in found:
            raise SpecError(f"--set {text}: {key} is set already; give it once")
        found[key] = value
    return found


def _value(key: str, given: Any) -> Any:
    """The value of a flag in the form that a file has."""
    if key == "within":
        if len(dict(given)) < len(set(given)):
            flags = " ".join(f"--within {name}={level}" for name, level in given)
            raise SpecError(f"{flags}: says two things of a name; keep the lowest level of each")
        return dict(given)
    if key not in ("create", "connect") or given in OPTIONS[key].words:
        return given
    if not given.strip(","):
        raise SpecError(f"{flag_of(key)} {given!r}: expected names with commas")
    return names(given)


def resolve(spec: GridSpec, world_size: int | None) -> GridSpec:
    """The spec over `--world-size` ranks, or over the product of its sizes."""
    if world_size is not None:
        return spec.resolve(world_size)
    if spec.ranks is not None:
        return spec.resolve()
    if not spec.regions[0].is_resolved:
        axis = next(axis for axis, size in spec.regions[0].numbers if size < 1)
        raise SpecError(
            f"--world-size: needed, since the grid has a size to fill ({axis} is -1); or give "
            "--nodes 1 with --cluster NAME or --gpus-per-node 8"
        )
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
        if is_given(args, flag):
            given = getattr(args, flag)
            first = given[0] if isinstance(given, list) else given
            if isinstance(first, tuple):
                first = "=".join(map(str, first))
            value = "" if given is True else f" {first}"
            raise SpecError(f"{flag_of(flag)}{value}: would change nothing; it {why}")
