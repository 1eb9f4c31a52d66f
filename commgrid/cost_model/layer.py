"""The time of one transformer layer for one microbatch on one rank."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from commgrid.cost_model.calibration import Calibration
from commgrid.cost_model.cluster import Cluster
from commgrid.cost_model.collective import collective_time
from commgrid.cost_model.config import ParallelConfig
from commgrid.cost_model.model import Model
from commgrid.cost_model.placement import GridPlacement, Spread

LINEAR_BYTES = 2
"""Of a number in 16 bits, as activations and weights are sent."""


@dataclass(frozen=True)
class Collective:
    """A collective of a layer.

    Args:
        part: of the step, such as `tp`.
        group: whose, by name.
        collective, bytes: as `collective_time` takes them.
        ranks: that take part.
        spread: of the group over the cluster's levels.
        times: how often in forward and backward of one microbatch.
        forward, backward: seconds of all of them that nothing hides.
    """

    part: str
    group: str
    collective: str
    bytes: float
    ranks: int
    spread: Spread
    times: float
    forward: float
    backward: float


@dataclass(frozen=True)
class LayerCost:
    """One layer and one microbatch.

    Args:
        forward, backward: seconds of its kernels, what is computed again included in the backward.
        collectives: its collectives.
    """

    forward: float
    backward: float
    collectives: tuple[Collective, ...]

    @cached_property
    def forward_total(self) -> float:
        """Seconds with communication."""
        return self.forward + sum(each.forward for each in self.collectives)

    @cached_property
    def backward_total(self) -> float:
        """Seconds with communication."""
        return self.backward + sum(each.backward for each in self.collectives)


@dataclass(frozen=True)
class Machine:
    """A cluster with the shares of its peaks that are reached."""

    cluster: Cluster
    calibration: Calibration
    layers: dict[Hashable, LayerCost] = field(default_factory=dict, compare=False, repr=False)
    times: dict[Hashable, float] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def reached(self) -> Cluster:
        """The cluster with the bandwidth that is reached of a stated one; measured levels stay."""
        share = self.calibration.network
        levels = (
            level if level.measured else replace(level, bandwidth=level.link.bandwidth * share)
            for level in self.cluster.levels
        )
        return replace(self.cluster, levels=tuple(levels))

    def gemm(self, m: float, n: float, k: float) -> float:
        """Forward seconds of the product of (m, k) and (k, n) in 16 bits."""
        return self._roofline(2 * m * n * k, 2 * (m * k + k * n + m * n))

    def gemm_backward(self, m: float, n: float, k: float, gradient_bytes: int) -> float:
        """Backward seconds: by the input, and by the weight, which is read and added to."""
        return self._roofline(2 * m * n * k, 2 * (m * k + k * n + m * n)) + self._roofline(
            2 * m * n * k, 2 * (m * k + m * n) + 2 * gradient_bytes * k * n
        )

    def _roofline(self, flops: float, moved: float) -> float:
        """Arithmetic and memory at once (Williams et al. 2009), the corner between them rounded:
        where both take as long, a kernel takes √2 of either. This is what makes small matrices
        slow, and a weight's gradient of few tokens."""
        device = self.cluster.accelerator
        work = flops / (device.flops * self.calibration.gemm_share(device.name))
        return math.hypot(work, self.bytes(moved))

    def bytes(self, count: float) -> float:
        """Seconds in which so many bytes go through the device's memory."""
        return count / (self.cluster.accelerator.memory_bandwidth * self.calibration.memory)

    def collective(self, name: str, size: float, spread: Spread) -> float:
        """Seconds of a collective at the share of its links that is reached."""
        known = self.times.get((name, size, spread))
        if known is None:
            known = collective_time(name, size, spread, self.reached)
            self.times[name, size, spread] = known
        return known


@dataclass(frozen=True)
class Job:
    """A model, how it is parallelised, and where.

    Args:
        model, config: as given.
        machine: that it runs on.
        placement: of the grid's ranks on the machine's cluster.
    """

    model: Model
    config: ParallelConfig
    machine: Machine
    placement: GridPlacement

    @cached_property
    def tokens(self) -> float:
        """Of one microbatch, on one rank."""
        return self.config.microbatch * self.model.sequence / self.config.cp

    def collective(self, name: str, size: float, group: str) -> float:
        """Seconds of a collective on a group."""
        return self.machine.collective(name, size, self.placement.timed(group))


def layer_cost(job: Job) -> LayerCost:
    """One layer and one microbatch of it on one rank."""
    # Grids that differ in pp and dp alone have the same layers, and a search goes through many.
    config, placement = job.config, job.placement
    key = (
        job.model, config.tp, config.cp, config.ep, config.etp, config.microbatch,
        config.recompute, config.sequence_parallel, config.gradient_bytes,
        *(placement.timed(group) for group in ("tp", "cp", "ep", "etp")),
    )  # fmt: skip
    layers = job.machine.layers
    known = layers.get(key)
    if known is None:
        known = layers[key] = _layer_cost(job)
    return known


def _layer_cost(job: Job) -> LayerCost:
    model, config, machine = job.model, job.config, job.machine
    products = _products(job)
    forward = sum(count * machine.gemm(*shape) for shape, count in products)
    backward = sum(
        count * machine.gemm_backward(*shape, config.gradient_bytes) for shape, count in products
    )
    attention, attention_back = _attention(job)
    light, lighter = _elementwise(job)
    forward += attention + machine.bytes(light)
    backward += attention_back + 2 * machine.bytes(light)
    again, times = 0.0, 1
    if config.recompute == "full":
        again, times = forward, 2
    elif config.recompute == "selective":
        again = attention if model.attention == "plain" else machine.bytes(lighter)
    collectives = (*_tp(job, times), *_ep(job, times), *_cp(job, times, attention, attention_back))
    return LayerCost(forward, backward + again, collectives)


def _products(job: Job) -> list[tuple[tuple[float, float, float], float]]:
    """The matrix products of a layer: (tokens, outputs, inputs), and how many of them."""
    model, config, tokens = job.model, job.config, job.tokens
    tp, hidden = config.tp, model.hidden
    queries = model.head * model.heads / tp
    keys = model.head * max(model.num_kv_heads / tp, 1)
    found = [((tokens, queries + 2 * keys, hidden), 1.0), ((tokens, hidden, queries), 1.0)]
    into = 2 if model.gated else 1
    dense = model.shared_ffn if model.experts else model.width
    if dense:
        found += [((tokens, into * dense / tp, hidden), 1.0), ((tokens, hidden, dense / tp), 1.0)]
    if model.experts:
        local = model.experts / config.ep
        each = tokens / config.sp * model.top_k * config.expert_tp / local
        inner = model.expert_width / config.expert_tp
        found += [((each, into * inner, hidden), local), ((each, hidden, inner), local)]
    return found


def _attention(job: Job) -> tuple[float, float]:
    """Seconds of scores, softmax and values, forward and backward.

    In one kernel: half of the scores, as attention is causal, and 5 products backward for 2 forward
    (Dao 2023, arXiv 2307.08691). In memory: all of them, in products whose scores are written and
    read by softmax and dropout.
    """
    model, machine = job.model, job.machine
    heads = model.heads / job.config.tp
    if model.attention == "flash":
        device = machine.cluster.accelerator
        work = 4 * job.tokens * model.sequence * heads * model.head / 2
        forward = work / (device.flops * machine.calibration.flash)
        return forward, 2.5 * forward
    each, count = model.sequence, heads * job.config.microbatch
    products = ((each, each, model.head), (each, model.head, each))
    forward = count * sum(machine.gemm(*shape) for shape in products)
    scores = job.tokens * model.sequence * heads
    softmax, dropout = 4, 5 if model.dropout else 0
    forward_all = forward + machine.bytes(scores * (softmax + dropout))
    backward = 2 * forward + machine.bytes(scores * (softmax + 2 + dropout))
    return forward_all, backward


def _elementwise(job: Job) -> tuple[float, float]:
    """Bytes that a layer's other kernels read and write forward, and those of norms and activation
    function alone. Two norms read and write; two residual sums read two and write one, with
    dropout its mask; the activation function reads its inputs and writes its output; queries and
    keys are rotated or laid out anew; experts' tokens are permuted there and back."""
    model, config, tokens = job.model, job.config, job.tokens
    hidden = model.hidden
    norms = 2 * 4 * hidden / config.sp
    sums = 2 * (7 if model.dropout else 6) * hidden / config.sp
    rotated = 4 * model.head * (model.heads + 2 * model.num_kv_heads) / config.tp
    per = 6 if model.gated else 4
    if model.experts:
        width = model.top_k * model.expert_width / config.sp + model.shared_ffn / config.tp
        moved = 2 * 4 * model.top_k * hidden / config.sp
    else:
        width, moved = model.width / config.tp, 0.0
    activation = per * width
    return tokens * (norms + sums + rotated + activation + moved), tokens * (norms + activation)


def _tp(job: Job, backwards: int) -> Iterator[Collective]:
    """Of tp's layers: an all-reduce after attention and after the MLP, or with sequence parallelism
    an all-gather before and a reduce-scatter after each (Korthikanti et al. 2022, section 4.2.2).
    Experts gather over their own group.

    Args:
        backwards: 1, or 2 with full recompute, whose backward runs the forward's again.
    """
    model, config = job.model, job.config
    around = ("all_gather", "reduce_scatter") if config.sequence_parallel else ("all_reduce",)
    size = job.tokens * model.hidden * LINEAR_BYTES
    wide = size / config.sp * model.top_k * config.expert_tp if model.experts else 0.0
    pairs = 2 if not model.experts or model.shared_ffn else 1
    for group, ranks, count, each in (
        ("tp", config.tp, pairs, size),
        ("etp", config.expert_tp if model.experts else 1, 1, wide),
    ):
        for collective in around if ranks > 1 else ():
            seconds = count * job.collective(collective, each, group)
            yield Collective(
                "tp", group, collective, each, ranks, job.placement.timed(group),
                count * (1 + backwards), seconds, backwards * seconds,
            )  # fmt: skip


def _ep(job: Job, backwards: int) -> Iterator[Collective]:
    """Of experts: an all-to-all to them and one back.

    A token goes to a node once, however many of its experts are there, and inside to each of them,
    as DeepEP does it: of k choices among u nodes u · (1 - (1 - 1/u)^k) differ.
    """
    model, config = job.model, job.config
    if config.ep == 1:
        return
    size = job.tokens / config.sp * model.hidden * LINEAR_BYTES
    inside, *above = job.placement.timed("ep")
    units = math.prod(above)
    copies = units * (1 - (1 - 1 / units) ** model.top_k)
    for spread, each in (
        ((inside, *[1] * len(above)), size * model.top_k),
        ((1, *above), size * copies),
    ):
        ranks = math.prod(spread)
        if ranks > 1:
            seconds = 2 * job.machine.collective("all_to_all", each, spread)
            yield Collective(
                "ep", "ep", "all_to_all", each, ranks, spread, 2 * (1 + backwards), seconds,
                backwards * seconds,
            )  # fmt: skip


def _cp(job: Job, backwards: int, attention: float, attention_back: float) -> Iterator[Collective]:
    """Of a ring of keys and values: what attention on them does not hide (Liu et al. 2023, arXiv
    2310.01889). Backward their gradients go round as well."""
    model, config = job.model, job.config
    if config.cp == 1:
        return
    size = config.cp * job.tokens * 4 * model.head * max(model.num_kv_heads / config.tp, 1)
    ring = job.collective("all_gather", size, "cp")
    forward, back = max(ring - attention, 0.0), max(2 * ring - attention_back, 0.0)
    yield Collective(
        "cp", "cp", "all_gather", size, config.cp, job.placement.timed("cp"), 2 + backwards,
        forward, back + (backwards - 1) * forward,
    )  # fmt: skip
