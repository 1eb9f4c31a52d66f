"""Slot: one parameter's place in a bucket, and the state of its gradient during a step.

    none ──backward──► local ──► in flight ──finish()──► reduced ──optimizer.step()──► used
      ▲                │   ▲                              │                             │
      │                └───┘ backward adds                └ read, clip, edit            │
      └─────────────── zero_grad() from any of them; backward from used ────────────────┘

Where it can be read, `.grad` is a view of the reducer's buffer, to which backward adds in place. A
gradient that arrives elsewhere, as after `zero_grad()`, is copied there, and `.grad` becomes the
view again. With half-precision parameters and a plain optimizer, `finish` hands out a copy of the
parameter's dtype instead.

While a collective sums a gradient, or if this rank has only a part of it, `.grad` is a placeholder
that raises: third-party optimizers, clipping and loss scalers would take None for no gradient, and
torch's clip_grad_norm_ would return 0 and clip nothing.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from commgrid.data_parallel.groups import ReductionGroups
from commgrid.errors import CommGridError
from commgrid.parameters import Placement
from commgrid.torch_compat.autograd_nodes import has_hooks, will_run

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


class State(Enum):
    """Whose numbers `.grad` has."""

    LOCAL = "local"
    """This rank's; also where there is none."""
    SENT = "sent"
    """In flight: a collective sums them with other ranks'."""
    ABSENT = "absent"
    """In flight: a collective sums other ranks', and this rank had none to add."""
    REDUCED = "reduced"
    """The average; None where no rank had any."""
    USED = "used"
    """The same, after an optimizer's step."""


class KeptGradient(Tensor):
    """A gradient without data, in the parameter's shape; any use but zeroing raises an error.

    Args:
        slot: of the parameter; it has the shape, dtype and device of its part of the buffer.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    slot: weakref.ref[Slot]
    is_zeroed = False  # by zero_grad(set_to_none=False), since the last finish

    @staticmethod
    def __new__(cls, slot: Slot) -> KeptGradient:
        view = slot.view
        made: KeptGradient = torch.Tensor._make_wrapper_subclass(
            cls, view.shape, dtype=view.dtype, device=view.device
        )
        made.slot = weakref.ref(slot)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raises CommGridError for every operation except detaching and zeroing."""
        name = func.overloadpacket.__name__
        if name in _PASSING:
            return args[0]
        lists = [each if isinstance(each, list | tuple) else (each,) for each in args]
        listed = [each for some in lists for each in some]
        kept = [each for each in listed if isinstance(each, cls)]
        slots = [slot for each in kept if (slot := each.slot()) is not None]
        if name in _ZEROING and all(slot.state is not State.SENT for slot in slots):
            for each in kept:
                each.is_zeroed = True
            others = [each for each in lists[0] if not isinstance(each, cls)]
            torch._foreach_zero_([*others, *(slot.view for slot in slots)])
            return args[0]
        shape, slot = tuple(kept[0].shape), kept[0].slot()
        why = IN_FLIGHT if slot is not None and slot.state is State.SENT else IN_PARTS
        raise CommGridError(f"{name} was called on a gradient of shape {shape} {why}")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"KeptGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


class Reducer(Protocol):
    """The part of a GradientReducer that files below it use."""

    groups: ReductionGroups
    shard: bool
    after_step: bool

    def arrived(self, slot: Slot) -> None: ...
    def before_step(self, optimizer: torch.optim.Optimizer) -> None: ...
    def gradients_of(self, group: list[Tensor]) -> list[Tensor]: ...
    def rescaled(self) -> None: ...
    def keep(self, keeps: bool = True) -> None: ...
    def weights_loaded(self) -> None: ...
    def wait_for_weights(self) -> None: ...


@dataclass(eq=False)
class Slot:
    """One parameter's place in a bucket; not pickled with the parameter.

    Args:
        placement: the parameter and its layout on the grid.
        start: its first element in the bucket.

    Attributes:
        parameter: the parameter.
        view: its elements of the bucket, in its shape.
        kind: the dtype and device that the parameter had when the slot was made.
        state: whose numbers `.grad` has.
        updated: whether any optimizer ever updated the parameter.
        handed_out: the tensor that `finish` put into `.grad`.
        held_back: a reduced gradient that waits for its step, while others are reduced.
    """

    placement: Placement
    start: int
    parameter: nn.Parameter = field(init=False, repr=False)
    view: Tensor = field(init=False, repr=False)
    kind: tuple[torch.dtype, torch.device] = field(init=False)
    state: State = State.LOCAL
    updated: bool = False
    handed_out: Tensor | None = field(default=None, repr=False)
    held_back: Tensor | None = field(default=None, repr=False)
    _reducer: weakref.ref[Reducer] | None = field(default=None, repr=False)
    _hooks: list[Any] = field(default_factory=list, repr=False)
    _stream: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.parameter = self.placement.parameter
        self.kind = (self.parameter.dtype, self.parameter.device)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    @cached_property
    def placeholder(self) -> KeptGradient:
        """Stands in `.grad` while the gradient is being summed, or in parts."""
        return KeptGradient(self)

    @property
    def reducer(self) -> Reducer | None:
        """The reducer, if it still exists."""
        return self._reducer() if self._reducer is not None else None

    @property
    def stop(self) -> int:
        """The element after its last one in the bucket."""
        return self.start + self.parameter.numel()

    @property
    def is_in_flight(self) -> bool:
        """Whether its bucket is being summed."""
        return self.state in (State.SENT, State.ABSENT)

    @property
    def is_unreduced(self) -> bool:
        """Whether `.grad` is this rank's alone: from backward, or set without a later finish()."""
        gradient = self.parameter.grad
        if gradient is None or self.state is State.REDUCED:
            return False
        return self.state in (State.LOCAL, State.SENT) or gradient is not self.handed_out

    def of(self, flat: Tensor) -> Tensor:
        """Its elements of a buffer that is laid out as the bucket, in the parameter's shape."""
        return flat[self.start : self.stop].view(self.parameter.shape)

    # -- of which reducer ---------------------------------------------------------------

    def attach(self, reducer: Reducer) -> None:
        """Has every gradient of the parameter pass a reducer, and any that is there already.

        A frozen parameter passes it too, once it is trained.
        """
        parameter: Any = self.parameter
        self._reducer, parameter.grad_owner = weakref.ref(reducer), self
        self._stream = _stream(parameter)
        left, version = getattr(parameter.grad, "left_by_reducer", (State.LOCAL, None))
        if version is not None and version == parameter.grad._version:
            self.state, self.handed_out = left, parameter.grad
        was_trained = parameter.requires_grad
        with torch.enable_grad():
            node: Any = parameter.requires_grad_().view_as(parameter).grad_fn.next_functions[0][0]
        parameter.requires_grad_(was_trained)
        # The node lives only while it is referenced, and its hooks with it.
        self._hooks = [node, node.register_prehook(self.begin), node.register_hook(self.arrive)]

    def release(self) -> None:
        """Removes a reducer's attributes and hooks; an ordinary gradient stays in `.grad`."""
        parameter: Any = self.parameter
        for hook in self._hooks[1:]:
            hook.remove()
        self._hooks.clear()
        self._reducer = None
        vars(parameter).pop("grad_owner", None)
        is_reduced = self.state in (State.REDUCED, State.USED) and not self.is_unreduced
        if isinstance(parameter.grad, KeptGradient):
            parameter.grad = None
        elif parameter.grad is self.view:
            self._set(self.view.to(parameter.dtype, copy=True))
        if parameter.grad is None:
            self._set(None)
        elif is_reduced:  # for the next reducer, unless it is written to before
            parameter.grad.left_by_reducer = self.state, parameter.grad._version

    # -- during backward ----------------------------------------------------------------

    def begin(self, _: object = None) -> None:
        """Prepares the parameter for a gradient that backward is about to add to `.grad`.

        Raises:
            CommGridError: `.grad` is reduced, and neither a step nor zero_grad() came since, or it
                is in flight.
        """
        reducer, parameter = self.reducer, self.parameter
        if reducer is None:
            return
        if self.is_in_flight:
            raise CommGridError(
                f"backward reached {self.placement} again before finish(); call finish() after "
                "each backward, wrap all microbatches but the last in no_sync(), checkpoint "
                "activations with use_reentrant=False, and give a step up with the reducer's "
                "zero_grad()"
            )
        gradient = parameter.grad
        is_used = self.state is State.USED and gradient is self.handed_out
        if gradient is not None and (self.state is State.REDUCED or is_used):
            # A parameter in no optimizer counts as used once any optimizer steps.
            is_used = is_used or (reducer.after_step and not self.updated)
            if not is_used and not _is_zero(gradient):
                raise CommGridError(
                    f"backward reached {self.placement} whose gradient finish() has reduced, and "
                    "no optimizer step or zero_grad() came since; a sum of reduced and new "
                    "gradients cannot be reduced. Wrap all microbatches of a step but the last in "
                    "no_sync() and call finish() once, or call zero_grad() to drop the reduced one"
                )
            if is_used or isinstance(gradient, KeptGradient):
                parameter.grad = None
        self.state = State.LOCAL
        if parameter.grad_dtype != self.view.dtype:
            self._move(parameter.grad)

    def arrive(self, *_: object) -> None:
        """Hands the gradient that backward has added to `.grad` to the reducer."""
        reducer = self.reducer
        if reducer is not None:
            reducer.arrived(self)

    def take_in(self, *, graph: bool = False) -> None:
        """Copies a gradient stored elsewhere into the buffer, and points `.grad` there.

        Args:
            graph: also copy if `.grad` has a graph, as after `backward(create_graph=True)`.
        """
        gradient = self.parameter.grad
        if gradient is None or gradient is self.view or (gradient.requires_grad and not graph):
            return
        self._move(gradient.detach())

    def open(self) -> Tensor | None:
        """The buffer to which the backward under way may add the gradient; None: autograd must.

        It then returns None for the gradient, and autograd tells the reducer that it has arrived.
        """
        parameter = self.parameter
        if self.reducer is None or torch.is_grad_enabled() or has_hooks(parameter):
            return None
        if _stream(parameter) != self._stream or not will_run(self._hooks[0]):
            return None
        self.begin()
        if parameter.grad is None:
            parameter.grad = self.view.zero_()
        return self.view if parameter.grad is self.view else None

    # -- in flight ----------------------------------------------------------------------

    def send(self) -> bool:
        """Whether this rank has a gradient to add to the sum, which is then in the buffer."""
        gradient = self.parameter.grad
        is_ours = self.state is State.LOCAL or gradient is not self.handed_out
        if gradient is not None and is_ours:
            self.take_in(graph=True)
            self.state = State.SENT
            return True
        if gradient is not None and self.state is State.REDUCED:
            self.held_back = self.view.clone()
        self.state = State.ABSENT
        return False

    # -- after finish -------------------------------------------------------------------

    def restore(self) -> bool:
        """Whether a reduced gradient has waited for its step while others were reduced."""
        if self.held_back is None:
            return False
        self.view.copy_(self.held_back)
        self.held_back, self.state = None, State.REDUCED
        return True

    def hand_out(self, gradient: Tensor | None) -> None:
        """Sets `.grad` to the gradient that `finish` computed."""
        self._set(gradient)
        self.handed_out, self.held_back, self.state = gradient, None, State.REDUCED

    def drop(self) -> None:
        """Sets `.grad` to None."""
        self.hand_out(None)
        self.state = State.LOCAL

    def _set(self, gradient: Tensor | None) -> None:
        """Sets `.grad`, for which torch wants to know the dtype before."""
        parameter = self.parameter
        parameter.grad = None
        dtype = parameter.dtype if gradient is None else gradient.dtype
        if parameter.grad_dtype != dtype:
            parameter.grad_dtype = dtype
        if gradient is not None:
            parameter.grad = gradient

    @torch.no_grad()
    def _move(self, gradient: Tensor | None) -> None:
        """Makes `.grad` the view, with these numbers; None: allows it to become the view."""
        self._set(self.view)
        if gradient is None:
            self.parameter.grad = None
        else:
            self.view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)


def _is_zero(gradient: Tensor) -> bool:
    if isinstance(gradient, KeptGradient):
        return gradient.is_zeroed
    return not bool(gradient.any())


def _stream(parameter: Tensor) -> Any:
    """The current CUDA stream of its device; None: it has none."""
    return torch.cuda.current_stream(parameter.device) if parameter.is_cuda else None


def slot_of(parameter: Tensor) -> Slot | None:
    """The slot of a parameter; None: no reducer has it."""
    slot: Slot | None = getattr(parameter, "grad_owner", None)
    return slot if slot is not None and slot.reducer is not None else None


def is_capturing(tensor: Tensor) -> bool:
    """Whether the current CUDA stream is capturing a graph; False for a CPU tensor."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
