"""Every public name: what `__all__` lists, or what a public module without one defines.

`python -m tests.docs.public SITE` fails where the built site lacks one.
"""

from __future__ import annotations

import pkgutil
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import TypeVar

PUBLIC = [
    "commgrid", "commgrid.bridge", "commgrid.checkpoint", "commgrid.collectives",
    "commgrid.context_parallel",
    "commgrid.data_parallel",
    "commgrid.expert", "commgrid.failures", "commgrid.parameters", "commgrid.pipeline",
    "commgrid.cost_model.collective",
    "commgrid.cost_model.redistribution",
    "commgrid.sharding", "commgrid.tensor_parallel", "commgrid.testing", "commgrid.trace",
    "commgrid.transfer", "commgrid.verify",
    "megatron_adapter",
    "megatron_adapter.parallel_state.buffers", "megatron_adapter.parallel_state.getters",
    "megatron_adapter.parallel_state.oddities", "megatron_adapter.parallel_state.rank_groups",
]  # fmt: skip
"""The modules that users import from; Megatron's functions by the module that has them."""


def public_names() -> list[str]:
    """Each with the module that it is imported from, such as `commgrid.initialize`."""
    return [f"{name}.{one}" for name in PUBLIC for one in names_in(pkgutil.resolve_name(name))]


def names_in(module: ModuleType) -> list[str]:
    """What `__all__` lists; without one, what the module defines without an underscore."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return list(listed)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
        and not isinstance(value, TypeVar)
    ]


def missing(site: Path) -> list[str]:
    """Return the public names that the inventory of a built site lacks."""
    lines = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    there = {line.split(" ")[0] for line in zlib.decompress(lines).decode().splitlines()}
    return [name for name in public_names() if name not in there]


if __name__ == "__main__":
    if found := missing(Path(sys.argv[1])):
        sys.exit(f"the site has no entry for {', '.join(found)}: has each a docstring?")
