"""Device memory of a rank in training: what it holds, in bytes.

Weights, gradients and optimizer are those of mixed-precision Adam: 2 bytes of weights, 2 or 4 of
gradients, 12 of master weights and two moments (Rajbhandari et al. 2020, arXiv 1910.02054, section
3.1). Activations are counted as Korthikanti et al. 2022 do (arXiv 2205.05198, table 2), matrix by
matrix, so that gated, grouped-query and expert layers are counted too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from commgrid.cost_model.calibration import RESERVED_GB
from commgrid.cost_model.config import ParallelConfig
from commgrid.cost_model.model import Model
from commgrid.planning.plan import NCCL_GB

WEIGHT, MASTER, MOMENTS = 2, 4, 8
"""Bytes of a parameter: in bf16, in fp32, and Adam's two moments in fp32."""

MEMORY_PARTS = (
    "weights", "gradients", "optimizer", "activations", "communicators", "reserved"
)  # fmt: skip
"""The parts of a rank's memory."""


class Held(NamedTuple):
    """One thing in a rank's memory.

    Args:
        part: one of `MEMORY_PARTS`.
        what: in words.
        number: how many of them.
        each: bytes of one.
    """

    part: str
    what: str
    number: float
    each: float


@dataclass(frozen=True)
class Memory:
    """Bytes that the rank which needs most holds; `parts` and `total` are sums of `terms`."""

    terms: tuple[Held, ...]

    @cached_property
    def parts(self) -> dict[str, float]:
        """Bytes by part."""
        found = dict.fromkeys(MEMORY_PARTS, 0.0)
        for term in self.terms:
            found[term.part] += term.number * term.each
        return found

    @cached_property
    def total(self) -> float:
        """All of it."""
        return sum(self.parts.values())


def parameters_of_rank(
    model: Model, config: ParallelConfig, layers: int, ends: int
) -> tuple[float, float]:
    """Parameters that a rank of a stage holds, of experts and of all the rest.

    Args:
        layers: of the stage.
        ends: how many of embedding and output layer it holds.

    Returns:
        Parameters of experts, and all others.
    """
    dense = (model.attention_parameters + model.dense_parameters) / config.tp
    rest = layers * (dense + model.small_parameters) + (
        ends * model.embedding_parameters / config.tp
    )
    local = model.experts / config.ep
    routed = layers - model.dense_layers if config.pp == 1 else layers
    return routed * local * model.expert_parameters / config.expert_tp, rest


def fullest_parameters(model: Model, config: ParallelConfig) -> tuple[float, float]:
    """`parameters_of_rank` of the stage that has most: the first, the last, or one between."""
    first, most, last = config.stage_layers(model)
    if config.pp == 1:
        return parameters_of_rank(model, config, most, 2 - model.tied)
    stages = [(first, 1), (last, 1), *([(most, 0)] if config.pp > 2 else [])]
    return max((parameters_of_rank(model, config, *stage) for stage in stages), key=sum)


def layer_activations(model: Model, config: ParallelConfig, recompute: str | None = None) -> float:
    """Bytes that one layer keeps of one microbatch until its backward.

    Args:
        recompute: None: as the config says.

    For GPT: s·b·h(10 + 24/t + 5·a·s/(h·t)); with sequence parallelism s·b·h/t(34 + 5·a·s/h), and
    s·b·h·34/t where attention is computed again (Korthikanti et al. 2022, table 2).
    """
    tokens = config.microbatch * model.sequence / config.cp
    recompute = config.recompute if recompute is None else recompute
    hidden, outside = model.hidden, config.sp
    if recompute == "full":
        return tokens * 2 * hidden / outside
    again = recompute == "selective"
    norms = 0 if again and model.attention == "flash" else 2 * 2 * hidden
    kept = (2 * 2 * hidden + (2 * hidden if model.dropout else 0) + norms) / outside
    heads = model.heads * model.head
    kept += (2 * heads + 4 * model.num_kv_heads * model.head + 2 * heads) / config.tp
    if model.attention == "plain" and not again:
        kept += (5 if model.dropout else 2) * model.heads * model.sequence / config.tp
    inside = (4 if model.gated else 2) + (0 if again and model.attention == "flash" else 2)
    if model.experts:
        routed = model.top_k * (2 * 2 * hidden + inside * model.expert_width) / outside
        kept += routed + inside * model.shared_ffn / config.tp
    else:
        kept += inside * model.width / config.tp
    return tokens * kept


def memory_of(model: Model, config: ParallelConfig) -> Memory:
    """Memory of the fullest rank: one of the first stage, of the next, or of the last."""
    first, most, last = config.stage_layers(model)
    in_flight = config.in_flight(model)
    if config.pp == 1:
        return _of_stage(model, config, most, 2 - model.tied, most * in_flight, True)
    after = max(in_flight - config.pp + 1, 1)
    stages = [
        _of_stage(model, config, first, 1, first * in_flight),
        _of_stage(model, config, last, 1, last * after, True),
    ]
    if config.pp > 2 and most > first:
        kept = most * max(in_flight - 1, 1)
        stages.append(_of_stage(model, config, most, 0, kept))
    return max(stages, key=lambda memory: memory.total)


def communicators_of(config: ParallelConfig) -> int:
    """Communicators of more than one rank that a step uses, one of each."""
    sizes = [config.tp, config.cp, config.pp, config.shard_size, config.dp_replicate]
    if config.ep > 1:
        sizes += [config.ep, config.expert_tp, config.edp]
    return sum(size > 1 for size in sizes)


def _of_stage(
    model: Model, config: ParallelConfig, layers: int, ends: int, kept: float, output: bool = False
) -> Memory:
    """Of a stage's rank.

    Args:
        layers: of the stage.
        ends: how many of embedding and output layer it holds.
        kept: how many times one layer and microbatch it keeps activations.
        output: whether it computes the loss.
    """
    experts, rest = parameters_of_rank(model, config, layers, ends)
    sharded = {"dense": rest / config.shard_size, "experts": experts / config.expert_shard_size}
    whole = {"dense": rest, "experts": experts}
    held = sharded if config.zero_stage == 3 else whole
    states = sharded if config.zero_stage else whole
    terms = [
        Held(part, what.format(kind), number, each)
        for kind in ("dense", "experts")
        if whole[kind]
        for part, what, number, each in (
            ("weights", "{} parameters, in 16 bits", held[kind], WEIGHT),
            ("gradients", "{} parameters", held[kind], config.gradient_bytes),
            ("optimizer", "{} parameters, in 32 bits, and Adam's moments", states[kind],
             MASTER + MOMENTS),
        )
    ]  # fmt: skip
    if config.zero_stage == 3:
        terms.append(
            Held("weights", "parameters of a layer, gathered", sum(whole.values()) / layers, WEIGHT)
        )
    layer = layer_activations(model, config)
    if config.recomputed(layers) < 1:
        share = config.recomputed(layers)
        layer = share * layer + (1 - share) * layer_activations(model, config, "none")
    terms.append(Held("activations", "layers and microbatches in flight", kept, layer))
    if config.recompute == "full":
        again = layer_activations(model, config, "none")
        terms.append(Held("activations", "layer, while it is computed again", 1, again))
    if output:
        tokens = config.microbatch * model.sequence / config.cp
        logits = tokens * model.vocabulary / config.tp
        if config.kernels == "fused":
            terms.append(
                Held("activations", "logits, in 16 bits, and in 32 for the loss", logits, 6)
            )
        else:  # PyTorch's cross entropy: a copy, its logarithm, and the copy's gradient
            what = "logits, in 16 bits, and three times in 32 for the loss"
            terms.append(Held("activations", what, logits, 14))
    connected = sum(NCCL_GB) / 2 * 1e9
    return Memory((
        *terms,
        Held("communicators", "that a step uses", communicators_of(config), connected),
        Held("reserved", "CUDA context and libraries", 1, RESERVED_GB * 1e9),
    ))  # fmt: skip
