"""Slot: one parameter's place in a bucket, its owner, and the placeholder in `.grad`.

Third-party optimizers, clipping and loss scalers read `.grad`. If it were None while a gradient is
sharded or being summed, they would think it missing: torch's clip_grad_norm_ would return 0 and
clip nothing. So a placeholder stands there, and any use of it raises.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from commgrid.data_parallel.groups import ReductionGroups
from commgrid.errors import CommGridError
from commgrid.parameters import Placement

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


@dataclass(eq=False)
class Slot:
    """One parameter's place in a bucket.

    Args:
        placement: the parameter and its layout on the grid.
        start: its first element in the bucket.

    Attributes:
        view: its elements of the bucket, in its shape.
        kind: the dtype and device that the parameter had when the slot was made.
        reduced: whether `.grad`, if there is one, is reduced; False once backward has added to it.
        stepped: whether an optimizer has used the reduced gradient.
        optimized: whether any optimizer ever updated the parameter.
        sent: whether this rank had a gradient in the last reduction.
        used: whether any rank had one.
        handed_out: the tensor that `finish` put into `.grad`.
        held_back: a reduced gradient that waits for its step, while others are reduced.
        kept, in_flight: placeholders in `.grad` while the gradient is sharded, or being summed.
        fused: whether the parameter's layer adds to `main_grad`, which is then zero between steps.
    """

    placement: Placement
    start: int
    view: Tensor = field(init=False, repr=False)
    kind: tuple[torch.dtype, torch.device] = field(init=False)
    reduced: bool = True
    stepped: bool = False
    optimized: bool = False
    sent: bool = False
    used: bool = False
    handed_out: Tensor | None = field(default=None, repr=False)
    held_back: Tensor | None = field(default=None, repr=False)
    fused: bool = False

    def __post_init__(self) -> None:
        self.kind = (self.parameter.dtype, self.parameter.device)

    @cached_property
    def kept(self) -> KeptGradient:
        """Placeholder in `.grad` while this rank has only a part of the gradient."""
        return KeptGradient(self.view, IN_PARTS)

    @cached_property
    def in_flight(self) -> KeptGradient:
        """Placeholder in `.grad` while a collective sums the gradient."""
        return KeptGradient(self.view, IN_FLIGHT)

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter."""
        return self.placement.parameter

    @property
    def stop(self) -> int:
        """The element after its last one in the bucket."""
        return self.start + self.parameter.numel()

    def of(self, flat: Tensor) -> Tensor:
        """Its elements of a buffer that is laid out as the bucket, in the parameter's shape."""
        return flat[self.start : self.stop].view(self.parameter.shape)


class Reducer(Protocol):
    """The part of a GradientReducer that files below it use."""

    groups: ReductionGroups
    shard: bool
    after_step: bool
    has_finished: bool

    def before_step(self, optimizer: torch.optim.Optimizer) -> None: ...
    def weights_loaded(self) -> None: ...
    def wait_for_weights(self) -> None: ...


class Owner:
    """A parameter's reducer and slot; not pickled with the parameter."""

    def __init__(self, reducer: Reducer, slot: Slot) -> None:
        self._reducer, self._slot = weakref.ref(reducer), weakref.ref(slot)

    @property
    def reducer(self) -> Reducer | None:
        """The reducer, if it still exists."""
        return self._reducer()

    @property
    def slot(self) -> Slot | None:
        """The parameter's slot, if it still exists."""
        return self._slot()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def owner_of(parameter: Tensor) -> Owner | None:
    """The owner of a parameter; None: no reducer has it."""
    owner: Owner | None = getattr(parameter, "grad_owner", None)
    return owner
