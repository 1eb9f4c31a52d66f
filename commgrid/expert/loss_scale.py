"""The factor by which a model's loss is multiplied before backward, for the routers' own losses.

    loss = follow_loss_scale(loss_of(model(x)), model)     the mean, or with summed_loss the sum
    (scaler.scale(loss) / microbatches).backward()         ∂loss = scale / microbatches

A hook on `loss` reads ∂loss, which autograd computes before it reaches any router. Pipeline stages
without a loss call `set_loss_scale(model, scale)`.
"""

from __future__ import annotations

import math
from functools import partial

from torch import Tensor, nn

from commgrid.errors import ShapeError, SpecError
from commgrid.parameters.loss_owner import LossOwner


def follow_loss_scale(loss: Tensor, model: nn.Module) -> Tensor:
    """Scale the auxiliary losses of a model's routers as its loss will be scaled.

    Call it before anything multiplies the loss: a GradScaler, the number of microbatches. The
    routers keep the scale until it is set again, so call it for every loss, or for none.

    Args:
        loss: of shape (), the model's mean loss, or its sum for routers with `summed_loss`.
        model: whose routers are meant, at any depth.

    Returns:
        The same loss.

    Raises:
        ShapeError: the loss is not of shape ().

    Example:
        >>> import torch
        >>> from commgrid.expert import Router
        >>> router = Router(hidden=4, num_experts=8, top_k=2, z_loss=0.1)
        >>> loss = follow_loss_scale(router(torch.randn(5, 4)).weights.square().mean(), router)
        >>> (loss / 8).backward()
        >>> router.loss_scale
        tensor(0.1250)
    """
    if loss.dim():
        raise ShapeError(
            f"follow_loss_scale: a loss of shape {tuple(loss.shape)}; expected (), so that one "
            "number scales it. Call it after .mean() or .sum(), or use set_loss_scale"
        )
    if loss.requires_grad:
        loss.register_hook(partial(_hear, model))  # type: ignore[no-untyped-call]
    return loss


def set_loss_scale(model: nn.Module, scale: float | Tensor) -> None:
    """Scale the auxiliary losses of a model's routers, as its loss is multiplied before backward.

    Args:
        model: whose routers are meant, at any depth.
        scale: a number, or a tensor of shape (), such as `scaler.scale(torch.ones(()))`; it is read
            in backward and holds until it is set again.

    Raises:
        SpecError: a number that is not finite and above 0, or a tensor of another shape. A tensor's
            value is not read here.
    """
    if isinstance(scale, Tensor):
        if scale.dim():
            raise SpecError(
                f"set_loss_scale: a scale of shape {tuple(scale.shape)}; expected shape ()"
            )
        scale = scale.detach().clone()
    elif not 0 < scale < math.inf:
        raise SpecError(f"set_loss_scale: scale={scale}: expected finite and above 0")
    _tell(model, scale)


def _hear(model: nn.Module, gradient: Tensor) -> None:
    _tell(model, gradient.detach().clone())


def _tell(model: nn.Module, scale: float | Tensor) -> None:
    for module in model.modules():
        if isinstance(module, LossOwner):
            module.loss_scale = scale
