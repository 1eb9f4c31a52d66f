"""GradScaler: loss scaling for fp16 whose verdict is that of the whole model.

torch's own scaler looks at this rank's gradients only: with tensor, expert or pipeline parallelism
one rank finds an overflow and skips the step, others take it, and the ranks train apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from commgrid.collectives.asynchronous import start_all_reduce_
from commgrid.data_parallel.norm import norm_group
from commgrid.data_parallel.sharded_optimizer import ShardedOptimizer
from commgrid.runtime.registry import get_grid

if TYPE_CHECKING:
    from commgrid.runtime.grid import HyperCommGrid


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler over a grid: all ranks skip a step, or none; with any optimizer.

    Used as torch's; `reducer.finish` comes before `unscale_` or `step`, and clipping between them.

    Args:
        device: of the gradients, "cuda" or "cpu".
        grid: whose ranks hold the model; None: the default one.
        **options: as torch.amp.GradScaler takes them: init_scale, growth_interval, …

    Raises:
        UnknownGroupError: the grid has no group of all its ranks.

    Example:
        >>> import commgrid, torch
        >>> from commgrid.data_parallel import GradientReducer, ShardedOptimizer
        >>> grid = commgrid.initialize()
        >>> model = torch.nn.Linear(2, 1)
        >>> reducer = GradientReducer(model, shard=True)
        >>> optimizer = ShardedOptimizer(reducer, torch.optim.SGD, lr=0.5)
        >>> scaler = GradScaler("cpu", init_scale=4.0)
        >>> scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        >>> reducer.finish()
        >>> scaler.unscale_(optimizer)
        >>> round(reducer.clip_gradients(1.0).item(), 3)
        1.732
        >>> _ = scaler.step(optimizer)
        >>> scaler.update()
        >>> commgrid.shutdown()
    """

    def __init__(
        self, device: str = "cuda", *, grid: HyperCommGrid | None = None, **options: Any
    ) -> None:
        super().__init__(device, **options)
        self._whole = norm_group(grid or get_grid(), None)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """torch's, on what reducers keep as well, and then the largest verdict of all ranks."""
        kept = _kept(optimizer)
        if kept is None:
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        else:
            found = {found_inf.device: found_inf.clone()}
            for gradients in kept:
                torch._amp_foreach_non_finite_check_and_unscale_(
                    gradients, found[found_inf.device], inv_scale
                )
        worst = found_inf.clone()
        for each in found.values():
            worst = torch.maximum(worst, each.to(worst.device))
        if self._whole is not None:
            start_all_reduce_(worst, self._whole, dist.ReduceOp.MAX).wait()
        return {worst.device: worst}


def _kept(optimizer: torch.optim.Optimizer) -> list[list[Tensor]] | None:
    """The gradients that reducers have of an optimizer's parameters, by dtype; None: no reducer."""
    owners = [
        getattr(parameter, "main_grad_owner", None)
        for group in optimizer.param_groups for parameter in group["params"]
    ]  # fmt: skip
    reducers = dict.fromkeys(owner.reducer for owner in owners if owner is not None)
    if not reducers and not isinstance(optimizer, ShardedOptimizer):
        return None
    held: dict[torch.dtype, list[Tensor]] = {}
    for reducer in reducers:
        for tensor in reducer.gradients() if reducer is not None else ():
            held.setdefault(tensor.dtype, []).append(tensor)
    return list(held.values())
