"""Checks that torch's optimizers, scalers and DDP do not take slices of parameters for copies.

| over slices | |
|---|---|
| SGD, AdamW and others that update each element by itself | right |
| Muon, Adafactor, LBFGS and others of whole matrices | not the whole parameter's update |
| ZeroRedundancyOptimizer, FSDP2 over ranks with other slices | one rank's slice replaces others |
| torch.amp.GradScaler | ranks decide apart whether to skip a step |

All but the first raise before a step, GradScaler before it reads gradients, and
DistributedDataParallel over ranks with other slices as it is made. The hooks into torch for that
are registered while any layer with slices exists.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from commgrid.collectives.group_ref import GroupRef
from commgrid.errors import GridNotInitializedError, SpecError
from commgrid.layout.rank_text import describe_ranks
from commgrid.parameters.layout import layout_of
from commgrid.parameters.marks import check_averages
from commgrid.parameters.placement import Placement, placements
from commgrid.parameters.sharded_module import LIVE, Slice, check_mesh
from commgrid.runtime.registry import get_grid

_OF_WHOLE_MATRICES = (
    "adafactor", "adalomo", "adam_mini", "adammini", "apollo", "came", "dadapt", "dion", "galore",
    "kron", "lamb", "lars", "lbfgs", "muon", "novograd", "prodigy", "psgd", "scion", "shampoo",
    "sm3", "soap",
)  # fmt: skip
"""Optimizers whose update of an element depends on others, by substrings of their names."""
_ELEMENT_WISE_ALGORITHMS = ("adamw", "lion")
_SCALERS = ("torch.amp.grad_scaler", "torch.cuda.amp.grad_scaler", "torch.cpu.amp.grad_scaler")
"""Modules of loss scalers that decide by one rank's gradients; FSDP's agrees over all ranks."""


def check_before_step(optimizer: Optimizer, *_: Any) -> None:
    """torch's hook: refuse an optimizer whose step over slices is not that over the whole.

    Raises:
        SpecError: names the first such parameter.
    """
    name, ranks = type(optimizer).__name__, zero_ranks(optimizer)
    of_matrices = _of_matrices(optimizer)
    for one in _slices_of(optimizer):
        if one.num_slices == 1:
            continue
        group = next(group for _, group in one.shards if group.size > 1)
        if id(one.parameter) in of_matrices:
            raise SpecError(
                f"{name} does not update elements one by one, and {one} is a slice over group "
                f"{group.name!r}, whose update would differ from that of the whole parameter; "
                "give it whole matrices only, and slices to an element-wise optimizer such as AdamW"
            )
        check_mesh(one)
        for dim, group, both in one.within(ranks):
            raise SpecError(
                f"{name} over {describe_ranks(ranks)} would send {one} to {describe_ranks(both)}, "
                f"which have different slices of it, cut along dim {dim} over {group.name!r}; give "
                "it the ranks that have copies, process_group=commgrid.get_group('dp_cp'), or use "
                "commgrid.data_parallel.ShardedOptimizer"
            )


def _of_matrices(optimizer: Optimizer) -> set[int]:
    """Ids of the parameters whose elements the optimizer does not update one by one.

    Muon and Dion with an element-wise optimizer beside them say which of both updates a parameter:
    `use_muon` of its group (MuonWithAuxAdam) or of its state (Moonlight's Muon), or `algorithm` of
    its group (Dion).
    """
    name = type(optimizer).__name__.lower()
    if not any(part in name for part in _OF_WHOLE_MATRICES):
        return set()
    return {
        id(parameter)
        for group in optimizer.param_groups
        if group.get("use_muon", True) and group.get("algorithm") not in _ELEMENT_WISE_ALGORITHMS
        for parameter in group["params"]
        if optimizer.state.get(parameter, {}).get("use_muon", True)
    }


def zero_ranks(optimizer: Optimizer) -> list[int]:
    """The ranks to which torch's ZeroRedundancyOptimizer sends parameters; empty for others."""
    group = getattr(optimizer, "process_group", None)
    if type(optimizer).__name__ != "ZeroRedundancyOptimizer" or not isinstance(group, ProcessGroup):
        return []
    return dist.get_process_group_ranks(group)


def refuse_scaler(scaler: torch.amp.GradScaler, what: str) -> None:
    """Refuses torch's own GradScaler over parameters that are not whole on each rank.

    Args:
        scaler: about to read gradients; one of another library may agree over ranks.
        what: the clause on the parameter, for the message.

    Raises:
        SpecError: with `what`.
    """
    if type(scaler).__module__ in _SCALERS:
        raise SpecError(
            "torch.amp.GradScaler decides by one rank's gradients whether to skip a step, and "
            f"{what}, so that after an overflow some ranks would step and others would not; use "
            "commgrid.data_parallel.GradScaler, which decides for all ranks"
        )


_SLICES: weakref.WeakKeyDictionary[Optimizer, tuple[list[tuple[int, bool]], list[Slice]]] = (
    weakref.WeakKeyDictionary()
)  # each optimizer's, with its parameters' ids and whether a reducer has them


def check_before_unscaling(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
    """Refuse torch's GradScaler over slices.

    Raises:
        SpecError: names the first slice.
    """
    for one in _slices_of(optimizer):
        if one.num_slices > 1:
            group = next(group for _, group in one.shards if group.size > 1)
            refuse_scaler(scaler, f"{one} is a slice over group {group.name!r}")


def _slices_of(optimizer: Optimizer) -> list[Slice]:
    """The slices that an optimizer updates, by their full names where a reducer knows them."""
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    owners = {p: getattr(p, "grad_owner", None) for p in updated}
    key = [(id(p), owner is not None) for p, owner in owners.items()]
    known = _SLICES.get(optimizer)
    if known is None or known[0] != key:
        found = []
        modules = [m for m in LIVE if any(p in owners for p in m.parameters(recurse=False))]
        check_averages(modules)
        for module in modules:
            for name, parameter in module.named_parameters(recurse=False):
                if name in module.sliced_names and parameter in owners:
                    owner = owners[parameter]
                    full = owner.placement.name if owner else f"{type(module).__name__}.{name}"
                    found.append(Slice(full, parameter, module.shards_of(name)))
        known = _SLICES[optimizer] = key, found
    return known[1]


def refuse_copying_over_slices(module: nn.Module, ranks: Sequence[int]) -> None:
    """Refuses DDP over ranks with different slices of a parameter, which it would make equal.

    Raises:
        SpecError: names the parameter and the ranks.
    """
    for placement in placements(module):
        for dim, group, members in placement.within(ranks):
            raise SpecError(
                f"DistributedDataParallel over {describe_ranks(ranks)} would make "
                f"{placement} equal on {describe_ranks(members)}, which have different slices "
                f"of it, cut along dim {dim} over {group.name!r}; give it the ranks that have "
                f"copies: {_copies_group(placement, group)}, or use GradientReducer"
            )


def _copies_group(placement: Placement, cut: GroupRef) -> str:
    """Suggested `process_group=` of DistributedDataParallel for a sliced parameter."""
    with suppress(SpecError, GridNotInitializedError):  # a bare group, or a grid not registered
        grid = get_grid(cut.grid_name or "default")
        axes = [a for a in layout_of(placement, grid).copied_axes if grid.size(a) > 1]
        if axes:
            return f"process_group=commgrid.get_group({'_'.join(reversed(axes))!r})"
    return "no other rank has one"
