"""The arguments of a transfer on this rank: grids, devices, shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from commgrid.errors import SpecError, TransferError
from commgrid.resharding.local_boxes import LocalBoxes
from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.registry import get_grid
from commgrid.torch_compat import groups as torch_groups
from commgrid.transfer.models import Model

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def grids_of(
    source: Model | None,
    target: Model | None,
    source_grid: HyperCommGrid | None,
    target_grid: HyperCommGrid | None,
) -> dict[str, HyperCommGrid]:
    """This rank's grid of each side that it is on."""
    found: dict[str, HyperCommGrid] = {}
    for side, model, grid in (("source", source, source_grid), ("target", target, target_grid)):
        if grid is not None and not isinstance(grid, HyperCommGrid):
            raise SpecError(f"{side}_grid={grid!r}: expected a grid, or None on other ranks")
        if grid is not None or model is not None:
            found[side] = grid or get_grid()
    if not found:
        raise SpecError(
            "Transfer(None, None): call it on the ranks of the two grids alone, each with its "
            "part of the model; a rank without a part gives its grid"
        )
    return found


def device_of(group: ProcessGroup, used: frozenset[str]) -> torch.device:
    """The device of messages: the GPU if the group can send from it and all tensors are there."""
    kinds = {device.type: device for device in torch_groups.devices_of(group)}
    if "cuda" in kinds and ("cpu" not in kinds or used <= {"cuda"}):
        return kinds["cuda"]
    return kinds["cpu"]


def refuse_shared_memory(source: LocalBoxes | None, target: LocalBoxes | None) -> None:
    """A target in the source's memory would be overwritten while it is sent."""
    if source is None or target is None:
        return
    sources = source.storages()
    for place, name in target.storages().items():
        if place in sources:
            raise TransferError(
                f"{name} of the target shares its memory with {sources[place]} of the source; give "
                "the target tensors of its own, or leave it out with only="
            )
