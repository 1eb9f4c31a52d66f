"""Gradients as they arrive in a bucket: from autograd, from a layer that wrote there, or another's.

A parameter says by its attributes how its gradient comes (`tensor_parallel.main_grad`); a slot
keeps whether it has come, and whether its memory is zero, as layers of others expect it to be.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from commgrid.data_parallel.buckets import Bucket, Slot
from commgrid.data_parallel.kept import KeptGradient
from commgrid.errors import CommGridError
from commgrid.parameters import drop_main_grad

if TYPE_CHECKING:
    from commgrid.data_parallel.reducer import GradientReducer


class Owner:
    """Who a parameter's buffer belongs to; a copy or a pickle of the parameter has none."""

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = weakref.ref(reducer)

    @property
    def reducer(self) -> GradientReducer | None:
        """That one, if it still is there."""
        return self._reducer()

    @property
    def keeps_gradients(self) -> bool:
        """Whether that reducer keeps the gradients to itself."""
        reducer = self._reducer()
        return reducer is not None and reducer.keeps_gradients

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def take_in(slot: Slot) -> None:
    """Sees to it that a gradient that has come is in the bucket, once."""
    parameter: Any = slot.parameter
    gradient, parameter.grad = parameter.grad, None
    added, parameter.grad_added_to_main_grad = parameter.grad_added_to_main_grad, False
    if parameter.main_grad_written:  # by a layer of commgrid's
        parameter.main_grad_written, slot.arrived, slot.is_zero = False, True, False
    if added:
        _check_foreign(slot)
        slot.foreign = slot.arrived = True
        slot.is_zero = parameter.overwrite_main_grad = False
        if not getattr(parameter, "zero_out_wgrad", False):
            return  # a dummy
    if gradient is None:
        return
    gradient = gradient.to_dense() if gradient.is_sparse else gradient
    if parameter.overwrite_main_grad and not slot.arrived:
        slot.view.copy_(gradient)
    else:
        slot.view.add_(gradient)
    slot.arrived, slot.is_zero, parameter.overwrite_main_grad = True, False, False


def _check_foreign(slot: Slot) -> None:
    """Refuses what was added to a buffer that held the gradient of the step before."""
    if not slot.arrived and not slot.is_zero:
        raise CommGridError(
            f"{slot.placement}: its layer has added to main_grad itself, as Megatron-core's "
            "gradient accumulation fusion and Transformer Engine do, where the gradient of an "
            "earlier step still was; such a layer does so in every step, and after finish() come "
            "the optimizer's step() or zero_grad()"
        )


def zero(slots: Iterable[Slot]) -> None:
    due = [slot for slot in slots if not slot.is_zero]
    if due:
        torch._foreach_zero_([slot.view for slot in due])
    for slot in due:
        slot.is_zero = True


def wait_for(bucket: Bucket) -> None:
    if bucket.pending is not None:
        pending, bucket.pending = bucket.pending, None
        pending.wait()


def detach(handles: list[tuple[Any, Any, Any]], slots: list[Slot]) -> None:
    for _, *hooks in handles:
        for hook in hooks:
            hook.remove()
    handles.clear()
    for slot in slots:
        parameter: Any = slot.parameter
        drop_main_grad(parameter)
        if isinstance(parameter.grad, KeptGradient):
            parameter.grad = None
        elif slot.handed_out is not None:
            parameter.handed_out_grad = slot.handed_out  # a next reducer is not to add to it
