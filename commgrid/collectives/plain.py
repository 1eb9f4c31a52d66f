"""Collectives along a named group, without gradients; for those, see `pairs`.

They return new tensors, detached from any graph, and leave their inputs alone.

Every function takes `group`, a name or a `ProcessGroup` or a layer's `GroupRef`, and
`grid`, where to look the name up (None: the registry's default grid).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from commgrid.collectives.asynchronous import (
    shares,
    start_all_gather,
    start_all_to_all,
    start_reduce_scatter,
)
from commgrid.collectives.group_ref import GroupRef
from commgrid.errors import ShapeError
from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.registry import get_grid
from commgrid.torch_compat import groups as torch_groups

Group = str | ProcessGroup | GroupRef

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # gloo has no AVG: summed, then divided
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}


def resolve(group: Group, grid: HyperCommGrid | None = None) -> ProcessGroup:
    """The communicator that `group` means."""
    if isinstance(group, str):
        return (grid or get_grid()).get_group(group)
    return group.group if isinstance(group, GroupRef) else group


def all_reduce(
    tensor: Tensor, group: Group = "tp", *, op: str = "sum", grid: HyperCommGrid | None = None
) -> Tensor:
    """The elementwise `op` (sum, avg, max, min, prod) over the group, of the same shape."""
    members = resolve(group, grid)
    if op not in _OPS:
        raise ShapeError(f"op={op!r}: expected one of {', '.join(_OPS)}")
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    if members.size() > 1:
        dist.all_reduce(total, _OPS[op], members)
    return total / members.size() if op == "avg" else total


def all_gather(
    tensor: Tensor, group: Group = "tp", *, dim: int = 0, grid: HyperCommGrid | None = None
) -> Tensor:
    """Every rank's tensor, all of one shape, joined along `dim` in group order.

    Scalars, of shape (), are joined to a vector.
    """
    members = resolve(group, grid)
    tensor = tensor.detach()
    tensor = tensor.reshape(1) if tensor.dim() == 0 else tensor
    return start_all_gather(tensor, members, dim).wait() if members.size() > 1 else tensor.clone()


def reduce_scatter(
    tensor: Tensor, group: Group = "tp", *, dim: int = 0, grid: HyperCommGrid | None = None
) -> Tensor:
    """This rank's slice along `dim` of the sum over the group.

    Raises:
        ShapeError: the group's size does not divide the dim.
    """
    members = resolve(group, grid)
    tensor = tensor.detach()
    return (
        start_reduce_scatter(tensor, members, dim).wait() if members.size() > 1 else tensor.clone()
    )


def all_to_all(
    tensor: Tensor,
    group: Group = "ep",
    *,
    send: Sequence[int] | None = None,
    receive: Sequence[int] | None = None,
    grid: HyperCommGrid | None = None,
) -> Tensor:
    """Sends the i-th slice of dim 0 to rank i of the group; joins received ones in group order.

    Args:
        send: number of rows to each rank; None: equal shares.
        receive: number of rows from each rank; None: equal shares.

    Raises:
        ShapeError: the rows do not add up, or cannot be shared equally.
    """
    members, tensor = resolve(group, grid), tensor.detach()
    if send is None:
        shares(tensor, members, 0)
    elif len(send) != members.size() or sum(send) != tensor.shape[0]:
        raise ShapeError(
            f"send={list(send)} does not share the {tensor.shape[0]} rows of shape "
            f"{tuple(tensor.shape)} among the {members.size()} ranks of group "
            f"{members.group_desc!r}"
        )
    if members.size() == 1:
        return tensor.clone()
    equal = [tensor.shape[0] // members.size()] * members.size()
    return start_all_to_all(tensor, members, send or equal, receive or equal).wait()


def broadcast(
    tensor: Tensor, group: Group = "tp", *, source: int = 0, grid: HyperCommGrid | None = None
) -> Tensor:
    """The tensor of the group's rank number `source` (its position in the group, not global)."""
    members = resolve(group, grid)
    if not 0 <= source < members.size():
        raise ShapeError(
            f"source={source} is outside group {members.group_desc!r} of {members.size()} ranks; "
            "expected a place in it, from 0"
        )
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    if members.size() > 1:
        dist.broadcast(copy, group=members, group_src=source)
    return copy


def barrier(group: Group = "tp", *, grid: HyperCommGrid | None = None) -> None:
    """Returns when every rank of the group has called it."""
    members = resolve(group, grid)
    if members.size() > 1:
        torch_groups.barrier(members)
