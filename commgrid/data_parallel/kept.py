"""What stands in `.grad` while a reducer keeps the gradient to itself.

Optimizers, clipping and loss scalers of others look at `.grad`. None would tell them that there is
no gradient, so that torch's clip_grad_norm_ answers 0 and clips nothing; this raises instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from commgrid.errors import CommGridError

_PASSING = ("zero_", "_foreach_zero_", "detach", "detach_", "requires_grad_")  # zeroing calls these


class KeptGradient(Tensor):
    """A gradient without numbers: of the parameter's shape, and an error for whoever reads it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    is_zeroed = False  # by zero_grad(set_to_none=False)

    @staticmethod
    def __new__(cls, gradient: Tensor) -> KeptGradient:
        made: KeptGradient = torch.Tensor._make_wrapper_subclass(
            cls, gradient.shape, dtype=gradient.dtype, device=gradient.device
        )
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raises for every operation but those that zero a gradient."""
        name = func.overloadpacket.__name__
        if name in _PASSING:
            if "zero" in name:
                for each in args[0] if isinstance(args[0], list | tuple) else args[:1]:
                    each.is_zeroed = isinstance(each, cls)
            return args[0]
        first = next((arg for arg in args if isinstance(arg, cls)), None)
        shape = f" of shape {tuple(first.shape)}" if first is not None else ""
        raise CommGridError(
            f"{name} was called on a gradient{shape} that a GradientReducer keeps, in parts or for "
            "its ShardedOptimizer; use reducer.gradient_norm() and reducer.clip_gradients() for "
            "norms, commgrid.data_parallel.GradScaler for loss scaling, and the ShardedOptimizer "
            "for updates; optimizer.zero_grad() or reducer.close() takes it off the parameter"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"KeptGradient(shape={tuple(self.shape)}, dtype={self.dtype})"
