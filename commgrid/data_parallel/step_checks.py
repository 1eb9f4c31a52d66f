"""Checks between finish and step: edits of gradients, and optimizers that step too early.

torch's clip_grad_norm_ takes the norm of this rank's gradients. Where ranks have slices or experts,
each scales by a different factor, so the step is not one for the whole model, and is refused.

    finish          largest number and norm of each gradient
    step            the same again: all of them times one factor?
    next finish     factors of all ranks, which must be equal

Other edits, such as clamping each number, are not one factor and are not judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from commgrid.collectives.plain import all_gather
from commgrid.data_parallel.accumulation import is_unreduced
from commgrid.data_parallel.bucket import GradientPart
from commgrid.data_parallel.slot import KeptGradient, Reducer, Slot, owner_of
from commgrid.equality.digest import device_for
from commgrid.errors import CommGridError, GridMismatchError, SpecError
from commgrid.layout.rank_text import describe_ranks
from commgrid.parameters.optimizers import check_optimizer, is_scaled, refuse_scaler, zero_ranks
from commgrid.parameters.sharded_module import StepHooks
from commgrid.torch_compat.messages import version_of

_TOLERANCE, _HALF_TOLERANCE = 1e-4, 1e-2  # of a factor: rounding of fp32, and of bf16 gradients
_UNKNOWN = math.nan

Held = Callable[[GradientPart], Tensor | None]


class Edits:
    """Compares the factors by which ranks have scaled their gradients.

    Args:
        pieces: of the reducer.
        group: the ranks of the stage that have parts or copies of it; None: this rank alone.
        steps: number of steps after which it stops, unless gradients are edited then.
    """

    def __init__(
        self, pieces: Sequence[GradientPart], group: ProcessGroup | None, steps: int
    ) -> None:
        self._pieces, self._group = pieces, group
        self._left = steps if group is not None else 0
        kinds = {piece.slot.parameter.dtype for piece in pieces}
        self._tolerance = _HALF_TOLERANCE if kinds & {torch.bfloat16, torch.float16} else _TOLERANCE
        self._sizes: Tensor | None = None
        self._versions: list[tuple[int, int | None]] = []
        self._row: Tensor | None = None

    @torch.no_grad()
    def finished(self, held: Held) -> None:
        """Record the gradients that `finish` has left, or that the reducer has clipped."""
        if self._left:
            self._sizes, self._versions = self._measure(held), self._seen(held)

    @torch.no_grad()
    def before_step(self, held: Held) -> None:
        """Record the gradients that an optimizer is about to use."""
        if not self._left or self._sizes is None:
            return
        edited = self._seen(held) != self._versions
        sizes = self._measure(held) if edited else self._sizes
        factor = self._factor(self._sizes, sizes)
        self._row = torch.tensor([float(edited), factor], dtype=torch.float64)

    def compare(self) -> GridMismatchError | None:
        """The error if ranks have scaled apart, on all ranks of the group; collective over it."""
        if not self._left or self._group is None:
            return None
        mine, self._row = self._row, None
        if mine is None:
            mine = torch.tensor([0.0, _UNKNOWN], dtype=torch.float64)
        device = device_for(self._group)
        rows = all_gather(mine.to(device), self._group).view(-1, 2).tolist()
        is_edited = any(edited for edited, _ in rows)
        self._left = max(self._left - 1, int(is_edited))
        if not is_edited:
            return None
        return self._apart([factor for _, factor in rows])

    def _measure(self, held: Held) -> Tensor:
        """(pieces, 2): the largest absolute value and the norm of each gradient; 0: none."""
        found = [held(piece) for piece in self._pieces]
        found = [None if isinstance(g, KeptGradient) else g for g in found]
        sizes = torch.zeros(len(found), 2, dtype=torch.float64)
        own = [(i, g) for i, g in enumerate(found) if g is not None and g.numel()]
        rows = []
        for _, gradient in own:
            exact = torch.promote_types(gradient.dtype, torch.float32)
            norms = [torch.linalg.vector_norm(gradient, n, dtype=exact) for n in (torch.inf, 2)]
            rows.append(torch.stack(norms).double())
        if rows:
            sizes[[i for i, _ in own]] = torch.stack(rows).cpu()
        return sizes

    def _seen(self, held: Held) -> list[tuple[int, int | None]]:
        """Identity and version of each gradient, which an edit changes."""
        found = (held(piece) for piece in self._pieces)
        return [(id(g), version_of(g)) for g in found if g is not None]

    def _factor(self, before: Tensor, after: Tensor) -> float:
        """The one factor between all sizes; NaN if there is none."""
        rows = before[:, 1] > 0
        if not rows.any() or not (before.isfinite().all() and after.isfinite().all()):
            return _UNKNOWN
        ratios = after[rows] / before[rows]
        low, high = float(ratios.min()), float(ratios.max())
        return high if high - low <= self._tolerance * high else _UNKNOWN

    def _apart(self, factors: list[float]) -> GridMismatchError | None:
        assert self._group is not None
        ranks = dist.get_process_group_ranks(self._group)
        known = [(f, rank) for f, rank in zip(factors, ranks, strict=True) if not math.isnan(f)]
        if not known:
            return None
        (least, low), (most, high) = min(known), max(known)
        if most - least <= 2 * self._tolerance * most:
            return None
        return GridMismatchError(
            f"rank {low} has scaled its gradients by {least:.4g} after finish(), and rank {high} "
            f"by {most:.4g}, as torch's clip_grad_norm_ does, which takes the norm of one rank's "
            "slices or experts; use the reducer's clip_gradients(), or scale by one factor on all "
            "ranks"
        )


def owned_by(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Reducer, Slot]]:
    """The parameters that an optimizer updates and a reducer owns."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            owner = owner_of(parameter)
            if owner is not None:
                reducer, slot = owner.reducer, owner.slot
                if reducer is not None and slot is not None:
                    yield reducer, slot


def mark_used(optimizer: torch.optim.Optimizer) -> None:
    """Mark gradients as used, by a step or a skipped one: the next backward starts new ones."""
    for reducer, slot in owned_by(optimizer):
        slot.stepped, slot.optimized = slot.reduced, True
        reducer.after_step = True
        if slot.stepped and slot.fused:  # its layer adds to zeros
            with torch.no_grad():
                slot.view.zero_()


def check_slices(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer whose step would be wrong where ranks have different parameters.

    Raises:
        SpecError: names the first such parameter.
    """
    owned = list(owned_by(optimizer))
    check_optimizer(optimizer, [slot.placement for _, slot in owned])
    ranks, scaled = set(zero_ranks(optimizer)), is_scaled()
    if not ranks and not scaled:
        return
    for reducer, slot in owned:
        for axis, theirs in reducer.groups.apart(slot.placement):
            both = sorted(ranks & set(theirs))
            if len(both) > 1:
                raise SpecError(
                    f"{type(optimizer).__name__} over {describe_ranks(sorted(ranks))} would send "
                    f"{slot.placement} to {describe_ranks(both)}, which have other parameters "
                    f"along {axis}; give it process_group=commgrid.get_group('dp_cp'), or use "
                    "commgrid.data_parallel.ShardedOptimizer"
                )
            if scaled:
                refuse_scaler(f"{slot.placement} differs along {axis}")


def check_reduced(optimizer: torch.optim.Optimizer) -> None:
    """Refuses a step while a gradient has not been through finish().

    Raises:
        CommGridError: names the first such parameter.
    """
    reducers: dict[Reducer, None] = {}
    for reducer, slot in owned_by(optimizer):
        reducers[reducer] = None
        gradient = slot.parameter.grad
        if reducer.shard and slot.reduced and not isinstance(gradient, KeptGradient | None):
            raise CommGridError(
                f".grad of {slot.placement} was set, which a ShardedOptimizer does not read: its "
                "reducer keeps gradients in parts; set it before finish(), which sums it over "
                "ranks, or make the GradientReducer with shard=False"
            )
        if is_unreduced(slot, reducer):
            raise CommGridError(
                f"{type(optimizer).__name__}.step() was called while {slot.placement} has a "
                "gradient that no finish() has reduced, so that ranks would train apart; call its "
                "GradientReducer's finish() once a step, after the last backward and before "
                "clipping and step()"
            )
    for reducer in reducers:
        reducer.before_step()


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    given: Callable[[], Any] | None = args[1] if len(args) > 1 else kwargs.get("closure")
    check_slices(optimizer)
    if given is None:
        check_reduced(optimizer)
        return None
    closure = given

    def checked() -> Any:
        loss = closure()
        check_reduced(optimizer)
        return loss

    if len(args) > 1:
        return (args[0], checked, *args[2:]), kwargs
    return args, {**kwargs, "closure": checked}


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    mark_used(optimizer)


STEP_HOOKS = StepHooks(
    lambda: [
        register_optimizer_step_pre_hook(_before_step),
        register_optimizer_step_post_hook(_after_step),
    ]
)
"""Before a step, an unreduced gradient raises an error; after it, gradients count as used.
Registered while any reducer exists."""
