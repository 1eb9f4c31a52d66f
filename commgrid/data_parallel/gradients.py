"""Gradients averaged over the ranks that saw different data, and their norm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commgrid.collectives import Group, resolve
from commgrid.tensor_parallel import sharded_parameters

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from commgrid.grid import HyperCommGrid


_ZERO = torch.zeros((), dtype=torch.float64)


def average_gradients(
    parameters: Iterable[nn.Parameter],
    group: Group = "dp_cp",
    *,
    grid: HyperCommGrid | None = None,
    bucket_bytes: int = 25 * 2**20,
) -> None:
    """Replaces every gradient by its average over the group.

    Gradients travel together in buckets, last parameters first as backward makes them.
    All ranks must hold gradients for the same parameters.

    Args:
        parameters: those without a gradient are passed over.
        group: the ranks that saw different data.
        grid: where to look the group's name up; None: the default grid.
        bucket_bytes: how many bytes of gradients travel at once.
    """
    members = resolve(group, grid)
    if members.size() == 1:
        return
    gradients = [p.grad for p in parameters if p.grad is not None]
    for bucket in _buckets(gradients[::-1], bucket_bytes):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat, group=members)
        flat.div_(members.size())
        parts = torch.split(flat, [gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def _buckets(gradients: Iterable[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Runs of gradients of one dtype and device, each of at most `limit` bytes if it can be."""
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        kind = (gradient.dtype, gradient.device)
        if bucket and (
            size + gradient.nbytes > limit or kind != (bucket[0].dtype, bucket[0].device)
        ):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket


def gradient_norm(model: nn.Module) -> Tensor:
    """The 2-norm of all gradients of the unsharded model, the same on every rank.

    A sharded parameter's slices are summed over the group it is sharded over, a replicated
    one counts once. Gradients must be averaged over the data-parallel group already.

    Returns:
        A float64 tensor of shape () on the gradients' device.
    """
    sharded = {id(s.parameter): s.group.group for s in sharded_parameters(model)}
    squares: dict[ProcessGroup | None, Tensor] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            gradient = parameter.grad
            exact = gradient.dtype if gradient.dtype == torch.float64 else torch.float32
            square = torch.linalg.vector_norm(gradient, dtype=exact).double().square()
            group = sharded.get(id(parameter))
            squares[group] = squares[group] + square if group in squares else square
    for group, square in squares.items():
        if group is not None and group.size() > 1:
            dist.all_reduce(square, group=group)
    return torch.stack(list(squares.values())).sum().sqrt() if squares else _ZERO.clone()
