"""DTensors in torch's private state: steps to redistribute one, FSDP2's divisors of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Placement

from commgrid.errors import CommGridError

Placed = tuple[DeviceMesh, Sequence[Placement]]
"""A mesh, and a placement for each of its dims."""


def steps_of(source: Placed, target: Placed, shape: Sequence[int], dtype: torch.dtype) -> list[Any]:
    """Return torch's steps from some placements to others.

    Args:
        shape, dtype: of the full tensor, which is contiguous.

    Raises:
        CommGridError: this version of torch has no such planner.
    """
    try:
        planner: Any = import_module("torch.distributed.tensor._redistribute")
        types: Any = import_module("torch.distributed.tensor._dtensor_spec")
        strides = tuple(torch.empty(tuple(shape), device="meta").stride())
        meta = types.TensorMeta(torch.Size(shape), strides, dtype)
        specs = [
            types.DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
            for mesh, placements in (source, target)
        ]
        steps: list[Any] = planner._gen_transform_infos(*specs)
        optimized = planner._optimize_transform_infos(
            steps, source[0], tuple(source[1]), tuple(target[1])
        )
    except (ImportError, AttributeError) as error:
        raise CommGridError(
            f"torch {torch.__version__} plans redistributions in another way than commgrid knows "
            f"({error}); redistribute() works, plan() needs torch 2.11 to 2.15"
        ) from error
    return list(optimized)


def gradient_divisors(module: FSDPModule) -> dict[nn.Module, float]:
    """The numbers by which FSDP2 divides sums of gradients, for each module of its root.

    Only modules with trained parameters of their own, and none before the first forward, when torch
    has no root yet, where a module has several meshes, or of a torch that keeps them otherwise.
    """
    found: dict[nn.Module, float] = {}
    with suppress(AttributeError):
        state: Any = module._get_fsdp_state()
        for each in state._state_ctx.all_states:
            with suppress(AssertionError):
                group = each._fsdp_param_group
                for one in group.fsdp_params if group is not None else ():
                    if one.sharded_param.requires_grad:
                        found[one._module_info.module] = _divisor(group, one)
    return found


def _divisor(group: Any, one: Any) -> float:
    """The divisor of a group of parameters, of which `one` is a member."""
    mesh, factor = group.mesh_info.mesh, group.gradient_divide_factor
    if factor is None:
        return float(mesh.size())
    # On one rank torch divides itself, and again where it would not let the collective do it.
    dim = group.mesh_info.shard_mesh_dim
    alone = dim is None or mesh.size(dim) == 1
    dtype = one.reduce_dtype or one.param_dtype or one.orig_dtype
    twice = group.force_sum_reduction_for_comms or dtype not in (torch.float32, torch.bfloat16)
    return float(factor) ** 2 if alone and twice else float(factor)
