"""LossOwner: a module that adds losses of its own to the model's, which may be scaled.

| the model's loss | a loss of the module's own is multiplied by |
|---|---|
| `scaler.scale(loss)`, also divided afterwards, by commgrid's GradScaler | the same |
| through `follow_loss_scale`, or with `set_loss_scale` | the same |
| `loss / k` in each of k backward passes of a step | 1: refused before the step, k times too much |
| torch's GradScaler | 1: refused before the step |
| otherwise | 1 |

A division may as well be part of the loss, as that of a sum by its tokens is. So only one by the
number of passes is refused, which is what accumulation over microbatches takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from commgrid.errors import CommGridError
from commgrid.parameters.sharded_module import StepHooks
from commgrid.torch_compat.autograd_nodes import running_pass, watch_backward
from commgrid.torch_compat.mesh import BeforeUnscaling


class LossOwner(nn.Module):
    """A module that adds losses of its own to the model's.

    Attributes:
        loss_scale: factor of the model's loss before backward; read in backward. None: not set.
        summed_loss: whether the model's loss is a sum; None: not said, and taken for a mean.
    """

    loss_scale: float | Tensor | None = None
    summed_loss: bool | None = None
    _num_passes = 0
    _divisors: frozenset[float] = frozenset()  # of the loss in each of them
    _was_scaled = False

    @property
    def added(self) -> str:
        """Names of the losses that it adds now; empty: none."""
        raise NotImplementedError

    def attach(self, tensor: Tensor, loss: Tensor) -> Tensor:
        """The tensor itself; its backward adds the gradients of the loss, scaled."""
        _HOOKS.add_user(self)
        attached: Tensor = _with_loss(tensor, loss, self)
        return attached

    def scale_now(self) -> float | Tensor:
        """The factor of the model's loss in the backward that runs."""
        running = running_pass()
        if running is not None and id(self) not in running.readers:
            running.readers.add(id(self))
            divisors = running.divisors
            self._divisors = divisors if self._num_passes == 0 else self._divisors & divisors
            self._num_passes += 1
        found = running.scale if running is not None else None
        self._was_scaled = found is not None
        scale = found if self.loss_scale is None else self.loss_scale
        return 1.0 if scale is None else scale

    def fault(self, *, counted: bool = False, scaled: bool = False) -> CommGridError | None:
        """The error if its losses do not fit the step, whose passes end here.

        Args:
            counted: gradients are divided by a count of tokens.
            scaled: a GradScaler divides gradients by its scale.
        """
        passes, divisors = self._num_passes, self._divisors
        self._num_passes = 0
        if not self.added or not self.training:
            return None
        who = f"{type(self).__name__}({self.extra_repr()})"
        untold = self.loss_scale is None
        call = "loss = commgrid.expert.follow_loss_scale(loss, model)"
        if counted and self.summed_loss is None:
            return CommGridError(
                f"{who}: finish(count=…) divides the gradients of a summed loss, but its "
                f"{self.added} are added to a mean. Give summed_loss=True, or False if the model's "
                "loss is a mean"
            )
        if scaled and untold and not self._was_scaled:
            return CommGridError(
                f"{who}: the GradScaler multiplied the model's loss, but not the router's "
                f"{self.added}. Call {call} before scaler.scale(loss), and on pipeline stages "
                "without a loss commgrid.expert.set_loss_scale"
            )
        if untold and passes > 1 and any(math.isclose(d, passes, rel_tol=1e-6) for d in divisors):
            return CommGridError(
                f"{who}: the model's loss was divided by {passes} in each of {passes} backward "
                f"passes, but the router's {self.added} were not. Call {call} before anything "
                "divides it"
            )
        return None


def losses_not_told(
    modules: Iterable[nn.Module], *, counted: bool = False, scaled: bool = False
) -> CommGridError | None:
    """The error of the first module whose own losses do not fit the step, as `fault` says."""
    owners = [module for module in modules if isinstance(module, LossOwner)]
    found = [owner.fault(counted=counted, scaled=scaled) for owner in owners]
    return next((error for error in found if error is not None), None)


def _refuse(optimizer: Optimizer, *, scaled: bool) -> None:
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    owners = [one for one in _HOOKS.users if any(id(p) in updated for p in one.parameters())]
    wrong = losses_not_told(owners, scaled=scaled)
    if wrong is not None:
        raise wrong


_HOOKS = StepHooks(
    lambda: [
        register_optimizer_step_pre_hook(lambda optimizer, *_: _refuse(optimizer, scaled=False)),
        BeforeUnscaling(lambda _, optimizer: _refuse(optimizer, scaled=True)),
        watch_backward(),
    ]
)


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor, owner: LossOwner) -> Tensor:
        ctx.owner, ctx.like = owner, loss.detach()
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        scale = ctx.owner.scale_now()
        if isinstance(scale, Tensor):
            return gradient, scale.to(ctx.like), None
        return gradient, torch.full_like(ctx.like, scale), None


# Compiled, backward would read the scale of the step that traced it.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _with_loss(tensor: Tensor, loss: Tensor, owner: LossOwner) -> Any:
    return _WithLoss.apply(tensor, loss, owner)  # type: ignore[no-untyped-call]
