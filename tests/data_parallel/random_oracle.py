"""A draw trained by one process, in plain torch: all ranks' data, one backward, torch's optimizers.

Nothing of commgrid takes part: no reducer, no sharding of optimizers, no norm, no collective.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.data_parallel.random_draws import OPTIMIZERS, STEPS, Draw
from tests.data_parallel.random_models import (
    Mixture,
    Model,
    PlainKit,
    batch_of,
    full_weights,
    parameter_groups,
    probe_of,
    scheduler_of,
)


@dataclass
class Expected:
    """The expected results of a run.

    Args:
        losses: of each step, of each data rank.
        norms: of each step.
        evaluations: by step and what was evaluated.
        parameters: at the end, whole.
        averages: after each step, the EMA's or the copy's, whole.
    """

    losses: list[list[float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    evaluations: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    averages: list[dict[str, Tensor]] = field(default_factory=list)


def train_whole(draw: Draw) -> Expected:
    """Six steps of the draw."""
    plan, found = draw.training, Expected()
    with torch.random.fork_rng([]):
        model = Model(draw, PlainKit())
    full = full_weights(draw)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(full[name])
    kind, options = getattr(torch.optim, plan.optimizer), OPTIMIZERS[plan.optimizer]
    groups = parameter_groups(draw, model)
    apart = [[group] for group in groups] if plan.groups == "apart" else [groups]
    optimizers = [kind(each, **options) for each in apart]
    schedulers = [scheduler_of(draw, optimizer) for optimizer in optimizers]
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for step in range(STEPS):
        model.step = step
        model.zero_grad()
        found.losses.append(_backward(draw, model, step))
        bound = plan.max_norm if plan.norm == "clip" else float("inf")
        found.norms.append(float(torch.nn.utils.clip_grad_norm_(trained, bound)))
        for optimizer in optimizers:
            optimizer.step()
        for scheduler in schedulers:
            if scheduler is not None:
                scheduler.step()
        ema.update_parameters(model)
        average: nn.Module = ema.module if plan.average == "ema" else model
        found.averages.append(_weights(average))
        _evaluate(draw, model, step, found)
    found.parameters = _weights(model)
    return found


def _backward(draw: Draw, model: Model, step: int) -> list[float]:
    """Gradients of the mean over all ranks' data; returns each rank's own loss."""
    summed = draw.training.counting == "tokens"
    own, total, tokens_in_all = [], torch.zeros((), dtype=torch.float64), 0
    for rank, number in enumerate(draw.training.microbatches[step]):
        own.append(0.0)
        for i in range(number):
            tokens, target = batch_of(draw, "train", step, rank, i)
            loss = model.kit.loss(model(tokens, i), target)
            loss = loss if summed else loss / target.numel() / number
            own[-1] += loss.item()
            tokens_in_all += int((target >= 0).sum())
            total = total + loss + _balances(model) / (1 if summed else number)
    (total / (tokens_in_all if summed else draw.cut.num_data)).backward()
    return own


def _balances(model: nn.Module) -> Tensor:
    """The balancing losses of a microbatch's routers."""
    total = torch.zeros((), dtype=torch.float64)
    for module in model.modules():
        if isinstance(module, Mixture):
            total = total + sum(module.losses)
            module.losses.clear()
    return total


@torch.no_grad()
def _evaluate(draw: Draw, model: Model, step: int, found: Expected) -> None:
    if step not in draw.training.evaluated:
        return
    model.eval()
    for index, part in model.blocks.items():
        found.evaluations[step, f"block {index}"] = part(probe_of(draw))
    for name, weight in _weights(model).items():
        found.evaluations[step, name] = weight
    for rank in range(draw.cut.num_data):
        tokens, target = batch_of(draw, "evaluate", step, rank, 0)
        found.evaluations[step, f"loss of data rank {rank}"] = model.kit.loss(model(tokens), target)
    model.train()


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
