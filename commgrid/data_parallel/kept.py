"""Placeholder in `.grad` for a gradient that is sharded or being summed; any use raises.

Third-party optimizers, clipping and loss scalers read `.grad`. With None there, they would take
the gradient for missing: torch's clip_grad_norm_ would return 0 and clip nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from commgrid.errors import CommGridError

_PASSING = ("detach", "detach_", "requires_grad_")  # zero_grad(set_to_none=False) calls them
_ZEROING = ("zero_", "_foreach_zero_")

IN_PARTS = (
    "that a GradientReducer keeps in parts for its ShardedOptimizer; use reducer.gradient_norm() "
    "and reducer.clip_gradients() for norms, commgrid.data_parallel.GradScaler for loss scaling, "
    "and the ShardedOptimizer for updates; optimizer.zero_grad() or reducer.close() takes it off "
    "the parameter"
)
IN_FLIGHT = (
    "that backward has begun to sum with other ranks'; call the reducer's finish() first, then "
    "read, clip, unscale or edit it; the reducer's zero_grad() gives the step up"
)


class KeptGradient(Tensor):
    """A gradient without data, in the parameter's shape; any use but zeroing raises an error.

    Args:
        gradient: the buffer that it stands for; it has its shape, dtype and device.
        why: the error's explanation: `IN_PARTS`, which may be zeroed, or `IN_FLIGHT`.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    why: str
    buffer: Tensor
    is_zeroed = False  # by zero_grad(set_to_none=False), since the last finish

    @staticmethod
    def __new__(cls, gradient: Tensor, why: str) -> KeptGradient:
        made: KeptGradient = torch.Tensor._make_wrapper_subclass(
            cls, gradient.shape, dtype=gradient.dtype, device=gradient.device
        )
        made.why, made.buffer = why, gradient
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raises CommGridError for every operation except detaching and zeroing."""
        name = func.overloadpacket.__name__
        listed = args[0] if isinstance(args[0], list | tuple) else args
        kept = [arg for arg in listed if isinstance(arg, cls)]
        if name in _PASSING:
            return args[0]
        if name in _ZEROING and all(each.why == IN_PARTS for each in kept):
            for each in kept:
                each.is_zeroed = True
            torch._foreach_zero_([e.buffer if isinstance(e, cls) else e for e in listed])
            return args[0]
        shape = f" of shape {tuple(kept[0].shape)}" if kept else ""
        raise CommGridError(f"{name} was called on a gradient{shape} {kept[0].why if kept else ''}")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"KeptGradient(shape={tuple(self.shape)}, dtype={self.dtype})"
