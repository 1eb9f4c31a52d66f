"""Parameters of which several stages have copies, such as embeddings tied to the head.

What each stage's copy finds as gradient is added up over their group. A GradientReducer does that
itself, before its sum over data; without one, this does it at the end of a step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from commgrid.collectives.asynchronous import start_all_reduce_
from commgrid.collectives.objects import gathered
from commgrid.errors import GridMismatchError
from commgrid.parameters import placements

Gradients = dict[nn.Parameter, Tensor | None]


def shared_parameters(model: nn.Module) -> Iterator[tuple[nn.Parameter, ProcessGroup]]:
    """Those with copies on other ranks, each with the group that has them."""
    for placement in placements(model):
        shared = placement.shared
        if shared is not None and shared.size > 1 and placement.parameter.requires_grad:
            yield placement.parameter, shared.group


def set_aside(model: nn.Module) -> Gradients:
    """Takes off the gradients of earlier steps, which are sums over all copies already."""
    before: Gradients = {}
    for parameter, _ in shared_parameters(model):
        before[parameter], parameter.grad = parameter.grad, None
    return before


def add_up(model: nn.Module, before: Gradients) -> None:
    """Sums this step's gradients over the copies, and adds what was set aside.

    A copy without a gradient counts as zero, so that all of them stay equal.
    """
    for parameter, group in shared_parameters(model):
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        start_all_reduce_(found, group).wait()
        earlier = before.get(parameter)
        parameter.grad = found if earlier is None else earlier.add_(found)


def check_shared(model: nn.Module, pipeline: ProcessGroup) -> None:
    """Refuses stages whose copies are not alike, whose sums would be of different things.

    Raises:
        GridMismatchError: a stage that shares others, in number, shape, dtype or order, or none.
    """
    mine: dict[tuple[int, ...], list[str]] = {}
    for parameter, group in shared_parameters(model):
        copies = mine.setdefault(tuple(dist.get_process_group_ranks(group)), [])
        copies.append(f"{tuple(parameter.shape)} {str(parameter.dtype).removeprefix('torch.')}")
    told = gathered(mine, pipeline)
    everyone = dist.get_process_group_ranks(pipeline)
    for rank, theirs in zip(everyone, told, strict=True):
        for ranks, copies in theirs.items():
            for other, others in zip(everyone, told, strict=True):
                if other in ranks and others.get(ranks) != copies:
                    raise GridMismatchError(
                        f"rank {rank} shares parameters {', '.join(copies)} with ranks "
                        f"{list(ranks)}, but rank {other} shares "
                        f"{', '.join(others.get(ranks, [])) or 'none'}; mark the same ones in the "
                        "same order on all of them: mark_parameters(…, shared=…)"
                    )
