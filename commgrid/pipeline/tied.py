"""Gradients of a stage: checks that they are reduced over data, and summed over shared copies.

Stages may have copies of a parameter, such as an embedding tied to the head. A GradientReducer adds
up the gradients of the copies over their group, before its sum over data.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from commgrid.collectives.objects import gathered
from commgrid.data_parallel.reducer import GradientReducer
from commgrid.errors import GridMismatchError, SpecError
from commgrid.parameters import Placement, placements
from commgrid.parameters.placement import shared_last


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
    reduces = gathered(reducer is not None, pipeline)
    wrong = _not_reduced(chunks, reducer, splits)
    trains = any(p.requires_grad for chunk in chunks for p in chunk.parameters())
    if reducer is None and any(reduces) and trains:
        rank = dist.get_process_group_ranks(pipeline)[reduces.index(True)]
        wrong = f"has no reducer, but rank {rank} has one; give each stage one of its chunks"
    refuse_first(wrong, pipeline)
    if reducer is not None and not all(reduces):
        reducer.groups.stages = None  # finish() then compares steps within the stage alone


def refuse_first(wrong: str, pipeline: ProcessGroup) -> None:
    """Refuse, on every stage, what is wrong with the first stage that says so; "": nothing.

    Raises:
        SpecError: names that stage and its rank.
    """
    told = zip(dist.get_process_group_ranks(pipeline), gathered(wrong, pipeline), strict=True)
    for stage, (rank, wrong) in enumerate(told):
        if wrong:
            raise SpecError(f"Pipeline: stage {stage} (rank {rank}) {wrong}")


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


def check_shared(model: nn.Module, pipeline: ProcessGroup) -> bool:
    """Return whether stages share parameters; refuse copies that are not alike.

    Raises:
        GridMismatchError: a stage that shares others, in number, shape, dtype or order, or none.
    """
    mine: dict[tuple[int, ...], list[str]] = {}
    copies = _copies(model)
    for placement, ranks in copies:
        if (p := placement.parameter).requires_grad:
            said = f"{tuple(p.shape)} {str(p.dtype).removeprefix('torch.')}"
            mine.setdefault(ranks, []).append(said)
    told = gathered((mine, bool(copies)), pipeline)
    everyone = dict(zip(dist.get_process_group_ranks(pipeline), told, strict=True))
    for rank, (theirs, _) in everyone.items():
        for ranks, shared in theirs.items():
            for other, (others, _) in everyone.items():
                if other in ranks and others.get(ranks) != shared:
                    raise GridMismatchError(
                        f"rank {rank} shares parameters {', '.join(shared)} with ranks "
                        f"{list(ranks)}, but rank {other} shares "
                        f"{', '.join(others.get(ranks, [])) or 'none'}; mark the same ones in the "
                        "same order on all of them: mark_parameters(…, shared=…)"
                    )
    return any(has_copies for _, has_copies in told)


def refuse_unsummed(model: nn.Module, pipeline: ProcessGroup) -> None:
    """Refuse to train shared parameters without a reducer, which alone sums their gradients.

    Raises:
        SpecError: on every stage; names the first stage with a copy, a parameter and the ranks.
    """
    wrong = ""
    for copy, ranks in _copies(model):
        if copy.parameter.requires_grad and not wrong:
            wrong = (
                f"shares {copy.name!r} among ranks {list(ranks)}, and no reducer sums its "
                "gradients; give every stage reducer=GradientReducer(torch.nn.ModuleList(chunks)). "
                "FSDP2 sums no copies: use weights of their own on each stage there"
            )
    refuse_first(wrong, pipeline)


def _copies(model: nn.Module) -> list[tuple[Placement, tuple[int, ...]]]:
    """The parameters with copies on other stages, each with the ranks that have them; by group."""
    return [
        (placement, tuple(dist.get_process_group_ranks(placement.shared.group)))
        for placement in shared_last(placements(model))
        if placement.shared is not None and placement.shared.size > 1
    ]
