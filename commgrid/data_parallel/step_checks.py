"""Checks of optimizers that step too early, or that are wrong where ranks have other parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from commgrid.data_parallel.slot import KeptGradient, Reducer, Slot, State, slot_of
from commgrid.errors import CommGridError, SpecError
from commgrid.layout.rank_text import describe_ranks
from commgrid.parameters.optimizers import refuse_scaler, zero_ranks
from commgrid.parameters.sharded_module import StepHooks
from commgrid.torch_compat.mesh import BeforeUnscaling


def owned_by(optimizer: torch.optim.Optimizer) -> list[tuple[Reducer, Slot]]:
    """The parameters that an optimizer updates and a reducer owns."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    slots = [slot for slot in map(slot_of, parameters) if slot is not None]
    return [(reducer, slot) for slot in slots if (reducer := slot.reducer) is not None]


def mark_used(optimizer: torch.optim.Optimizer) -> None:
    """Mark gradients as used, by a step or a skipped one: the next backward starts new ones."""
    for reducer, slot in owned_by(optimizer):
        slot.updated = reducer.after_step = True
        if slot.state is State.REDUCED:
            slot.state = State.USED


def check_slices(optimizer: torch.optim.Optimizer, owned: Sequence[tuple[Reducer, Slot]]) -> None:
    """Refuses an optimizer whose step would be wrong where ranks have different parameters.

    Args:
        optimizer: about to step.
        owned: `owned_by` it.

    Raises:
        SpecError: names the first such parameter.
    """
    ranks = set(zero_ranks(optimizer))
    if not ranks:
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


def check_before_unscaling(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Refuses torch's GradScaler where ranks have different parameters.

    Raises:
        SpecError: names the first such parameter.
    """
    for reducer, slot in owned_by(optimizer):
        for axis, _ in reducer.groups.apart(slot.placement):
            refuse_scaler(scaler, f"{slot.placement} differs along {axis}")


def check_reduced(optimizer: torch.optim.Optimizer, owned: Sequence[tuple[Reducer, Slot]]) -> None:
    """Refuses a step while a gradient has not been through finish().

    Args:
        optimizer, owned: as for `check_slices`.

    Raises:
        CommGridError: names the first such parameter.
    """
    for reducer, slot in owned:
        was_set = not isinstance(slot.parameter.grad, KeptGradient | None)
        if was_set and reducer.shard and slot.state in (State.REDUCED, State.USED):
            raise CommGridError(
                f".grad of {slot.placement} was set, which a ShardedOptimizer does not read: its "
                "reducer keeps gradients in parts; set it before finish(), which sums it over "
                "ranks, or make the GradientReducer with shard=False"
            )
        if slot.is_unreduced:
            raise CommGridError(
                f"{type(optimizer).__name__}.step() was called while {slot.placement} has a "
                "gradient that no finish() has reduced, so that ranks would train apart; call its "
                "GradientReducer's finish() once a step, after the last backward and before "
                "clipping and step()"
            )
    for reducer in dict.fromkeys(reducer for reducer, _ in owned):
        reducer.before_step(optimizer)


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    given: Callable[[], Any] | None = args[1] if len(args) > 1 else kwargs.get("closure")
    owned = owned_by(optimizer)
    if not owned:  # such as the inner optimizer of a ShardedOptimizer
        return None
    check_slices(optimizer, owned)
    if given is None:
        check_reduced(optimizer, owned)
        return None
    closure = given

    def checked() -> Any:
        loss = closure()
        check_reduced(optimizer, owned)
        return loss

    if len(args) > 1:
        return (args[0], checked, *args[2:]), kwargs
    return args, {**kwargs, "closure": checked}


STEP_HOOKS = StepHooks(
    lambda: [
        register_optimizer_step_pre_hook(_before_step),
        register_optimizer_step_post_hook(lambda optimizer, *_: mark_used(optimizer)),
        BeforeUnscaling(check_before_unscaling),
    ]
)
"""Before a step, an unreduced gradient raises an error; after it, gradients count as used.
Registered while any reducer exists."""
