"""Norms of all gradients of the unsharded model, from the shards that each rank holds.

Every rank adds up the squares of its gradients, each divided by the number of ranks that hold
the same numbers; one all-reduce of this scalar gives every rank the total.

`gradient_norm`, `clip_gradients` and `reduce_partial_gradients` are for training without a
GradientReducer, which has methods for that: with FSDP2, DDP, or one data-parallel rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from commgrid.collectives.asynchronous import start_all_reduce_
from commgrid.collectives.common_group import DATA, common_group
from commgrid.collectives.objects import gathered
from commgrid.data_parallel.slot import KeptGradient, slot_of
from commgrid.errors import CommGridError, GridMismatchError, ShapeError
from commgrid.parameters import Placement, placements
from commgrid.parameters.layout import axes_in_use, num_distinct
from commgrid.parameters.marks import check_averages
from commgrid.planning.region import STANDARD
from commgrid.replicas import Copy, differing, groups_along
from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.registry import get_grid

_KEPT = 16  # tensors of shares, for steps in which other parameters have gradients


def gradient_norm(
    model: nn.Module,
    *,
    data: str = "dp_cp",
    sharded: bool | None = None,
    grid: HyperCommGrid | None = None,
) -> Tensor:
    """The 2-norm of the gradients in `.grad`, the same on every rank.

    Each parameter counts once, whether it is sliced or copied over tp, pp and ep, or sharded by
    FSDP2. Gradients must be reduced already; a reducer with `shard=True` has its own
    `gradient_norm`.

    Args:
        model: this rank's part of the model.
        data: the name of the group over which gradients were averaged.
        sharded: whether FSDP2 has sharded gradients on any stage; None: on all if on this one.
        grid: None: the default grid.

    Returns:
        A float64 tensor of shape () on the gradients' device.

    Raises:
        CommGridError: a reducer keeps the gradients in parts.
        GridMismatchError: FSDP2 has not summed some over all ranks that have copies.
        SpecError: it averages those of experts in another way.
    """
    grid = grid or get_grid()
    for parameter in model.parameters():
        if isinstance(parameter.grad, KeptGradient):
            raise CommGridError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} is kept by its "
                "GradientReducer; ask that one: reducer.gradient_norm(), reducer.clip_gradients()"
            )
    check_averages(model.modules())
    held, distinct = [], []
    everything = list(placements(model))
    for placement in everything:
        gradient = placement.parameter.grad
        if gradient is not None:
            gradient = _summed(gradient)
            held.append(_local(gradient))
            distinct.append(num_distinct(placement, grid) * _num_shards(gradient))
    is_cut = any(isinstance(placement.parameter, DTensor) for placement in everything)
    if is_cut:
        _check_summed(everything, data, grid)
    sharded = is_cut if sharded is None else sharded
    used = axes_in_use(everything, grid, data)
    whole = norm_group(grid, data, used, sharded=sharded)
    return SquareSum(distinct, whole, device_of(model)).of(held).sqrt()


def clip_gradients(
    model: nn.Module,
    max_norm: float,
    *,
    data: str = "dp_cp",
    sharded: bool | None = None,
    grid: HyperCommGrid | None = None,
) -> Tensor:
    """Scales all gradients so that their norm is at most `max_norm`; returns the norm before.

    Args:
        model, data, sharded, grid: as for `gradient_norm`.
        max_norm: above 0.

    Returns:
        A float64 tensor of shape () on the gradients' device.

    Raises:
        ShapeError: max_norm is not above 0.
        CommGridError: a reducer keeps the gradients.
    """
    check_max_norm(max_norm)
    norm = gradient_norm(model, data=data, sharded=sharded, grid=grid)
    scale = clip_factor(norm, max_norm)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                _local(parameter.grad).mul_(scale)
    return norm


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
        if slot_of(placement.parameter) is not None:
            raise CommGridError(
                f"{placement}: its GradientReducer has added it up over {partial} already"
            )
        local = _local(gradient)
        found.setdefault((partial.group, local.dtype), []).append(local)
    for (group, _), gradients in found.items():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=group)
        for gradient, total in zip(
            gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True
        ):
            gradient.copy_(total.view_as(gradient))


def _check_summed(everything: Sequence[Placement], data: str, grid: HyperCommGrid) -> None:
    """Refuses gradients that differ between copies, over whose ranks FSDP2's mesh does not sum.

    Raises:
        GridMismatchError: names the first such parameter and the ranks.
    """
    definitions, copies = grid.spec.definitions, []
    beside: dict[tuple[object, str], tuple[ProcessGroup, ...]] = {}
    for placement in everything:
        parameter, gradient = placement.parameter, placement.parameter.grad
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        if gradient is None:
            continue
        if (mesh, placement.region) not in beside:
            name = data if placement.region == "dense" else DATA[1]
            summed = {grid.rank} if mesh is None else set(mesh.mesh.flatten().tolist())
            axes = definitions[grid.spec.resolve_name(name)].axes
            beside[mesh, placement.region] = tuple(
                group for group in groups_along(axes, grid, (data, DATA[1]))
                if len(summed.intersection(dist.get_process_group_ranks(group))) == 1
            )  # fmt: skip
        groups = beside[mesh, placement.region]
        if groups:
            copies.append(Copy(f"the gradient of {placement}", _local(gradient), groups))
    found = differing(copies)
    if found is not None:
        raise GridMismatchError(
            f"{found}: these ranks have copies of the parameter and other data, and nothing has "
            "summed over them; give fully_shard all of them, mesh=grid.device_mesh('dp_cp'), for "
            "experts grid.device_mesh('edp')"
        )


def _local(gradient: Tensor) -> Tensor:
    """The gradient, or this rank's part where it is a DTensor, as FSDP2 leaves it."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _summed(gradient: Tensor) -> Tensor:
    """The gradient; of a DTensor that is a partial sum, the sum."""
    if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
        kinds = [Replicate() if p.is_partial() else p for p in gradient.placements]
        with torch.no_grad():
            return gradient.redistribute(placements=kinds)
    return gradient


def _num_shards(gradient: Tensor) -> int:
    """Number of parts that a DTensor is cut into."""
    if not isinstance(gradient, DTensor):
        return 1
    sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())


def device_of(model: nn.Module) -> torch.device:
    """The model's device; for a rank without parameters, the device that other ranks use."""
    for parameter in model.parameters():
        return parameter.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def norm_group(
    grid: HyperCommGrid, data: str | None, used: set[str] | None = None, *, sharded: bool = False
) -> ProcessGroup | None:
    """The ranks that together hold every gradient; None: this rank alone does.

    The result is the same on every rank, even if their layers differ: all axes except the data
    axes, or the whole grid if gradients are sharded or experts fold over other axes. A user-defined
    axis is included if a layer or the data group names it.

    Args:
        data: the name of the data-parallel group; None: unknown, which takes the whole grid.
        used: the axes that layers and data groups of this rank name (`axes_in_use`); None: all.
        sharded: whether each rank of the data group holds only a part of the gradients.
    """
    dense, summed = grid.spec.regions[0].axes, (data or DATA[0], DATA[1])
    taken: tuple[str, ...] = ()
    if data is not None and not sharded and len(grid.spec.regions) == 1:
        taken = grid.spec.definitions[grid.spec.resolve_name(data)].axes
    apart = {axis for axis in dense if axis not in STANDARD and grid.size(axis) > 1}
    if apart and used is not None:
        named = sorted(apart & used)
        long = [axis for axis in dense if grid.size(axis) > 1]
        everyone = common_group(grid.get_group(*long), grid, summed)
        if grid.size("pp") > 1:  # other stages have other layers
            named = sorted({axis for theirs in gathered(named, everyone) for axis in theirs})
        apart -= set(named)
    else:
        apart = set()
    axes = [a for a in dense if a not in taken and a not in apart and grid.size(a) > 1]
    return common_group(grid.get_group(*axes), grid, summed) if axes else None


class SquareSum:
    """The sum of the squares of all gradients of the unsharded model.

    Args:
        distinct: for each of this rank's gradients, the number of distinct ones in its place over
            all ranks.
        group: the ranks that together hold all gradients; None: this one does.
        device: of the model, also if this rank holds no gradient.
    """

    def __init__(
        self, distinct: Sequence[float], group: ProcessGroup | None, device: torch.device
    ) -> None:
        self.group, self.device = group, device
        size = group.size() if group is not None else 1
        self._shares = [each / size for each in distinct]
        self._tensors: dict[tuple[int, ...], Tensor] = {}

    def of(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Add up over all ranks.

        Args:
            gradients: this rank's; None: it has none.

        Returns:
            A float64 tensor of shape () on `device`, the same on every rank.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        alike: dict[tuple[torch.dtype, torch.device], dict[int, Tensor]] = {}
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                alike.setdefault((gradient.dtype, gradient.device), {})[i] = gradient
        for (dtype, _), held in alike.items():
            exact = torch.promote_types(dtype, torch.float32)
            norms = torch._foreach_norm(list(held.values()), 2, dtype=exact)
            squares = torch.stack(norms).to(self.device, torch.float64).square()
            total += squares @ self._shares_of(tuple(held))
        if self.group is not None:
            start_all_reduce_(total, self.group).wait()
        return total

    def _shares_of(self, held: tuple[int, ...]) -> Tensor:
        """The share of each square, on the device; kept, as most steps have the same gradients."""
        if held not in self._tensors:
            if len(self._tensors) == _KEPT:
                self._tensors.clear()
            shares = [self._shares[i] for i in held]
            self._tensors[held] = torch.tensor(shares, dtype=torch.float64, device=self.device)
        return self._tensors[held]


def check_max_norm(max_norm: float) -> None:
    """Refuses a `max_norm` that is not above 0.

    Raises:
        ShapeError: names it.
    """
    if not max_norm > 0:
        raise ShapeError(f"clip_gradients(max_norm={max_norm}): expected above 0")


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """The factor by which gradients of this norm are scaled, so that it is at most `max_norm`."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
