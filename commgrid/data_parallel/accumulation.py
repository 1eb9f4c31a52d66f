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
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from commgrid.data_parallel.bucket import Bucket
from commgrid.data_parallel.slot import KeptGradient, Owner, Reducer, Slot
from commgrid.errors import CommGridError


class Released:
    """The gradient that a closed reducer has left in `.grad`; not pickled with the parameter."""

    def __init__(self, gradient: Tensor, stepped: bool) -> None:
        self._gradient, self.stepped = weakref.ref(gradient), stepped

    def is_in(self, parameter: Tensor) -> bool:
        """Whether `.grad` is still that gradient."""
        return self._gradient() is parameter.grad

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


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


@torch.no_grad()
def fill(bucket: Bucket) -> None:
    """Copies every gradient into the bucket, and zeros where this rank has none."""
    absent = []
    for slot in bucket.slots:
        gradient = slot.parameter.grad
        slot.sent = gradient is not None and not (slot.reduced and gradient is slot.handed_out)
        if slot.sent:
            take_in(slot, graph=True)
            continue
        if gradient is not None and not slot.stepped:
            slot.held_back = slot.view.clone()
        absent.append(slot.view)
    if absent:
        torch._foreach_zero_(absent)


def hand_out_bucket(bucket: Bucket, *, skips: bool, shard: bool, exact: bool) -> None:
    """Sets `.grad` of each parameter to its view, or to a copy of the dtype that optimizers expect.

    Args:
        bucket: with reduced gradients.
        skips: whether this step has no gradients.
        shard: whether this rank has a part of each sum only.
        exact: whether gradients keep the bucket's dtype.
    """
    dtype = bucket.slots[0].parameter.dtype
    copies = None
    if not shard and not exact and bucket.gradient.dtype != dtype:
        copies = bucket.gradient.to(dtype)
    for slot in bucket.slots:
        held_back, slot.held_back = slot.held_back, None
        if skips or not (slot.used or held_back is not None):
            slot.used = False
            hand_out(slot, None)
        elif not slot.used:
            slot.view.copy_(held_back)  # type: ignore[arg-type]
            slot.used = True
        elif shard:
            slot.kept.is_zeroed = False
            hand_out(slot, slot.kept)
        elif copies is not None:
            hand_out(slot, slot.of(copies))
        else:
            hand_out(slot, slot.view.clone() if slot.fused else slot.view)
        if slot.fused and not shard:
            slot.view.zero_()


def changed_after_sending(buckets: Iterable[Bucket]) -> CommGridError | None:
    """The error for a `.grad` that was replaced while its sum was under way."""
    for bucket in buckets:
        for slot in bucket.slots if bucket.launched else ():
            gradient = slot.parameter.grad
            left = (slot.in_flight, slot.view) if slot.sent else (None, slot.handed_out)
            if not any(gradient is each for each in left):
                return CommGridError(
                    f".grad of {slot.placement} was set after backward had begun to sum it "
                    "with other ranks', and before finish(); change gradients after finish(), "
                    "and give a step up with the reducer's zero_grad()"
                )
    return None


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


def is_unreduced(slot: Slot, reducer: Reducer) -> bool:
    """Whether `.grad` is this rank's alone: from backward, or set without a later finish()."""
    gradient = slot.parameter.grad
    if gradient is None or not slot.reduced:
        return gradient is not None
    return gradient is not slot.handed_out and (slot.stepped or not reducer.has_finished)


def is_capturing(tensor: Tensor) -> bool:
    """Whether the current CUDA stream is capturing a graph; False for a CPU tensor."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def attach(
    bucket: Bucket, index: int, owner: Owner, arrived: Callable[[Any, Bucket, int], object]
) -> tuple[Any, ...]:
    """Have every gradient of a parameter pass its reducer; return the hooks and what keeps them.

    `arrived` is called with the reducer, `bucket` and `index` once `.grad` has the gradient.
    """
    slot = bucket.slots[index]
    parameter: Any = slot.parameter
    take_over(slot, owner)

    def before(_: tuple[Tensor | None, ...]) -> tuple[None] | None:
        reducer = owner.reducer
        if reducer is None:
            return None
        if bucket.launched:
            raise CommGridError(
                f"backward reached {slot.placement} again before finish(); call finish() after "
                "each backward, wrap all microbatches but the last in no_sync(), checkpoint "
                "activations with use_reentrant=False, and give a step up with the reducer's "
                "zero_grad()"
            )
        was_zeroed = parameter.grad is None and not slot.reduced
        begin(slot, after_step=reducer.after_step)
        if not slot.fused or not parameter.grad_added_to_main_grad:
            return None
        parameter.grad_added_to_main_grad = False
        if was_zeroed:
            raise CommGridError(
                f"{slot.placement}: its gradient was zeroed after a backward of this step, and "
                "its layer adds to main_grad, which the model's and the optimizer's "
                "zero_grad() do not know; use the reducer's zero_grad()"
            )
        parameter.grad = slot.view
        return None if getattr(parameter, "zero_out_wgrad", False) else (None,)

    def after(*_: object) -> None:
        reducer = owner.reducer
        if reducer is not None:
            arrived(reducer, bucket, index)

    with torch.enable_grad():
        node: Any = parameter.view_as(parameter).grad_fn.next_functions[0][0]
    # The node lives only while it is referenced, and its hooks with it.
    return node, node.register_prehook(before), node.register_hook(after)


# -- third-party layers that add to `main_grad` -------------------------------------------------


def fuses_gradients(module: nn.Module) -> bool:
    """Whether a module's backward adds its weight's gradient to `weight.main_grad` itself, as
    Megatron-core's gradient accumulation fusion and Transformer Engine do."""
    return any(
        getattr(module, flag, False) is True
        for flag in ("gradient_accumulation_fusion", "fuse_wgrad_accumulation")
    )


def set_up_fused(model: nn.Module, slots: Iterable[Slot]) -> None:
    """Gives `main_grad` to the weights of layers that add to it."""
    modules = list(model.modules())
    uses = Counter(id(p) for module in modules for p in module._parameters.values())
    slot_of = {id(slot.parameter): slot for slot in slots}
    for module in filter(fuses_gradients, modules):
        for each in module._parameters.values():
            parameter: Any = each
            slot = slot_of.get(id(parameter))
            if slot is not None:
                slot.fused, parameter.main_grad = True, slot.view
                parameter.grad_added_to_main_grad = False
                if uses[id(parameter)] > 1:  # a dummy that meets a gradient has to be zero
                    parameter.zero_out_wgrad = True
