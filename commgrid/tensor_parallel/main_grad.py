"""Gradients of weights that go straight into a buffer, `weight.main_grad`.

That is Megatron's gradient accumulation fusion: a layer's backward adds to the buffer, whatever its
dtype. Where the weight has the attribute `grad_added_to_main_grad`, it is set, and a gradient that
means nothing is returned, so that autograd still reports this weight, on the thread that runs
backward for its device. commgrid's layers return `no_gradient`: zeros that take no memory, and that
whoever reduces gradients knows and drops. Added to another gradient of the same weight they change
nothing.

With `overwrite_main_grad` set, the first gradient replaces what the buffer held, and the mark is
taken back.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from commgrid.errors import CommGridError


class MainGrad(NamedTuple):
    """A weight's buffer.

    Args:
        into: what the gradient is to be added to.
        overwrite: whether it replaces what is there.
        result: what backward returns for the weight.
    """

    into: Tensor
    overwrite: bool
    result: Tensor | None


def claim_main_grad(weight: Tensor, ctx: Any) -> MainGrad | None:
    """The buffer that a weight's gradient is to be added to; whoever asks then does so.

    None where there is no buffer, or where this backward asks for other gradients than the
    weight's (`torch.autograd.grad`), so that the buffer must stay as it is.

    Raises:
        CommGridError: a CUDA graph is being captured, whose replays would not see the marks.
    """
    into: Tensor | None = getattr(weight, "main_grad", None)
    if into is None or torch.compiler.is_compiling() or not _accumulates(weight, ctx):
        return None
    if is_capturing(weight):
        raise CommGridError(
            f"the gradient of a weight of shape {tuple(weight.shape)} was to go to its main_grad "
            "while a CUDA graph is being captured; a replay would overwrite or add as this once, "
            "whatever is due. Close its GradientReducer before the capture, or train without graphs"
        )
    parameter: Any = weight
    overwrite = getattr(parameter, "overwrite_main_grad", False)
    if overwrite:
        parameter.overwrite_main_grad = False
    if getattr(parameter, "main_grad_owner", None) is not None:
        parameter.main_grad_written = True
        return MainGrad(into, overwrite, no_gradient(weight))
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return MainGrad(into, overwrite, None)
    parameter.grad_added_to_main_grad = True
    return MainGrad(into, overwrite, no_gradient(weight))


def _accumulates(weight: Tensor, ctx: Any) -> bool:
    """Whether the backward that is running would add to `weight.grad`."""
    for node, _ in ctx.next_functions:
        if getattr(node, "variable", None) is weight:
            try:
                return bool(torch._C._will_engine_execute_node(node))
            except RuntimeError:  # torch.autograd.grad with respect to the weight itself
                return False
    return False


def no_gradient(weight: Tensor) -> Tensor:
    """What backward returns for a weight whose gradient is in its buffer: zeros of its shape, all
    of them one number in memory."""
    return _zero(weight.dtype, weight.device).expand(weight.shape)


def is_no_gradient(gradient: Tensor | None) -> bool:
    """Whether it is what `no_gradient` makes, and nothing has been added to it."""
    if gradient is None or type(gradient) is not Tensor:
        return False
    return gradient.data_ptr() == _zero(gradient.dtype, gradient.device).data_ptr()


@lru_cache(maxsize=64)
def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device)


def is_capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured on the stream that would work on a tensor."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
