"""The same initial weights on any grid.

A sharded layer draws its full weight and keeps its slice, so what it draws must not
depend on how many ranks share it, nor on which layers this rank happens to build. Each
module therefore gets a random stream of its own, seeded by the job's seed and the
module's name in the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from commgrid.group_ref import GroupRef


@dataclass(frozen=True)
class ShardedParameter:
    """Where a parameter is a slice of a larger one: along `dim`, over `group`."""

    name: str
    parameter: nn.Parameter
    dim: int
    group: GroupRef


class ShardedModule(nn.Module):
    """A module that says which of its parameters are slices.

    Subclasses set `group` and `shard_dims`, parameter name to the dim it is sliced along;
    parameters not in it are equal on all ranks of the group.
    """

    group: GroupRef
    shard_dims: ClassVar[Mapping[str, int]]


def sharded_parameters(model: nn.Module) -> Iterator[ShardedParameter]:
    """Every parameter of `model` that is a slice, a parameter shared by modules once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        if isinstance(module, ShardedModule):
            for name, dim in module.shard_dims.items():
                parameter = getattr(module, name)
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    full = f"{prefix}.{name}" if prefix else name
                    yield ShardedParameter(full, parameter, dim, module.group)


def initialize_parameters(model: nn.Module, seed: int) -> None:
    """Draws every parameter anew, the same full weights on any grid.

    Calls `reset_parameters()` of each module that has it, with torch's random state
    seeded by `seed` and the module's name; the state is left as it was.

    Args:
        model: built on every rank with the same module names.
        seed: the same on every rank.
    """
    for name, module in model.named_modules():
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            with torch.random.fork_rng():
                torch.manual_seed(int.from_bytes(digest[:8], "big", signed=True))
                reset()
