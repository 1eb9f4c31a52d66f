"""The time of one transformer layer for one microbatch on one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial

from commgrid.cost_model.calibration import Calibration
from commgrid.cost_model.cluster import Cluster
from commgrid.cost_model.collective import as_fabrics, collective_time
from commgrid.cost_model.config import ParallelConfig
from commgrid.cost_model.model import Model
from commgrid.cost_model.placement import GridPlacement, Spread, of_spec
from commgrid.cost_model.term import Term
from commgrid.errors import SpecError
from commgrid.planning.spec import GridSpec

LINEAR_BYTES = 2
"""Of a number in 16 bits, as activations and weights are sent."""


@dataclass(frozen=True)
class LayerCost:
    """One layer and one microbatch.

    Args:
        forward, backward: seconds of its kernels, what is computed again included in the backward.
        collectives: its terms that communicate.
        by_weight: seconds of the backward that no other stage waits for: of weights' gradients.
    """

    forward: float
    backward: float
    collectives: tuple[Term, ...]
    by_weight: float = 0.0

    def mixed(self, other: LayerCost, share: float) -> LayerCost:
        """The mean over layers, a share of which cost `other`."""

        def mean(one: float, two: float) -> float:
            return (1 - share) * one + share * two

        collectives = tuple(
            replace(
                one, sends=mean(one.sends, two.sends), forward=mean(one.forward, two.forward),
                backward=mean(one.backward, two.backward),
            )
            for one, two in zip(self.collectives, other.collectives, strict=True)
        )  # fmt: skip
        return replace(self, backward=mean(self.backward, other.backward), collectives=collectives)

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

    @cached_property
    def placement(self) -> Callable[[GridSpec], GridPlacement]:
        """Where the ranks of a grid lie, rank r on device r; see `of_spec`."""
        return cache(partial(of_spec, cluster=self.cluster))

    @cached_property
    def reached(self) -> Cluster:
        """The cluster with the share of stated bandwidths that is reached; measured levels stay."""
        share = self.calibration.network
        levels = (
            level if level.measured else replace(level, bandwidth=level.link.bandwidth * share)
            for level in self.cluster.levels
        )
        return replace(self.cluster, levels=tuple(levels))

    def gemm(self, m: float, n: float, k: float, dtype: str = "bf16") -> float:
        """Forward seconds of the product of (m, k) and (k, n); activations are kept in 16 bits.

        In 8 bits its input is cast, for this product and for the weight's gradient.
        """
        size = 2 if dtype == "bf16" else 1
        moved = size * (m * k + k * n) + 2 * m * n
        return self._roofline(2 * m * n * k, moved, dtype) + self._cast(m * k, dtype)

    def gemm_backward(
        self, m: float, n: float, k: float, gradient_bytes: int, dtype: str = "bf16"
    ) -> tuple[float, float]:
        """Backward seconds: by the input, and by the weight, which is read and added to."""
        size, flops = 2 if dtype == "bf16" else 1, 2 * m * n * k
        by_input = size * (m * n + k * n) + 2 * m * k
        by_weight = size * (m * k + m * n) + 2 * gradient_bytes * k * n
        return (
            self._roofline(flops, by_input, dtype) + self._cast(m * n, dtype),
            self._roofline(flops, by_weight, dtype),
        )

    def _cast(self, count: float, dtype: str) -> float:
        """Seconds to cast so many numbers to 8 bits, in two layouts: each product reads along
        another dim. With one scale a tensor, their maximum has to be known before."""
        if dtype == "bf16":
            return 0.0
        return self.kernel(self.bytes(count * (6 if dtype == "fp8" else 4)))

    def _roofline(self, flops: float, moved: float, dtype: str) -> float:
        """Arithmetic and memory at once (Williams et al. 2009), the corner between them rounded:
        where both take as long, a kernel takes √2 of either. This is what makes small matrices
        slow, and a weight's gradient of few tokens."""
        work = flops / self.peak(dtype)
        return self.kernel(math.hypot(work, self.bytes(moved)))

    def peak(self, dtype: str = "bf16") -> float:
        """Operations a second that large products reach.

        Raises:
            SpecError: the device has no 8 bits.
        """
        device, share = self.cluster.accelerator, self.calibration.gemm_share
        if dtype == "bf16":
            return device.flops * share(device.name)
        if device.fp8_flops is None:
            raise SpecError(
                f"dtype={dtype!r}: {device.name} of cluster {self.cluster.name!r} has no "
                "fp8_tflops; take bf16, or give them in a cluster file"
            )
        return device.fp8_flops * share(device.name) * self.calibration.fp8

    def kernel(self, seconds: float, count: float = 1) -> float:
        """Seconds of so many kernels: each takes some microseconds at the least."""
        return max(seconds, count * self.calibration.kernel)

    def bytes(self, count: float) -> float:
        """Seconds in which so many bytes go through the device's memory."""
        return count / (self.cluster.accelerator.memory_bandwidth * self.calibration.memory)

    @cached_property
    def collective(self) -> Callable[[str, float, Spread], float]:
        """Seconds of a collective by name, bytes and spread, at the share of its links reached."""
        return cache(partial(collective_time, cluster=self.reached))


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
    """The mean layer of the fullest stage, and one microbatch of it, on one rank."""
    config = job.config
    share = config.recomputed(config.stage_layers(job.model).most)
    if share == 1.0:
        return _known(job)
    none = _known(replace(job, config=replace(config, recompute="none", recompute_layers=None)))
    again = _known(replace(job, config=replace(config, recompute_layers=None)))
    return none.mixed(again, share)


def _known(job: Job) -> LayerCost:
    # Grids that differ in pp and dp alone have the same layers, and a search goes through many.
    config, placement = job.config, job.placement
    key = (
        job.model, config.tp, config.cp, config.ep, config.expert_tp, config.microbatch,
        config.recompute, config.sequence_parallel, config.gradient_bytes, config.dtype,
        config.kernels, config.dispatch, config.imbalance, config.tp_overlap,
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
    forward = sum(count * machine.gemm(*shape, config.dtype) for shape, count in products)
    products_forward = forward
    by_input = by_weight = 0.0
    for shape, count in products:
        found = machine.gemm_backward(*shape, config.gradient_bytes, config.dtype)
        by_input += count * found[0]
        by_weight += count * found[1]
    attention, attention_back = _attention(job)
    light, lighter = _elementwise(job)
    forward += attention + light
    backward = by_input + by_weight + attention_back + 2 * light
    if model.experts and config.dispatch == "rows":
        forward = max(forward, machine.calibration.host)
        backward = max(backward, 2 * machine.calibration.host)
    again, times = 0.0, 1
    if config.recompute == "full":
        again, times = forward, 2
    elif config.recompute == "selective":
        again = attention if model.attention == "plain" else lighter
    collectives = (
        *_tp(job, times, products_forward),
        *_ep(job, times),
        *_cp(job, times, attention, attention_back),
    )
    return LayerCost(forward, backward + again, collectives, by_weight)


def _products(job: Job) -> list[tuple[tuple[float, float, float], float]]:
    """The matrix products of a layer: (tokens, outputs, inputs), and how many of them."""
    model, config, tokens = job.model, job.config, job.tokens
    tp, hidden = config.tp, model.hidden
    if model.q_lora_rank is None:
        queries = model.head * model.heads / tp
        keys = model.head * max(model.num_kv_heads / tp, 1)
        found = [((tokens, queries + 2 * keys, hidden), 1.0), ((tokens, hidden, queries), 1.0)]
    else:
        found = [
            ((tokens, outputs / tp, inputs) if cut else (tokens / config.sp, outputs, inputs), 1.0)
            for inputs, outputs, cut in model.attention_shapes[:-1]
        ]
        inputs, _, _ = model.attention_shapes[-1]
        found.append(((tokens, hidden, inputs / tp), 1.0))
    into = 2 if model.gated else 1
    dense = model.shared_ffn if model.experts else model.width
    if dense:
        found += [((tokens, into * dense / tp, hidden), 1.0), ((tokens, hidden, dense / tp), 1.0)]
    if model.experts:
        local = model.experts / config.ep
        rows = tokens / config.sp * model.top_k * config.expert_tp * config.imbalance
        inner = model.expert_width / config.expert_tp
        found += [
            ((rows / local, into * inner, hidden), local),
            ((rows / local, hidden, inner), local),
        ]
    return found


def _attention(job: Job) -> tuple[float, float]:
    """Seconds of scores, softmax and values, forward and backward.

    In one kernel: half of the scores, as attention is causal, and 5 products backward for 2 forward
    (Dao 2023, arXiv 2307.08691); of a ring one for each of its steps, whose results are put
    together in fp32. In memory: all of them, in products whose scores are written and read by
    softmax and dropout.
    """
    model, machine, cp = job.model, job.machine, job.config.cp
    heads = model.heads / job.config.tp
    if model.attention == "flash":
        device = machine.cluster.accelerator
        work = 2 * job.tokens * model.seen * heads * (model.key_head + model.value_head)
        share = machine.calibration.flash_share(job.config.kernels)
        forward = work / (device.flops * share)
        # Of a short sequence blocks on the diagonal are computed whole.
        whole = 1 + _BLOCK / (2 * model.seen)
        merged = machine.bytes(12 * job.tokens * heads * model.value_head) if cp > 1 else 0.0
        return (
            machine.kernel(whole * forward, cp) + (cp - 1) * machine.kernel(merged),
            machine.kernel(whole * 2.5 * forward, cp) + (cp - 1) * machine.kernel(merged),
        )
    each, count = model.sequence, heads * job.config.microbatch
    products = ((each, each, model.head), (each, model.head, each))
    forward = count * sum(machine.gemm(*shape) for shape in products)
    scores = job.tokens * model.sequence * heads
    softmax, dropout = 4, 5 if model.dropout else 0
    forward_all = forward + machine.bytes(scores * (softmax + dropout))
    backward = 2 * forward + machine.bytes(scores * (softmax + 2 + dropout))
    return forward_all, backward


_BLOCK = 128
"""Queries and keys of a block of attention in one kernel."""


def _elementwise(job: Job) -> tuple[float, float]:
    """Seconds of a layer's other kernels forward, and of those of norms and activation function
    alone. Two norms read and write; two residual sums read two and write one, with
    dropout its mask; the activation function reads its inputs and writes its output; queries and
    keys are rotated or laid out anew; experts' tokens are permuted there and back, on both sides
    of their exchange."""
    model, config, tokens, machine = job.model, job.config, job.tokens, job.machine
    hidden = model.hidden
    norms = 2 * 4 * hidden / config.sp
    sums = 2 * (7 if model.dropout else 6) * hidden / config.sp
    if model.q_lora_rank is None:
        rotated = 4 * model.head * (model.heads + 2 * model.num_kv_heads) / config.tp
    else:  # keys and queries are put together of two parts, and the ranks have norms
        rotated = 8 * model.heads * (2 * model.key_head + model.value_head) / config.tp
    per = 6 if model.gated else 4
    if model.experts:
        routed = model.top_k * config.imbalance / config.sp
        width = routed * model.expert_width + model.shared_ffn / config.tp
        moved = (2 if config.ep > 1 else 1) * 2 * 4 * routed * hidden
        moved += 4 * 6 * model.experts / config.sp  # scores of the router, in fp32
    else:
        width, moved = model.width / config.tp, 0.0
    activation = per * width
    times = tokens * machine.calibration.elementwise(config.kernels)
    all_of_them = norms + sums + rotated + activation + moved
    return (
        machine.kernel(machine.bytes(times * all_of_them), _KERNELS + 2 * bool(model.experts)),
        machine.bytes(times * (norms + activation)),
    )


_KERNELS = 6
"""Element-wise kernels of a layer's forward, at the least."""


def _tp(job: Job, backwards: int, beside: float) -> Iterator[Term]:
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
            if config.tp_overlap:  # of as many parts as ranks one waits, or is waited for
                seconds = max(seconds / ranks, seconds - beside / 2)
            yield Term(
                "tp", "", 1, seconds, backwards * seconds, group, collective, each, ranks,
                job.placement.timed(group), count * (1 + backwards),
            )  # fmt: skip


def _ep(job: Job, backwards: int) -> Iterator[Term]:
    """Of experts: an all-to-all to them and one back.

    A row goes for each of a token's choices. As DeepEP does it, a token goes to a node, or to a
    rack that is one fabric, once, however many of its experts are there, and inside to each of
    them: of k choices among u nodes u · (1 - (1 - 1/u)^k) differ.
    """
    model, config = job.model, job.config
    if config.ep == 1:
        return
    size = job.tokens / config.sp * model.hidden * LINEAR_BYTES * config.imbalance
    spread = as_fabrics(job.placement.timed("ep"), job.machine.cluster)
    parts: tuple[tuple[Spread, float], ...] = ((spread, size * model.top_k),)
    if config.dispatch == "deepep":
        inside, *above = spread
        units = math.prod(above)
        copies = units * (1 - (1 - 1 / units) ** model.top_k)
        parts = (
            ((inside, *[1] * len(above)), size * model.top_k),
            ((1, *above), size * copies),
        )
    for over, each in parts:
        ranks = math.prod(over)
        if ranks > 1:
            seconds = 2 * job.machine.collective("all_to_all", each, over)
            yield Term(
                "ep", "", 1, seconds, backwards * seconds, "ep", "all_to_all", each, ranks, over,
                2 * (1 + backwards),
            )  # fmt: skip


def _cp(job: Job, backwards: int, attention: float, attention_back: float) -> Iterator[Term]:
    """Of a ring of keys and values: what attention on them does not hide (Liu et al. 2023, arXiv
    2310.01889). Backward their gradients go round as well.

    Each of the ring's sends hides behind one of its cp kernels of attention, and the first kernel
    of the next layer waits for none.
    """
    model, config = job.model, job.config
    if config.cp == 1:
        return
    size = (
        config.cp
        * job.tokens
        * 2
        * (model.key_head + model.value_head)
        * max(model.num_kv_heads / config.tp, 1)
    )
    ring = job.collective("all_gather", size, "cp")
    hides = (config.cp - 1) / config.cp
    forward = max(ring - hides * attention, 0.0)
    back = max(2 * ring - hides * attention_back, 0.0)
    yield Term(
        "cp", "", 1, forward, back + (backwards - 1) * forward, "cp", "all_gather", size, config.cp,
        job.placement.timed("cp"), 2 + backwards,
    )  # fmt: skip
