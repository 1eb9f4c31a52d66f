"""Slices made by other libraries, which look like whole parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from commgrid.parameters.sharded_module import ShardedModule

if TYPE_CHECKING:
    from commgrid.runtime.grid import HyperCommGrid


@dataclass(frozen=True)
class Foreign:
    """The library that has sliced a parameter.

    Args:
        what: description for a message: `is a slice of Megatron-core's`.
        instead_of_saving, instead_of_reducing: the library's own function for that.
    """

    what: str
    instead_of_saving: str
    instead_of_reducing: str


def foreign_slice(
    module: nn.Module, parameter: nn.Parameter, grid: HyperCommGrid
) -> Foreign | None:
    """The library that sliced a parameter that looks whole; None: it is no such slice.

    Args:
        module: the parameter's module.
        parameter: sharded by FSDP2 or not.
        grid: its grid; without tensor parallelism there a marked parameter is whole.
    """
    mesh = getattr(module, "_hf_device_mesh", None)
    if type(parameter).__name__ == "FlatParameter":
        return Foreign("is FSDP1's", "use fully_shard, FSDP2", "FSDP's own gradient reduction")
    if isinstance(module, ShardedModule):
        return None
    cut = "tp" not in grid.shape or grid.size("tp") > 1
    if cut and getattr(parameter, "tensor_model_parallel", False):
        return Foreign(
            "is a slice of Megatron-core's",
            "save it with megatron.core.dist_checkpointing",
            "megatron.core's DistributedDataParallel",
        )
    if getattr(module, "_hf_tp_plan", None) and (mesh is None or mesh.size() > 1):
        return Foreign(
            "is a slice of Transformers' tp_plan's",
            "save it with its save_pretrained",
            "torch's FSDP2 or DistributedDataParallel",
        )
    return None
