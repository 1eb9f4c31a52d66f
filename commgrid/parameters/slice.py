"""Slice: a parameter and the dims along which it is sliced, with their groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from commgrid.collectives.group_ref import GroupRef
from commgrid.errors import SpecError
from commgrid.layout.rank_text import describe_ranks


@dataclass(frozen=True)
class Slice:
    """A parameter and the dims along which it is sliced; whole if there are none.

    Args:
        name: its first name in the model.
        parameter: this rank's tensor.
        shards: the dims of the full parameter that it is sliced along, each with its group.
    """

    name: str
    parameter: nn.Parameter
    shards: tuple[tuple[int, GroupRef], ...]

    @property
    def num_slices(self) -> int:
        """Number of slices that make up the full parameter."""
        slices = 1
        for _, group in self.shards:
            slices *= group.size
        return slices

    def within(self, ranks: Sequence[int]) -> Iterator[tuple[int, GroupRef, list[int]]]:
        """For each group it is sliced over: dim, group, and its ranks in `ranks`, if several."""
        for dim, group in self.shards:
            both = sorted(set(dist.get_process_group_ranks(group.group)) & set(ranks))
            if len(both) > 1:
                yield dim, group, both

    def __str__(self) -> str:
        return f"{self.name} of shape {tuple(self.parameter.shape)}"


def check_mesh(one: Slice) -> None:
    """Refuses a parameter that FSDP2 has sharded over ranks that hold different slices of it.

    Raises:
        SpecError: names parameter and ranks.
    """
    parameter: Any = one.parameter
    if not isinstance(parameter, DTensor):
        return
    ranks = parameter.device_mesh.mesh.flatten().tolist()
    for dim, group, both in one.within(ranks):
        raise SpecError(
            f"fully_shard over {describe_ranks(ranks)} has taken {one} for one parameter "
            f"of all of them, but {describe_ranks(both)} have different slices of it, cut "
            f"along dim {dim} over {group.name!r}; give it the ranks that have copies, "
            "mesh=grid.device_mesh('dp_cp'), for experts grid.device_mesh('edp')"
        )
