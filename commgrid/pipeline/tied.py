"""Gradients of a stage: checks that they are reduced, and sums over stages that share a parameter.

Stages may have copies of a parameter, such as an embedding tied to the head. The gradients of the
copies are added up over their group. A GradientReducer does that itself, before its sum over data;
without one, this does it at the end of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from commgrid.collectives.asynchronous import start_all_reduce_
from commgrid.collectives.objects import gathered
from commgrid.data_parallel.reducer import GradientReducer
from commgrid.errors import GridMismatchError, SpecError
from commgrid.parameters import placements
from commgrid.parameters.placement import shared_last

Gradients = dict[nn.Parameter, Tensor | None]


def check_reduced(
    chunks: Sequence[nn.Module],
    reducer: GradientReducer | None,
    pipeline: ProcessGroup,
    *,
    splits: bool,
) -> None:
    """Refuse stages of which some gradients would not be reduced over data, or more than once.

    Args:
        chunks: this stage's.
        reducer: this stage's; None: it has none.
        pipeline: the group of all stages.
        splits: whether the schedule computes gradients of inputs and of weights apart.

    Raises:
        SpecError: on every stage; names the first such stage, chunk and parameter.
    """
    trains = any(p.requires_grad for chunk in chunks for p in chunk.parameters())
    told = gathered((_not_reduced(chunks, reducer, splits), trains, reducer is not None), pipeline)
    ranks = dist.get_process_group_ranks(pipeline)
    some = [rank for rank, (_, _, reduces) in zip(ranks, told, strict=True) if reduces]
    for stage, (rank, (wrong, trains, reduces)) in enumerate(zip(ranks, told, strict=True)):
        if some and trains and not reduces:
            wrong = f"has no reducer, but rank {some[0]} has one; give each stage one of its chunks"
        if wrong:
            raise SpecError(f"Pipeline: stage {stage} (rank {rank}) {wrong}")
    if reducer is not None and len(some) < len(ranks):
        reducer.groups.stages = None  # finish() then compares steps within the stage alone


def _not_reduced(chunks: Sequence[nn.Module], reducer: GradientReducer | None, splits: bool) -> str:
    """Describe the first parameter of a stage that is not reduced as it should be, or ""."""
    advice = "expected reducer=GradientReducer(torch.nn.ModuleList(chunks)), of all its chunks"
    known = set() if reducer is None else {id(p) for p in reducer.model.parameters()}
    for index, chunk in enumerate(chunks):
        for name, module in chunk.named_modules():
            if isinstance(module, DistributedDataParallel):
                return (
                    f"has a DistributedDataParallel in chunk {index}{name and f' at {name!r}'}, "
                    "which reduces some microbatches' gradients alone; give the module inside "
                    f"it, and {advice}"
                )
            if splits and isinstance(module, FSDPModule):
                return (
                    f"has a module of fully_shard in chunk {index}{name and f' at {name!r}'}, "
                    "which reduces gradients and frees its weights when the gradients of its "
                    "inputs are there, before those of the weights; use schedule='1f1b', 'gpipe' "
                    "or 'interleaved' with FSDP2"
                )
        for name, parameter in chunk.named_parameters():
            if reducer is not None and parameter.requires_grad and id(parameter) not in known:
                return (
                    f"has a reducer of some of its {len(chunks)} chunks only: {name!r} of chunk "
                    f"{index} is not in its model and would train on this rank's data alone; "
                    f"{advice}"
                )
    return ""


def shared_parameters(model: nn.Module) -> Iterator[tuple[nn.Parameter, ProcessGroup]]:
    """Those with copies on other ranks, each with the group that has them; by group."""
    for placement in shared_last(placements(model)):
        shared = placement.shared
        if shared is not None and shared.size > 1 and placement.parameter.requires_grad:
            yield placement.parameter, shared.group


def set_aside(model: nn.Module) -> Gradients:
    """Detaches the gradients of earlier steps, which are sums over all copies already."""
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
