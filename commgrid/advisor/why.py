"""Where each number of a step comes from: its formula, what goes in, and the source."""

from __future__ import annotations

from collections.abc import Iterator

from commgrid.advisor.calibration import CALIBRATION, NCCL_GB, SOURCES, Calibration
from commgrid.advisor.layer import Machine
from commgrid.advisor.memory import communicators_of, layer_activations, parameters_of_rank
from commgrid.advisor.reasons import Why
from commgrid.advisor.step import StepCost

_NARAYANAN = "Narayanan et al. 2021, arXiv 2104.04473"
_KORTHIKANTI = "Korthikanti et al. 2022, arXiv 2205.05198"
_ZERO = "Rajbhandari et al. 2020, arXiv 1910.02054"
_FORMS = "forms of commgrid/advisor/collectives.py (ring, tree, hierarchical), with its sources"
_NAMES = {"compute": "kernels", "pp": "sends"} | {
    part: part for part in ("bubble", "tp", "cp", "ep", "dp", "optimizer")
}
_SOURCES = {
    "compute": "Williams et al. 2009 (roofline): a matrix product takes the root of the squares of "
    "arithmetic and memory; the shares of the peak: see constants",
    "bubble": f"{_NARAYANAN}, section 2.2; the pipeline simulator agrees",
    "pp": f"{_NARAYANAN}, section 4.1; none is hidden",
    "tp": f"{_KORTHIKANTI}, section 4.2.2; none is hidden",
    "cp": "Liu et al. 2023, arXiv 2310.01889: what attention does not hide of a ring",
    "ep": "DeepEP's dispatch: copies of a token in a node, and one for each further node; all "
    "experts get as many tokens, none is hidden",
    "dp": f"{_ZERO}, section 7",
    "optimizer": "Adam in mixed precision: gradient and 12 bytes of a parameter read, 14 written; "
    "the share of memory's bandwidth: see constants",
}


def why(cost: StepCost, calibration: Calibration = CALIBRATION) -> tuple[Why, ...]:
    """All numbers of a step's time and memory, in the order in which they are printed."""
    return (
        *_of_step(cost),
        *_of_time(cost),
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


def _of_time(cost: StepCost) -> Iterator[Why]:
    """A line for each term: how often, and what each takes."""
    for term in cost.terms:
        formula = f"{term.what}: {term.times:,g} · {term.each * 1e3:.6g} ms"
        source = _SOURCES[term.part]
        if term.group:
            level = cost.cluster.levels[cost.cluster.highest(term.spread)]
            formula += (
                f", {term.collective} of {term.bytes / 1e6:.4g} MB on {term.group}, over "
                f"{level.bandwidth / 1e9:.0f} GB/s of a {level.name}"
            )
            source = f"{source}; {_FORMS}"
        yield Why(_NAMES[term.part], _seconds(term.seconds), formula, source)


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


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds < 10 else f"{seconds:.2f} s"


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"
