"""The steps that torch takes to redistribute a DTensor, as its private planner gives them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from commgrid.errors import CommGridError

_PLANNER = "torch.distributed.tensor._redistribute"
_SPEC = "torch.distributed.tensor._dtensor_spec"


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
        planner: Any = import_module(_PLANNER)
        types: Any = import_module(_SPEC)
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
