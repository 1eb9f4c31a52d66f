"""Gradients that are parts of a sum over a model-parallel group, such as norms' under sequence
parallelism, for training without a GradientReducer: with FSDP2, DDP, or one data-parallel rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from commgrid.data_parallel.accumulation import owner_of
from commgrid.data_parallel.norm import local_of
from commgrid.errors import CommGridError
from commgrid.parameters import placements


@torch.no_grad()
def reduce_partial_gradients(model: nn.Module) -> None:
    """Sums each partial gradient in `.grad` over the group that its parameter was marked with.

    Call it once a step, after backward, before norms and the optimizer; one all-reduce for each
    group and dtype. The sum over other data may come before or after.

    Args:
        model: its parameters, or FSDP2's parts of them, have a gradient on all ranks of their
            group or on none.

    Raises:
        CommGridError: a GradientReducer does it already.
    """
    found: dict[tuple[ProcessGroup, torch.dtype], list[Tensor]] = {}
    for placement in placements(model):
        partial, gradient = placement.partial, placement.parameter.grad
        if partial is None or partial.size == 1 or gradient is None:
            continue
        if owner_of(placement.parameter) is not None:
            raise CommGridError(
                f"{placement}: its GradientReducer has added it up over {partial} already"
            )
        local = local_of(gradient)
        found.setdefault((partial.group, local.dtype), []).append(local)
    for (group, _), gradients in found.items():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=group)
        for gradient, total in zip(
            gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True
        ):
            gradient.copy_(total.view_as(gradient))
