"""GradScaler: loss scaling for fp16 that checks the gradients of the whole model.

torch's own scaler checks only this rank's gradients: with tensor, expert or pipeline parallelism
one rank finds an overflow and skips the step, others take it, and the replicas diverge.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commgrid.collectives.asynchronous import start_all_reduce_
from commgrid.data_parallel.norm import norm_group
from commgrid.data_parallel.slot import Reducer, slot_of
from commgrid.data_parallel.step_checks import mark_used, owned_by
from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.registry import get_grid
from commgrid.torch_compat.autograd_nodes import note_scaled


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler over a grid: all ranks skip a step, or none; with any optimizer.

    Used as torch's; `reducer.finish` comes before `unscale_` or `step`, and clipping between them.
    All ranks call these, in a pipeline also stages that have no loss to scale.

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
        if self._enabled:  # here, since stages without a loss never call scale()
            self._lazy_init_scale_growth_tracker(torch.device(device))

    def scale(self, outputs: Any) -> Any:
        """torch's; auxiliary losses of the same backward get the same scale."""
        scaled = super().scale(outputs)
        for loss in (scaled,) if isinstance(scaled, Tensor) else scaled:
            if self._enabled and isinstance(loss, Tensor):
                note_scaled(loss)
        return scaled

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """torch's step; afterwards gradients count as used, even if the step was skipped."""
        result = super().step(optimizer, *args, **kwargs)
        mark_used(optimizer)
        return result

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """torch's, also on gradients kept by reducers; `found_inf` is the maximum of all ranks."""
        reducers: dict[Reducer, list[Tensor]] = {}
        for reducer, slot in owned_by(optimizer):
            reducers.setdefault(reducer, []).append(slot.parameter)
        held = [g for reducer, own in reducers.items() for g in reducer.gradients_of(own)]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        others = [p.grad for p in parameters if slot_of(p) is None and p.grad is not None]
        for gradient in others:
            if gradient.dtype == torch.float16 and not allow_fp16:
                raise ValueError("Attempting to unscale FP16 gradients.")  # torch's own words
            held.append(gradient._values() if gradient.is_sparse else gradient)
        worst = found_inf.clone()
        kinds = dict.fromkeys((gradient.device, gradient.dtype) for gradient in held)
        for device, dtype in kinds:
            same = [g for g in held if (g.device, g.dtype) == (device, dtype)]
            found = worst.to(device, copy=True)
            torch._amp_foreach_non_finite_check_and_unscale_(same, found, inv_scale.to(device))
            worst = torch.maximum(worst, found.to(worst.device))
        for reducer in reducers:
            reducer.rescaled()
        if self._whole is not None:
            start_all_reduce_(worst, self._whole, dist.ReduceOp.MAX).wait()
        return {worst.device: worst}
