"""States of a parameter's gradient during a step, and the errors for calls in the wrong state.

    none ──backward──► local ──finish()──► reduced ──optimizer.step()──► used ──backward──► local
      ▲                │    ▲                  │                          │
      │                └────┘ backward adds    └ read, clip, edit         │
      └───────────────────── zero_grad() from any of them ────────────────┘

Where it can be read, `.grad` is a view of the reducer's buffer, to which backward adds in place. A
gradient that arrives elsewhere, as after `zero_grad()`, is copied there, and `.grad` becomes the
view again. While a collective sums a gradient, or if this rank has only a part of it, `.grad` is a
placeholder that raises. With half-precision parameters and a plain optimizer, `finish` hands out a
copy of the parameter's dtype instead. A slot records whether `.grad` is reduced and whether a step
has used it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from commgrid.data_parallel.buckets import Slot
from commgrid.data_parallel.kept import KeptGradient
from commgrid.errors import CommGridError, SpecError
from commgrid.parameters.slices import (
    StepHooks,
    check_optimizer,
    is_scaled,
    refuse_scaler,
    zero_ranks,
)
from commgrid.planning.rank_lists import describe_ranks

if TYPE_CHECKING:
    from commgrid.data_parallel.reducer import GradientReducer


class Owner:
    """A parameter's reducer and slot; not pickled with the parameter."""

    def __init__(self, reducer: GradientReducer, slot: Slot) -> None:
        self._reducer, self._slot = weakref.ref(reducer), weakref.ref(slot)

    @property
    def reducer(self) -> GradientReducer | None:
        """The reducer, if it still exists."""
        return self._reducer()

    @property
    def slot(self) -> Slot | None:
        """The parameter's slot, if it still exists."""
        return self._slot()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class Released:
    """The gradient that a closed reducer has left in `.grad`; not pickled with the parameter."""

    def __init__(self, gradient: Tensor, stepped: bool) -> None:
        self._gradient, self.stepped = weakref.ref(gradient), stepped

    def is_in(self, parameter: Tensor) -> bool:
        """Whether `.grad` is still that gradient."""
        return self._gradient() is parameter.grad

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def owner_of(parameter: Tensor) -> Owner | None:
    """The owner of a parameter; None: no reducer has it."""
    owner: Owner | None = getattr(parameter, "grad_owner", None)
    return owner


def take_over(slot: Slot, owner: Owner) -> None:
    """Makes a slot's reducer the owner of its parameter and of any gradient already there."""
    parameter: Any = slot.parameter
    left: Released | None = vars(parameter).pop("grad_released", None)
    known = left is not None and left.is_in(parameter)
    slot.reduced = parameter.grad is None or known
    slot.stepped = left is not None and known and left.stepped
    slot.handed_out = parameter.grad if slot.reduced else None
    parameter.grad_owner = owner


def begin(slot: Slot, *, after_step: bool) -> None:
    """Prepares a parameter for a gradient that backward is about to add to `.grad`.

    Args:
        slot: the parameter's slot.
        after_step: whether an optimizer has updated parameters of the reducer since `finish`;
            if so, a gradient that no optimizer ever uses is dropped too.

    Raises:
        CommGridError: `.grad` is reduced, and neither a step nor zero_grad() came since.
    """
    parameter = slot.parameter
    if slot.reduced and parameter.grad is not None:
        is_used = slot.stepped or (after_step and not slot.optimized)
        if not is_used and not _is_zero(parameter.grad):
            raise CommGridError(
                f"backward reached {slot.placement} whose gradient finish() has reduced, and no "
                "optimizer step or zero_grad() came since; a sum of reduced and new gradients "
                "cannot be reduced. Wrap all microbatches of a step but the last in no_sync() and "
                "call finish() once, or call zero_grad() to drop the reduced gradient"
            )
        if is_used or isinstance(parameter.grad, KeptGradient):
            parameter.grad = None
    slot.reduced = slot.stepped = False
    if parameter.grad_dtype != slot.view.dtype:
        _set_grad(slot, parameter.grad, slot.view.dtype)


def take_in(slot: Slot, *, graph: bool = False) -> None:
    """Copies a gradient stored elsewhere into the buffer, and points `.grad` there.

    Args:
        slot: the parameter's slot.
        graph: also copy if `.grad` has a graph, as after `backward(create_graph=True)`.
    """
    gradient = slot.parameter.grad
    if gradient is None or gradient is slot.view or (gradient.requires_grad and not graph):
        return
    _set_grad(slot, gradient.detach(), slot.view.dtype)


def hand_out(slot: Slot, gradient: Tensor | None) -> None:
    """Sets `.grad` to the gradient that `finish` computed."""
    parameter = slot.parameter
    parameter.grad = None
    if gradient is not None:
        if parameter.grad_dtype != gradient.dtype:
            parameter.grad_dtype = gradient.dtype
        parameter.grad = gradient
    slot.handed_out = gradient
    slot.reduced, slot.stepped = True, False


def _set_grad(slot: Slot, gradient: Tensor | None, dtype: torch.dtype) -> None:
    parameter = slot.parameter
    parameter.grad = None
    if parameter.grad_dtype != dtype:
        parameter.grad_dtype = dtype
    if gradient is not None:
        with torch.no_grad():
            slot.view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        parameter.grad = slot.view


def _is_zero(gradient: Tensor) -> bool:
    if isinstance(gradient, KeptGradient):
        return gradient.is_zeroed
    return not bool(gradient.any())


def release(slots: Iterable[Slot]) -> None:
    """Removes a reducer's attributes from its parameters; gradients stay in `.grad`."""
    for slot in slots:
        parameter: Any = slot.parameter
        vars(parameter).pop("grad_owner", None)
        if slot.fused:
            for attribute in ("main_grad", "grad_added_to_main_grad", "zero_out_wgrad"):
                vars(parameter).pop(attribute, None)
        if isinstance(parameter.grad, KeptGradient):
            parameter.grad = None
        elif parameter.grad is slot.view:
            parameter.grad = None
            parameter.grad_dtype = parameter.dtype
            parameter.grad = slot.view.to(parameter.dtype, copy=True)
        if parameter.grad is None and parameter.grad_dtype != parameter.dtype:
            parameter.grad_dtype = parameter.dtype
        if slot.reduced and parameter.grad is not None:  # for the next reducer
            parameter.grad_released = Released(parameter.grad, slot.stepped)


# -- optimizers -------------------------------------------------------------------------------


def owned_by(optimizer: torch.optim.Optimizer) -> Iterator[tuple[GradientReducer, Slot]]:
    """The parameters that an optimizer updates and a reducer owns."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            owner = owner_of(parameter)
            if owner is not None:
                reducer, slot = owner.reducer, owner.slot
                if reducer is not None and slot is not None:
                    yield reducer, slot


def mark_used(optimizer: torch.optim.Optimizer) -> None:
    """After a step, taken or skipped: the next backward begins anew."""
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


def is_unreduced(slot: Slot, reducer: GradientReducer) -> bool:
    """Whether `.grad` is this rank's alone: from backward, or set without a later finish()."""
    gradient = slot.parameter.grad
    if gradient is None or not slot.reduced:
        return gradient is not None
    return gradient is not slot.handed_out and (slot.stepped or not reducer.has_finished)


def check_reduced(optimizer: torch.optim.Optimizer) -> None:
    """Refuses a step with gradients of this rank alone.

    Raises:
        CommGridError: names the first such parameter.
    """
    reducers: dict[GradientReducer, None] = {}
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


# -- third-party layers that add to `main_grad` -------------------------------------------------


def fuses_gradients(module: nn.Module) -> bool:
    """Whether a module's backward adds its weight's gradient to `weight.main_grad` itself, as
    Megatron-core's gradient accumulation fusion and Transformer Engine do."""
    return any(
        getattr(module, flag, False) is True
        for flag in ("gradient_accumulation_fusion", "fuse_wgrad_accumulation")
    )
