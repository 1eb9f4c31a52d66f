"""The time of a training step, in parts, from formulas and a few calibrated numbers.

    step = m · (forward + backward of the slowest stage) + (p - 1) / v · (forward + backward)
         + what of data-parallel communication nothing hides + the optimizer

with m microbatches, p stages of v chunks (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass

from commgrid.planning.calibration import CALIBRATION, Calibration
from commgrid.planning.choice import Choice
from commgrid.planning.cluster import Cluster
from commgrid.planning.layer_cost import LayerCost, Machine, layer_cost
from commgrid.planning.model import Model
from commgrid.planning.spreads import Spread, groups
from commgrid.planning.step_memory import Memory, memory_of, parameters_of_rank

PARTS = ("compute", "bubble", "tp", "cp", "ep", "pp", "dp", "optimizer")
"""What a step's time is made of."""


@dataclass(frozen=True)
class StepCost:
    """What a step of a model takes on a grid.

    Args:
        model, choice, cluster: of what.
        compute: seconds of the slowest stage's kernels.
        bubble: seconds that it waits for the pipeline to fill and drain.
        tp, cp, ep, pp, dp: seconds of communication that nothing hides.
        optimizer: seconds of its update.
        memory: of the rank that needs most.
    """

    model: Model
    choice: Choice
    cluster: Cluster
    compute: float
    bubble: float
    tp: float
    cp: float
    ep: float
    pp: float
    dp: float
    optimizer: float
    memory: Memory

    @property
    def seconds(self) -> float:
        """Of the step."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part."""
        return {part: getattr(self, part) for part in PARTS}

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks."""
        return self.model.tokens / self.seconds

    @property
    def flops_per_device(self) -> float:
        """Floating-point operations a second and device, as `Model.flops_per_token` counts them."""
        work = self.model.flops_per_token * self.model.tokens
        return work / self.seconds / self.choice.world_size

    @property
    def mfu(self) -> float:
        """Share of the devices' peak (model FLOPs utilization)."""
        return self.flops_per_device / self.cluster.device.flops


def step_cost(
    model: Model,
    choice: Choice,
    cluster: Cluster,
    calibration: Calibration = CALIBRATION,
    *,
    machine: Machine | None = None,
    memory: Memory | None = None,
) -> StepCost:
    """Time and memory of a step.

    Args:
        machine: of cluster and calibration, kept by who reckons many steps; None: a new one.
        memory: where it is known.
    """
    machine = machine or Machine(cluster, calibration)
    spreads = groups(choice, cluster)
    layer = layer_cost(model, choice, machine, spreads)
    _, most, last = choice.stage_layers(model)
    output = output_time(model, choice, machine)
    forward, backward = layer.forward, layer.backward
    count = choice.microbatches(model)
    per_layer = forward.total + backward.total
    # The slowest stage: the last has the output layer, others perhaps a layer more.
    if choice.pp == 1 or last * per_layer + output >= most * per_layer:
        layers, extra = last, output
    else:
        layers, extra = most, 0.0
    stage = layers * per_layer + extra
    mean = (model.layers * per_layer + output) / choice.pp
    send = _send(model, choice, machine, spreads)
    dp = _data_parallel(model, choice, machine, spreads, stage, layer)
    return StepCost(
        model,
        choice,
        cluster,
        compute=count * (layers * (forward.compute + backward.compute) + extra),
        bubble=(choice.pp - 1) / choice.chunks * mean,
        tp=count * layers * (forward.tp + backward.tp),
        cp=count * layers * (forward.cp + backward.cp),
        ep=count * layers * (forward.ep + backward.ep),
        pp=(count * choice.chunks + choice.pp - 1) * 2 * send,
        dp=dp,
        optimizer=_optimizer(model, choice, machine),
        memory=memory or memory_of(model, choice),
    )


def output_time(model: Model, choice: Choice, machine: Machine) -> float:
    """Seconds of logits and loss of one microbatch, forward and backward."""
    tokens = choice.microbatch * model.sequence / choice.cp
    shape = (tokens, model.vocabulary / choice.tp, model.hidden)
    products = machine.gemm(*shape) + machine.gemm_backward(*shape, choice.gradient_bytes)
    return products + machine.bytes(tokens * model.vocabulary / choice.tp * 16)


def _send(model: Model, choice: Choice, machine: Machine, spreads: dict[str, Spread]) -> float:
    """Of one activation to the next stage; with tp each rank sends its part (Narayanan et al.
    2021, section 4.1)."""
    if choice.pp == 1:
        return 0.0
    tokens = choice.microbatch * model.sequence / choice.cp
    return machine.collective("send_recv", tokens * model.hidden * 2 / choice.tp, spreads["pp"])


def _data_parallel(
    model: Model,
    choice: Choice,
    machine: Machine,
    spreads: dict[str, Spread],
    stage: float,
    layer: LayerCost,
) -> float:
    """Of gradients and weights: what the backward of the last microbatch and the forward of the
    first do not hide."""
    most = choice.stage_layers(model).most
    experts, rest = parameters_of_rank(model, choice, most, 1 if choice.pp > 1 else 2 - model.tied)
    total_out, total_in = 0.0, 0.0
    for count, group in ((rest, "dp_cp"), (experts, "edp")):
        spread = spreads.get(group, spreads["dp_cp"])
        if choice.shard == "none":
            total_out += machine.collective("all_reduce", count * choice.gradient_bytes, spread)
            continue
        total_out += machine.collective("reduce_scatter", count * choice.gradient_bytes, spread)
        total_in += machine.collective("all_gather", count * 2, spread)
    if (
        choice.shard == "weights"
    ):  # gathered for every forward and backward, behind the layer before
        times = choice.microbatches(model)
        forward, backward = most * layer.forward.total, most * layer.backward.total
        if not choice.overlap:
            return times * (2 * total_in + total_out)
        return times * (
            max(total_in - forward, total_in / most)
            + max(total_in + total_out - backward, total_out / most)
        )
    if not choice.overlap:
        return total_out + total_in
    behind_out, behind_in = most * layer.backward.total, most * layer.forward.total
    return max(total_out - behind_out, total_out / most) + max(
        total_in - behind_in, total_in / most
    )


def _optimizer(model: Model, choice: Choice, machine: Machine) -> float:
    """Adam reads gradient, master weight and moments, and writes the latter three and
    the weight."""
    most = choice.stage_layers(model).most
    experts, rest = parameters_of_rank(model, choice, most, 1)
    if choice.shard != "none":
        rest, experts = rest / (choice.dp * choice.cp), experts / choice.edp
    return machine.bytes((rest + experts) * (choice.gradient_bytes + 12 + 12 + 2))
