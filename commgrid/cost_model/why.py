"""Why a number is what it is, and why one grid is worse than another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from commgrid.cost_model.calibration import SOURCES
from commgrid.cost_model.collective_form import highest
from commgrid.cost_model.config import RECOMPUTE, ParallelConfig
from commgrid.cost_model.step import StepCost
from commgrid.cost_model.term import PARTS
from commgrid.layout.axis_names import sizes_text
from commgrid.wording import several

_NARAYANAN = "Narayanan et al. 2021, arXiv 2104.04473"
_KORTHIKANTI = "Korthikanti et al. 2022, arXiv 2205.05198"
_ZERO = "Rajbhandari et al. 2020, arXiv 1910.02054"
_FORMS = "commgrid/cost_model/collective_form.py (ring, tree) and collective.py (hierarchical)"


@dataclass(frozen=True)
class Why:
    """One number: its name, its value as shown, its formula, and the source."""

    name: str
    value: str
    formula: str
    source: str


def as_lines(found: Sequence[Why]) -> list[str]:
    """Where each number is from, as lines."""
    lines = ["", "Where these numbers are from:"]
    for each in found:
        lines.append(f"  {each.name:18} {each.value:>11}  {each.formula}")
        if each.source:
            lines.append(f"  {'':18} {'':>11}  from: {each.source}")
    return lines


_MEMORY_SOURCES = {
    "weights": f"{_ZERO}, section 3.1",
    "gradients": f"{_ZERO}, section 3.1; Megatron sums in fp32",
    "optimizer": f"{_ZERO}, sections 3.1 and 5",
    "activations": f"{_KORTHIKANTI}, table 2 and section 4.2.3",
    "communicators": SOURCES["nccl"],
    "reserved": SOURCES["reserved"],
}


def why(cost: StepCost) -> tuple[Why, ...]:
    """All numbers of a step's time and memory, in the order in which they are printed."""
    return (*_of_step(cost), *_of_time(cost), *_of_memory(cost), *_constants(cost))


def _of_step(cost: StepCost) -> Iterator[Why]:
    model, config = cost.model, cost.config
    yield Why(
        "step", _seconds(cost.seconds), "the sum of the parts below", f"{_NARAYANAN}, section 2.2"
    )
    yield Why(
        "tokens/s",
        _rate(cost.tokens_per_second),
        f"{model.batch:,} sequences · {model.sequence:,} tokens / step",
        "arithmetic",
    )
    yield Why(
        "MFU",
        f"{cost.mfu:.1%}",
        f"{model.flops_per_token:.6g} operations a token · tokens/s / ({config.world_size:,} "
        f"devices · {cost.cluster.accelerator.flops / 1e12:,.6g} TFLOP/s)",
        f"{_KORTHIKANTI}, appendix A; without recomputation, with attention as if it were not "
        "causal, over the device's peak in 16 bits, also of a step in fp8",
    )


def _of_time(cost: StepCost) -> Iterator[Why]:
    """A line for each term: how often, and what each takes."""
    for term in cost.terms:
        formula = f"{term.what}: {term.times:,.9g} · {term.each * 1e3:.9g} ms"
        source = _PARTS[term.part].source
        if term.group:
            level = cost.cluster.levels[highest(term.spread)]
            formula += (
                f", {term.collective} of {_bytes(term.bytes)} on {term.group}, over "
                f"{level.link.bandwidth / 1e9:.0f} GB/s of a {level.name}"
            )
            source = f"{source}; {_FORMS}"
        yield Why(_PARTS[term.part].short, _seconds(term.seconds), formula, source)


def _of_memory(cost: StepCost) -> Iterator[Why]:
    """A line for each term: how many, and the bytes of each."""
    yield Why(
        "memory", _gb(cost.memory.total), "the sum of the parts below, of the fullest rank", ""
    )
    for term in cost.memory.terms:
        formula = f"{term.what}: {_number(term.number)} · {_bytes(term.each)}"
        name = "optimizer state" if term.part == "optimizer" else term.part
        source = _MEMORY_SOURCES[term.part]
        yield Why(name, _gb(term.number * term.each), formula, source)


def _number(number: float) -> str:
    return f"{number / 1e9:.6g} billion" if number >= 1e9 else f"{number:,.6g}"


def _bytes(count: float) -> str:
    return f"{count / 1e6:,.6g} MB" if count >= 1e6 else f"{count:g} bytes"


def _constants(cost: StepCost) -> Iterator[Why]:
    cluster, calibration = cost.cluster, cost.calibration
    known = cluster.accelerator.name in dict(calibration.gemm)
    yield Why(
        "share of the peak",
        f"{calibration.gemm_share(cluster.accelerator.name)}",
        f"of matrix products on {cluster.accelerator.name}",
        SOURCES["gemm" if known else "gemm_other"],
    )
    if cost.model.attention == "flash":
        yield Why("share of the peak", f"{calibration.flash}", "of attention", SOURCES["flash"])
    yield Why("share of memory", f"{calibration.memory}", "of kernels", SOURCES["memory"])
    for level in cluster.levels:
        share = 1.0 if level.measured else calibration.network
        yield Why("share of links", f"{share:g}", f"of a {level.name}'s", SOURCES["network"])
    yield Why("cluster", cluster.name, "devices, bandwidths, latencies", cluster.source)
    yield Why("model", cost.model.name, "sizes", cost.model.source or "as given")


def _rate(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds < 10 else f"{seconds:.2f} s"


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"


# ---- grids compared -----------------------------------------------------------------------------

_Reason = Callable[[StepCost, StepCost], str]


def limits(cost: StepCost) -> str:
    """The two largest parts of a step beside arithmetic, in words."""
    shares = {part: cost.parts[part] / cost.seconds for part in PARTS if part != "compute"}
    largest = sorted(shares.items(), key=lambda item: -item[1])[:2]
    told = [f"{NAMES[part]} {share:.0%}" for part, share in largest if share >= 0.01]
    return ", ".join(told) or "arithmetic alone"


def why_worse(cost: StepCost, best: StepCost) -> str:
    """Why a grid takes longer than the best one: the part that grew most, and what is behind it."""
    more = cost.seconds / best.seconds - 1
    grown = {part: (cost.parts[part] - best.parts[part]) / best.seconds for part in PARTS}
    part = max(grown, key=lambda each: grown[each])
    reason = _PARTS[part].reason(cost, best)
    return f"+{more:.1%}: {NAMES[part]} +{grown[part]:.1%}{reason}"


def _of_compute(cost: StepCost, best: StepCost) -> str:
    places = [RECOMPUTE.index(each.config.recompute) for each in (cost, best)]
    if places[0] > places[1]:
        return f" (recompute {cost.config.recompute}, to fit)"
    if cost.config.tp > best.config.tp:
        return f" (smaller matrices with tp {cost.config.tp})"
    if cost.config.microbatch < best.config.microbatch:
        return f" (smaller matrices with microbatches of {cost.config.microbatch})"
    if cost.config.pp > best.config.pp:
        return f" (fuller stages with pp {cost.config.pp})"
    return ""


def _of_bubble(cost: StepCost, best: StepCost) -> str:
    config, count = cost.config, cost.config.microbatches(cost.model)
    return f" ({config.pp} stages of {config.virtual_stages} for {count} microbatches)"


def _crossing(group: str, *axes: str) -> _Reason:
    def reason(cost: StepCost, best: StepCost) -> str:
        spread = cost.placement.spreads.get(group)
        if spread is None:
            return ""
        levels, place = cost.cluster.levels, highest(spread)
        sizes = {axis: getattr(cost.config, axis) for axis in axes}
        group_of = sizes_text(sizes) or f"{axes[0]} 1"
        if place == 0:
            return f" ({group_of})"
        return (
            f" ({group_of} leaves the {levels[place - 1].name}: "
            f"{levels[place].link.bandwidth / 1e9:.0f} GB/s)"
        )

    return reason


def _shards(config: ParallelConfig) -> str:
    return several(config.shard_size if config.zero_stage else 1, "rank")


def _of_data_parallel(cost: StepCost, best: StepCost) -> str:
    group = "dp_cp" if cost.config.dp_replicate == 1 else "dp_shard_cp"
    return _crossing(group, "dp", "cp")(cost, best)


# ---- the parts ----------------------------------------------------------------------------------


class _Part(NamedTuple):
    """A part of a step.

    Args:
        name: in tables.
        source: of its formula.
        reason: why it takes longer on a grid than on the best one.
        short: its name beside a formula.
    """

    name: str
    source: str
    reason: _Reason
    short: str


_PARTS: Mapping[str, _Part] = MappingProxyType(
    {
        "compute": _Part(
            "kernels",
            "Williams et al. 2009 (roofline): a matrix product takes sqrt(arithmetic² + memory²); "
            "the shares of the peak: see constants",
            _of_compute, "kernels",
        ),
        "bubble": _Part(
            "bubble", f"{_NARAYANAN}, section 2.2; the pipeline simulator agrees", _of_bubble,
            "bubble",
        ),
        "tp": _Part(
            "tp's collectives",
            f"{_KORTHIKANTI}, section 4.2.2; with tp_overlap the part that products do not hide",
            _crossing("tp", "tp"), "tp",
        ),
        "cp": _Part(
            "cp's ring",
            "Liu et al. 2023, arXiv 2310.01889: the part of a ring that attention does not hide",
            _crossing("cp", "cp"), "cp",
        ),
        "ep": _Part(
            "experts' all-to-all",
            "a row for each of a token's choices; with dispatch=deepep a copy for each further "
            "node, and the choices in it; imbalance as given; none is hidden",
            _crossing("ep", "ep"), "ep",
        ),
        "pp": _Part(
            "sends between stages",
            f"{_NARAYANAN}, section 4.1; with virtual stages most are hidden",
            _crossing("pp", "pp"), "sends",
        ),
        "dp": _Part(
            "gradients and weights of dp", f"{_ZERO}, section 7", _of_data_parallel, "dp"
        ),
        "optimizer": _Part(
            "optimizer",
            "Adam in mixed precision: gradient and 12 bytes of a parameter read, 14 written; the "
            "share of memory's bandwidth: see constants",
            lambda cost, best: f" (its state over {_shards(cost.config)})", "optimizer",
        ),
    }
)  # fmt: skip
NAMES: Mapping[str, str] = MappingProxyType({part: each.name for part, each in _PARTS.items()})
"""Names of the parts of a step."""
