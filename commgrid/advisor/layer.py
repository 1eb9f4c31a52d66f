"""The time of one transformer layer for one microbatch on one rank."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from commgrid.advisor.calibration import Calibration
from commgrid.advisor.cluster import Cluster
from commgrid.advisor.collectives import collective_time
from commgrid.advisor.config import ParallelConfig
from commgrid.advisor.model import Model
from commgrid.advisor.placement import Spread

LINEAR_BYTES = 2
"""Of a number in 16 bits, as activations and weights are sent."""


@dataclass(frozen=True)
class Collective:
    """A collective of a layer.

    Args:
        part: of the step, such as `tp`.
        group: whose, by name.
        collective, bytes: as `cost.collective_time` takes them.
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

    @property
    def links(self) -> float:
        """Reached share of a stated bandwidth; 1 for a cluster whose source is no datasheet."""
        return self.calibration.network if "datasheet" in self.cluster.source else 1.0

    @cached_property
    def reached(self) -> Cluster:
        """The cluster with the bandwidth that is reached; measured levels and fits stay."""
        levels = (
            level if level.measured else replace(level, bandwidth=level.bandwidth * self.links)
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
        device = self.cluster.device
        work = flops / (device.flops * self.calibration.gemm_share(device.name))
        return math.hypot(work, self.bytes(moved))

    def bytes(self, count: float) -> float:
        """Seconds in which so many bytes go through the device's memory."""
        return count / (self.cluster.device.memory_bandwidth * self.calibration.memory)

    def collective(self, name: str, size: float, spread: Spread) -> float:
        """Seconds of a collective at the share of its links that is reached."""
        known = self.times.get((name, size, spread))
        if known is None:
            known = collective_time(name, size, spread, self.reached)
            self.times[name, size, spread] = known
        return known


def layer_cost(
    model: Model, choice: ParallelConfig, machine: Machine, spreads: Mapping[str, Spread]
) -> LayerCost:
    """One layer and one microbatch of it on one rank.

    Args:
        spreads: of the groups, by name, from `placement.of_choice`.
    """
    # Grids that differ in pp and dp alone have the same layers, and a search goes through many.
    key = (
        model, choice.tp, choice.cp, choice.ep, choice.etp, choice.microbatch,
        choice.recompute, choice.sequence_parallel, choice.gradient_bytes, spreads["tp"],
        spreads["cp"], spreads.get("ep"), spreads.get("etp"),
    )  # fmt: skip
    known = machine.layers.get(key)
    if known is None:
        known = machine.layers[key] = _layer_cost(model, choice, machine, spreads)
    return known


def _layer_cost(
    model: Model, choice: ParallelConfig, machine: Machine, spreads: Mapping[str, Spread]
) -> LayerCost:
    tokens = choice.microbatch * model.sequence / choice.cp
    products = _products(model, choice, tokens)
    forward = sum(count * machine.gemm(*shape) for shape, count in products)
    backward = sum(
        count * machine.gemm_backward(*shape, choice.gradient_bytes) for shape, count in products
    )
    attention, attention_back = _attention(model, choice, machine, tokens)
    light, lighter = _elementwise(model, choice, tokens)
    forward += attention + machine.bytes(light)
    backward += attention_back + 2 * machine.bytes(light)
    again, times = 0.0, 1
    if choice.recompute == "full":
        again, times = forward, 2
    elif choice.recompute == "selective":
        again = attention if model.attention == "plain" else machine.bytes(lighter)
    collectives = (
        *_tp(model, choice, machine, tokens, spreads, times),
        *_ep(model, choice, machine, tokens, spreads, times),
        *_cp(model, choice, machine, tokens, spreads, times, attention, attention_back),
    )
    return LayerCost(forward, backward + again, collectives)


def _products(
    model: Model, choice: ParallelConfig, tokens: float
) -> list[tuple[tuple[float, float, float], float]]:
    """The matrix products of a layer: (tokens, outputs, inputs), and how many of them."""
    tp, hidden = choice.tp, model.hidden
    queries = model.head * model.heads / tp
    keys = model.head * max(model.groups / tp, 1)
    found = [((tokens, queries + 2 * keys, hidden), 1.0), ((tokens, hidden, queries), 1.0)]
    into = 2 if model.gated else 1
    dense = model.shared_ffn if model.experts else model.width
    if dense:
        found += [((tokens, into * dense / tp, hidden), 1.0), ((tokens, hidden, dense / tp), 1.0)]
    if model.experts:
        local = model.experts / choice.ep
        each = tokens / choice.split * model.top_k * choice.expert_tp / local
        inner = model.expert_width / choice.expert_tp
        found += [((each, into * inner, hidden), local), ((each, hidden, inner), local)]
    return found


def _attention(
    model: Model, choice: ParallelConfig, machine: Machine, tokens: float
) -> tuple[float, float]:
    """Seconds of scores, softmax and values, forward and backward.

    In one kernel: half of the scores, as attention is causal, and 5 products backward for 2 forward
    (Dao 2023, arXiv 2307.08691). In memory: all of them, in products whose scores are written and
    read by softmax and dropout.
    """
    heads = model.heads / choice.tp
    if model.attention == "flash":
        device = machine.cluster.device
        work = 4 * tokens * model.sequence * heads * model.head / 2
        forward = work / (device.flops * machine.calibration.flash)
        return forward, 2.5 * forward
    each, count = model.sequence, heads * choice.microbatch
    products = ((each, each, model.head), (each, model.head, each))
    forward = count * sum(machine.gemm(*shape) for shape in products)
    scores = tokens * model.sequence * heads
    softmax, dropout = 4, 5 if model.dropout else 0
    forward_all = forward + machine.bytes(scores * (softmax + dropout))
    backward = 2 * forward + machine.bytes(scores * (softmax + 2 + dropout))
    return forward_all, backward


def _elementwise(model: Model, choice: ParallelConfig, tokens: float) -> tuple[float, float]:
    """Bytes that a layer's other kernels read and write forward, and those of norms and activation
    function alone. Two norms read and write; two residual sums read two and write one, with
    dropout its mask; the activation function reads its inputs and writes its output; queries and
    keys are rotated or laid out anew; experts' tokens are permuted there and back."""
    hidden = model.hidden
    norms = 2 * 4 * hidden / choice.split
    sums = 2 * (7 if model.dropout else 6) * hidden / choice.split
    rotated = 4 * model.head * (model.heads + 2 * model.groups) / choice.tp
    per = 6 if model.gated else 4
    if model.experts:
        width = model.top_k * model.expert_width / choice.split + model.shared_ffn / choice.tp
        moved = 2 * 4 * model.top_k * hidden / choice.split
    else:
        width, moved = model.width / choice.tp, 0.0
    activation = per * width
    return tokens * (norms + sums + rotated + activation + moved), tokens * (norms + activation)


def _tp(
    model: Model,
    choice: ParallelConfig,
    machine: Machine,
    tokens: float,
    spreads: Mapping[str, Spread],
    backwards: int,
) -> Iterator[Collective]:
    """Of tp's layers: an all-reduce after attention and after the MLP, or with sequence parallelism
    an all-gather before and a reduce-scatter after each (Korthikanti et al. 2022, section 4.2.2).
    Experts gather over their own group.

    Args:
        backwards: 1, or 2 with full recompute, whose backward runs the forward's again.
    """
    around = ("all_gather", "reduce_scatter") if choice.sequence_parallel else ("all_reduce",)
    size = tokens * model.hidden * LINEAR_BYTES
    wide = size / choice.split * model.top_k * choice.expert_tp if model.experts else 0.0
    pairs = 2 if not model.experts or model.shared_ffn else 1
    for group, ranks, count, each in (
        ("tp", choice.tp, pairs, size),
        ("etp", choice.expert_tp if model.experts else 1, 1, wide),
    ):
        for collective in around if ranks > 1 else ():
            spread = spreads.get(group, spreads["tp"])
            seconds = count * machine.collective(collective, each, spread)
            yield Collective(
                "tp", group, collective, each, ranks, spread, count * (1 + backwards), seconds,
                backwards * seconds,
            )  # fmt: skip


def _ep(
    model: Model,
    choice: ParallelConfig,
    machine: Machine,
    tokens: float,
    spreads: Mapping[str, Spread],
    backwards: int,
) -> Iterator[Collective]:
    """Of experts: an all-to-all to them and one back.

    A token goes to a node once, however many of its experts are there, and inside to each of them,
    as DeepEP does it: of k choices among u nodes u · (1 - (1 - 1/u)^k) differ.
    """
    if choice.ep == 1:
        return
    size = tokens / choice.split * model.hidden * LINEAR_BYTES
    inside, *above = spreads["ep"]
    units = math.prod(above)
    copies = units * (1 - (1 - 1 / units) ** model.top_k)
    for spread, each in (
        ((inside, *[1] * len(above)), size * model.top_k),
        ((1, *above), size * copies),
    ):
        ranks = math.prod(spread)
        if ranks > 1:
            seconds = 2 * machine.collective("all_to_all", each, spread)
            yield Collective(
                "ep", "ep", "all_to_all", each, ranks, spread, 2 * (1 + backwards), seconds,
                backwards * seconds,
            )  # fmt: skip


def _cp(
    model: Model,
    choice: ParallelConfig,
    machine: Machine,
    tokens: float,
    spreads: Mapping[str, Spread],
    backwards: int,
    attention: float,
    attention_back: float,
) -> Iterator[Collective]:
    """Of a ring of keys and values: what attention on them does not hide (Liu et al. 2023, arXiv
    2310.01889). Backward their gradients go round as well."""
    if choice.cp == 1:
        return
    size = choice.cp * tokens * 4 * model.head * max(model.groups / choice.tp, 1)
    ring = machine.collective("all_gather", size, spreads["cp"])
    forward, back = max(ring - attention, 0.0), max(2 * ring - attention_back, 0.0)
    yield Collective(
        "cp", "cp", "all_gather", size, choice.cp, spreads["cp"], 2 + backwards, forward,
        back + (backwards - 1) * forward,
    )  # fmt: skip
