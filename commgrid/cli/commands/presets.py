"""`commgrid presets`: the grids that others use, and any of them as YAML."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping

from commgrid.cli.grid_options import add_sizes, read_sizes, refuse_unused
from commgrid.cli.output import columns, give
from commgrid.planning.presets import PRESETS, Preset
from commgrid.planning.region import SIZED
from commgrid.planning.spec import GridSpec

DESCRIPTION = "Lists the presets, or prints one as YAML to start one's own from."
EXAMPLES = """examples:
  commgrid presets
  commgrid presets hsdp > grid.yaml
  commgrid presets megatron --tp 8 --pp 4 > grid.yaml
  commgrid plan --preset hsdp --dp-shard 4 --world-size 32

Sizes are laid over a preset: --tp 8, or initialize(preset="megatron", tp=8).
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="the one to print as YAML")
    add_sizes(parser.add_argument_group("sizes", "of the YAML that is printed"))


def run(args: argparse.Namespace) -> int:
    if args.name is None:
        refuse_unused(args, SIZED, "is a size of one preset; give its NAME")
    chosen = list(PRESETS.values()) if args.name is None else [PRESETS.find(args.name)]
    sizes = read_sizes(args)
    for one in chosen:
        GridSpec.from_dict(one.with_sizes(sizes))  # refuses sizes that are none
    found = {
        "presets": [
            {"name": one.name, "summary": one.summary, "source": one.source,
             "spec": one.with_sizes(sizes)}
            for one in chosen
        ]
    }  # fmt: skip
    if args.name is None:
        give(args, lambda: found, lambda: as_table(columns()))
    else:
        give(args, lambda: found, lambda: as_yaml(chosen[0], sizes))
    return 0


def as_table(width: int | None) -> str:
    """A paragraph for each: the name, axes fastest first with their sizes, and what it is for."""
    names = max(map(len, PRESETS))
    lines = ["presets: axes fastest first, n is what the ranks leave"]
    for one in PRESETS.values():
        spec = GridSpec.from_dict(one.with_sizes({}))
        regions = [
            " · ".join(f"{axis} {_size(size)}" for axis, size in region.sizes if axis in one.axes)
            for region in spec.regions
        ]
        head = f"  {one.name:{names}}  {'; experts '.join(regions)}"
        told = textwrap.wrap(one.summary, max((width or 100) - names - 4, 30))
        lines += [head, *(f"  {'':{names}}  {line}" for line in told)]
    return "\n".join(lines)


def as_yaml(preset: Preset, sizes: Mapping[str, int]) -> str:
    """A file to start from, some of its sizes others."""
    import yaml

    config = preset.with_sizes(sizes)
    text = str(yaml.safe_dump(config, sort_keys=False, default_flow_style=None)).rstrip()
    return f"# {preset.name}: {preset.summary}\n# after {preset.source}\n{text}"


def _size(size: int | str) -> str:
    return "n" if size == -1 else str(size)
