"""Where each number of a step comes from: its formula, what goes in, and the source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from commgrid.planning.calibration import CALIBRATION, NCCL_GB, SOURCES, Calibration
from commgrid.planning.layer_cost import Machine, layer_cost
from commgrid.planning.spreads import groups
from commgrid.planning.step_cost import StepCost, output_time
from commgrid.planning.step_memory import communicators_of, layer_activations, parameters_of_rank

_NARAYANAN = "Narayanan et al. 2021, arXiv 2104.04473"
_KORTHIKANTI = "Korthikanti et al. 2022, arXiv 2205.05198"
_ZERO = "Rajbhandari et al. 2020, arXiv 1910.02054"
_FORMS = "ring, tree and hierarchical forms of commgrid/planning/cost.py, which names their sources"


@dataclass(frozen=True)
class Why:
    """One number: what it is of, its value as shown, how it is reckoned, and from what."""

    name: str
    value: str
    formula: str
    source: str

    def to_dict(self) -> dict[str, str]:
        return {"name": self.name, "value": self.value, "formula": self.formula,
                "source": self.source}  # fmt: skip


def why(cost: StepCost, calibration: Calibration = CALIBRATION) -> tuple[Why, ...]:
    """All numbers of a step's time and memory, in the order in which they are printed."""
    return (
        *_of_step(cost),
        *_of_time(cost, calibration),
        *_of_memory(cost),
        *_constants(cost, calibration),
    )


def _of_step(cost: StepCost) -> Iterator[Why]:
    model, choice = cost.model, cost.choice
    yield Why(
        "step", _seconds(cost.seconds), "the sum of the parts below", f"{_NARAYANAN}, section 2.2"
    )
    yield Why(
        "tokens/s",
        f"{cost.tokens_per_second:,.0f}",
        f"{model.batch:,} sequences · {model.sequence:,} tokens / step",
        "arithmetic",
    )
    yield Why(
        "MFU",
        f"{cost.mfu:.1%}",
        f"{model.flops_per_token:.3g} operations a token · tokens/s / ({choice.world_size:,} "
        f"devices · {cost.cluster.device.flops / 1e12:,.0f} TFLOP/s)",
        f"{_KORTHIKANTI}, appendix A; nothing computed again is counted, attention as not causal",
    )


def _of_time(cost: StepCost, calibration: Calibration) -> Iterator[Why]:
    model, choice, cluster = cost.model, cost.choice, cost.cluster
    machine, spreads = Machine(cluster, calibration), groups(choice, cluster)
    layer = layer_cost(model, choice, machine, spreads)
    count, layers = choice.microbatches(model), choice.stage_layers(model).most
    each = f"{count:,} microbatches · {layers} layers"
    yield Why(
        "kernels",
        _seconds(cost.compute),
        f"{each} · ({layer.forward.compute * 1e3:.2f} ms forward + "
        f"{layer.backward.compute * 1e3:.2f} ms backward, recompute={choice.recompute}), and on "
        f"the last stage {output_time(model, choice, machine) * 1e3:.2f} ms of output layer and "
        f"loss; a matrix product takes the root of the squares of arithmetic at "
        f"{calibration.gemm_share(cluster.device.name):.3f} and memory at {calibration.memory} of "
        "the peak",
        "Williams et al. 2009 (roofline); the shares: see constants",
    )
    if choice.pp > 1:
        yield Why(
            "bubble",
            _seconds(cost.bubble),
            f"({choice.pp} stages - 1) / {choice.chunks} chunks · a stage's forward and backward",
            f"{_NARAYANAN}, section 2.2; the pipeline simulator agrees",
        )
        yield Why(
            "sends",
            _seconds(cost.pp),
            f"there and back, for {count:,} microbatches · {choice.chunks} chunks, of "
            f"{choice.microbatch} · {model.sequence:,} / cp {choice.cp} tokens · {model.hidden:,} "
            f"· 2 bytes / tp {choice.tp}{_over(cost, 'pp', spreads)}",
            f"{_NARAYANAN}, section 4.1; none is hidden",
        )
    if cost.tp:
        form = "an all-gather and a reduce-scatter" if choice.sequence_parallel else "an all-reduce"
        yield Why(
            "tp",
            _seconds(cost.tp),
            f"{each} · ({layer.forward.tp * 1e3:.2f} ms forward + {layer.backward.tp * 1e3:.2f} "
            f"backward): {form} around attention and around the MLP"
            f"{_over(cost, 'tp', spreads)}; none is hidden",
            f"{_KORTHIKANTI}, section 4.2.2; {_FORMS}",
        )
    if choice.cp > 1:
        yield Why(
            "cp",
            _seconds(cost.cp),
            f"{each} · what attention does not hide of a ring of keys and values"
            f"{_over(cost, 'cp', spreads)}",
            f"Liu et al. 2023, arXiv 2310.01889; {_FORMS}",
        )
    if choice.ep > 1:
        yield Why(
            "ep",
            _seconds(cost.ep),
            f"{each} · ({layer.forward.ep * 1e3:.2f} ms forward + {layer.backward.ep * 1e3:.2f} "
            f"backward): an all-to-all there and one back, of {model.top_k} copies of a token in "
            f"a node and one for each further node{_over(cost, 'ep', spreads)}; all experts get "
            "as many tokens, none is hidden",
            f"DeepEP's dispatch; {_FORMS}",
        )
    if choice.dp * choice.cp > 1:
        hidden = "what a backward and a forward of a stage do not hide" if choice.overlap else "all"
        yield Why(
            "dp",
            _seconds(cost.dp),
            f"{hidden} of summing {choice.gradient_bytes} bytes of gradients and gathering 2 of "
            f"weights a parameter, shard={choice.shard}{_over(cost, 'dp_cp', spreads)}",
            f"{_ZERO}, section 7; {_FORMS}",
        )
    yield Why(
        "optimizer",
        _seconds(cost.optimizer),
        f"{choice.gradient_bytes} + 12 bytes of a parameter read and 14 written"
        + (f", a share of 1 in {choice.dp * choice.cp}" if choice.shard != "none" else ""),
        "Adam in mixed precision; the share of memory's bandwidth: see constants",
    )


def _of_memory(cost: StepCost) -> Iterator[Why]:
    model, choice, memory = cost.model, cost.choice, cost.memory
    layers = choice.stage_layers(model).most
    experts, rest = parameters_of_rank(model, choice, layers, 1)
    held = f"{(experts + rest) / 1e9:.3f} billion parameters ({layers} layers"
    held += f", split over tp {choice.tp})" if choice.tp > 1 else ")"
    yield Why("memory", _gb(memory.total), "the sum of the parts below, of the fullest rank", "")
    shared = ", shared over dp · cp" if choice.shard == "weights" else ""
    yield Why(
        "weights", _gb(memory.weights), f"2 bytes · about {held}{shared}", f"{_ZERO}, section 3.1"
    )
    yield Why(
        "gradients",
        _gb(memory.gradients),
        f"{choice.gradient_bytes} bytes · the same{shared}",
        f"{_ZERO}, section 3.1; Megatron sums in fp32",
    )
    shared = "" if choice.shard == "none" else f" / (dp · cp = {choice.dp * choice.cp})"
    yield Why(
        "optimizer state",
        _gb(memory.optimizer),
        f"12 bytes · the same{shared}: fp32 weights and Adam's two moments",
        f"{_ZERO}, sections 3.1 and 5",
    )
    yield Why(
        "activations",
        _gb(memory.activations),
        f"{layer_activations(model, choice) / 1e9:.3f} GB a layer and microbatch "
        f"(recompute={choice.recompute}) · up to {layers} layers · "
        f"{choice.in_flight(model):.1f} microbatches in flight",
        f"{_KORTHIKANTI}, table 2 and section 4.2.3",
    )
    yield Why(
        "communicators",
        _gb(memory.communicators),
        f"{communicators_of(choice)} that a step uses · {sum(NCCL_GB) / 2:.2f} GB, the middle of "
        f"{NCCL_GB[0]} to {NCCL_GB[1]}",
        SOURCES["nccl"],
    )
    yield Why("reserved", _gb(memory.reserved), "a constant", SOURCES["reserved"])


def _constants(cost: StepCost, calibration: Calibration) -> Iterator[Why]:
    cluster = cost.cluster
    known = cluster.device.name in dict(calibration.gemm)
    yield Why(
        "share of the peak",
        f"{calibration.gemm_share(cluster.device.name)}",
        f"of matrix products on {cluster.device.name}",
        SOURCES["gemm" if known else "gemm_other"],
    )
    if cost.model.attention == "flash":
        yield Why("share of the peak", f"{calibration.flash}", "of attention", SOURCES["flash"])
    yield Why("share of memory", f"{calibration.memory}", "of kernels", SOURCES["memory"])
    links = Machine(cluster, calibration).links
    yield Why("share of links", f"{links:g}", "of collectives", SOURCES["network"])
    yield Why("cluster", cluster.name, "devices, bandwidths, latencies", cluster.source)
    yield Why("model", cost.model.name, "sizes", cost.model.source or "as given")


def _over(cost: StepCost, group: str, spreads: dict[str, tuple[int, ...]]) -> str:
    """The slowest links that a group crosses."""
    level = cost.cluster.levels[cost.cluster.highest(spreads[group])]
    return f", over {level.bandwidth / 1e9:.0f} GB/s of a {level.name}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds < 10 else f"{seconds:.2f} s"


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"
