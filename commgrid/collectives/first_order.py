"""Backwards that cannot be differentiated again, and the error of a program that tries.

torch's `once_differentiable` does not see that a gradient also depends on saved weights, and then
silently omits that part of a second derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from commgrid.errors import CommGridError

Backward = Callable[..., Any]


def first_order(who: str) -> Callable[[Backward], Backward]:
    """Decorate the backward of a torch.autograd.Function that has no second derivative.

    The backward finds `ctx.makes_graph` where a graph of its result is asked for.

    Args:
        who: the layer or call, for the message.
    """

    def decorate(backward: Backward) -> Backward:
        @wraps(backward)
        def once(ctx: Any, *gradients: Any) -> Any:
            if torch.is_grad_enabled():
                ctx.makes_graph = True
            with torch.no_grad():
                made = backward(ctx, *gradients)
            if not torch.is_grad_enabled():
                return made
            several = made if isinstance(made, tuple) else (made,)
            root = torch.zeros((), requires_grad=True)
            return _Refused.apply(root, who, *several)  # type: ignore[no-untyped-call]

        return once

    return decorate


class _Refused(torch.autograd.Function):
    """The identity, whose backward is an error."""

    @staticmethod
    def forward(
        ctx: Any, root: Tensor, who: str, *made: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.who = who
        return tuple(one.view_as(one) if one is not None else None for one in made)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise CommGridError(
            f"a gradient through {ctx.who} was differentiated again (create_graph=True, as for a "
            "gradient penalty), which it does not support; compute the penalty on a part of the "
            "model without it, or build the layer from commgrid.collectives' pairs, such as "
            "copy_to_group and reduce_from_group, which have all derivatives"
        )
