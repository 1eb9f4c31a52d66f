"""A training step as a list of terms, from formulas and a few calibrated numbers.

    step = m · (forward + backward of the slowest stage)
         + (p - 1) / v · (forward + backward of the mean stage)
         + what of data-parallel communication nothing hides + the optimizer

with m microbatches, p stages of v chunks (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
Time, traffic and the reasons for both are sums and views of the same terms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from commgrid.advisor.calibration import CALIBRATION, Calibration
from commgrid.advisor.cluster import Cluster
from commgrid.advisor.collectives import bus_factor
from commgrid.advisor.config import ParallelConfig
from commgrid.advisor.layer import LINEAR_BYTES, Collective, LayerCost, Machine, layer_cost
from commgrid.advisor.memory import Memory, memory_of, parameters_of_rank
from commgrid.advisor.model import Model
from commgrid.advisor.placement import Placement, Spread, of_choice

PARTS = ("compute", "bubble", "tp", "cp", "ep", "pp", "dp", "optimizer")
"""The parts of a step's time."""


@dataclass(frozen=True)
class Term:
    """One thing that a rank of the slowest stage does in a step.

    Args:
        part: one of `PARTS`.
        what: in words.
        times: how often.
        each: seconds of one without the hidden part.
        group: that communicates, by name; "": none does.
        collective, bytes: of one, as `cost.collective_time` takes them.
        ranks: of the group.
        spread: of the group over the cluster's levels.
        sends: how many of them a rank takes part in.
    """

    part: str
    what: str
    times: float
    each: float
    group: str = ""
    collective: str = ""
    bytes: float = 0.0
    ranks: int = 1
    spread: Spread = ()
    sends: float = 0.0

    @property
    def seconds(self) -> float:
        """Of the step."""
        return self.times * self.each

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in the step."""
        if not self.group:
            return 0.0
        return self.sends * self.bytes * bus_factor(self.collective, self.ranks)


@dataclass(frozen=True)
class StepCost:
    """The time and memory of a model's step on a grid.

    Args:
        model, choice, cluster: as given.
        placement: of the grid's ranks on the cluster.
        terms: what the slowest stage does.
        memory: of the rank that needs most.
    """

    model: Model
    choice: ParallelConfig
    cluster: Cluster
    placement: Placement
    terms: tuple[Term, ...]
    memory: Memory

    @cached_property
    def seconds(self) -> float:
        """Of the step."""
        return sum(self.parts.values())

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds by part."""
        found = dict.fromkeys(PARTS, 0.0)
        for term in self.terms:
            found[term.part] += term.seconds
        return found

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
    choice: ParallelConfig,
    cluster: Cluster,
    calibration: Calibration = CALIBRATION,
    *,
    machine: Machine | None = None,
    memory: Memory | None = None,
    placement: Placement | None = None,
) -> StepCost:
    """Time and memory of a step.

    Args:
        machine: of cluster and calibration, kept by who reckons many steps; None: a new one.
        memory: where it is known.
        placement: of a grid, from `placement.of_spec`; None: of ranks that are numbered as the
            choice's order says.
    """
    machine = machine or Machine(cluster, calibration)
    placement = placement or of_choice(choice, cluster)
    layer = layer_cost(model, choice, machine, placement.spreads)
    terms = tuple(_terms(model, choice, machine, placement.spreads, layer))
    return StepCost(model, choice, cluster, placement, terms, memory or memory_of(model, choice))


def _terms(
    model: Model,
    choice: ParallelConfig,
    machine: Machine,
    spreads: Mapping[str, Spread],
    layer: LayerCost,
) -> Iterator[Term]:
    _, most, last = choice.stage_layers(model)
    output = output_time(model, choice, machine)
    count = choice.microbatches(model)
    per_layer = layer.forward_total + layer.backward_total
    # The slowest stage: the last has the output layer, others perhaps a layer more.
    is_last = choice.pp == 1 or last * per_layer + output >= most * per_layer
    layers = last if is_last else most
    all_layers = f"{count:,} microbatches · {layers} layers"
    yield Term(
        "compute", f"{all_layers}, forward and backward", count * layers,
        layer.forward + layer.backward,
    )  # fmt: skip
    if is_last:
        yield Term("compute", f"{count:,} microbatches · output layer and loss", count, output)
    if choice.pp > 1:
        mean = (model.layers * per_layer + output) / choice.pp
        yield Term(
            "bubble", f"({choice.pp} stages - 1) / {choice.chunks} chunks · a stage's mean",
            (choice.pp - 1) / choice.chunks, mean,
        )  # fmt: skip
    for each in layer.collectives:
        # A stage with most layers sends most; the slowest one may have fewer.
        yield Term(
            each.part, all_layers, count * layers, each.forward + each.backward, each.group,
            each.collective, each.bytes, each.ranks, each.spread, count * most * each.times,
        )  # fmt: skip
    if choice.pp > 1:
        yield _send(model, choice, machine, spreads, count)
    yield from _data_parallel(model, choice, machine, spreads, layer)
    yield Term("optimizer", "one update", 1, _optimizer(model, choice, machine))


def output_time(model: Model, choice: ParallelConfig, machine: Machine) -> float:
    """Seconds of logits and loss of one microbatch, forward and backward."""
    tokens = choice.microbatch * model.sequence / choice.cp
    shape = (tokens, model.vocabulary / choice.tp, model.hidden)
    products = machine.gemm(*shape) + machine.gemm_backward(*shape, choice.gradient_bytes)
    return products + machine.bytes(tokens * model.vocabulary / choice.tp * 16)


def _send(
    model: Model,
    choice: ParallelConfig,
    machine: Machine,
    spreads: Mapping[str, Spread],
    count: int,
) -> Term:
    """Of activations to the next stage and gradients back; with tp each rank sends its part
    (Narayanan et al. 2021, section 4.1)."""
    tokens = choice.microbatch * model.sequence / choice.cp
    size = tokens * model.hidden * LINEAR_BYTES / choice.tp
    return Term(
        "pp",
        f"there and back, ({count:,} microbatches · {choice.chunks} chunks + {choice.pp} stages "
        "- 1)",
        2 * (count * choice.chunks + choice.pp - 1),
        machine.collective("send_recv", size, spreads["pp"]),
        "pp", "send_recv", size, choice.pp, spreads["pp"], 2 * count * choice.chunks,
    )  # fmt: skip


def _data_parallel(
    model: Model,
    choice: ParallelConfig,
    machine: Machine,
    spreads: Mapping[str, Spread],
    layer: LayerCost,
) -> Iterator[Term]:
    """Of gradients and weights: what the backward of the last microbatch and the forward of the
    first do not hide; with `shard="weights"`, of every microbatch."""
    most = choice.stage_layers(model).most
    experts, rest = parameters_of_rank(model, choice, most, 1 if choice.pp > 1 else 2 - model.tied)
    out = "all_reduce" if choice.shard == "none" else "reduce_scatter"
    found: list[tuple[Collective, bool]] = []  # and whether it is of gradients
    dense = "dp_cp" if choice.copies == 1 else "dp_shard_cp"
    for group, ranks, count in (
        (dense, choice.sharers, rest), ("edp", choice.expert_sharers, experts),
    ):  # fmt: skip
        spread = spreads.get(group, spreads[dense])
        if count and ranks > 1:
            found.append((_whole(group, out, count * choice.gradient_bytes, ranks, spread), True))
            if choice.shard != "none":
                size = count * LINEAR_BYTES
                found.append((_whole(group, "all_gather", size, ranks, spread), False))
    if choice.copies > 1:  # of the gradients' shards
        size = (rest / choice.sharers + experts / choice.expert_sharers) * choice.gradient_bytes
        spread = spreads["dp_replicate"]
        found.append((_whole("dp_replicate", "all_reduce", size, choice.copies, spread), True))
    seconds = [machine.collective(each.collective, each.bytes, each.spread) for each, _ in found]
    total = {
        is_out: sum(s for s, (_, kind) in zip(seconds, found, strict=True) if kind is is_out)
        for is_out in (True, False)
    }
    forward, backward = most * layer.forward_total, most * layer.backward_total
    times = choice.microbatches(model) if choice.shard == "weights" else 1
    for (each, is_out), one in zip(found, seconds, strict=True):
        share = one / total[is_out] if total[is_out] else 0.0
        visible = _visible(choice, total, forward, backward, most, is_out)
        # Gathered for the forward and again for the backward, where weights are shared out.
        twice = choice.shard == "weights" and not is_out
        what = "gradients" if is_out else "weights"
        often = f"{times:,} microbatches · " if choice.shard == "weights" else ""
        hidden = "what is not hidden of " if choice.overlap else ""
        yield Term(
            "dp", f"{often}{hidden}{what}", times, share * visible, each.group, each.collective,
            each.bytes, each.ranks, each.spread, times * (1 + twice),
        )  # fmt: skip


def _whole(group: str, collective: str, size: float, ranks: int, spread: Spread) -> Collective:
    return Collective("dp", group, collective, size, ranks, spread, 1, 0.0, 0.0)


def _visible(
    choice: ParallelConfig,
    total: Mapping[bool, float],
    forward: float,
    backward: float,
    most: int,
    is_out: bool,
) -> float:
    """Seconds of all gradients' collectives, or of all weights', that computation does not hide."""
    out, into = total[True], total[False]
    if choice.shard != "weights":
        behind = backward if is_out else forward
        return total[is_out] if not choice.overlap else max(
            total[is_out] - behind, total[is_out] / most
        )  # fmt: skip
    if not choice.overlap:
        return out if is_out else 2 * into
    # Behind a backward go the gradients and the second gathering; what shows is of both.
    shows = max(into + out - backward, out / most)
    both = into + out
    part = shows * total[is_out] / both if both else 0.0
    return part if is_out else part + max(into - forward, into / most)


def _optimizer(model: Model, choice: ParallelConfig, machine: Machine) -> float:
    """Adam reads gradient, master weight and moments, and writes the latter three and
    the weight."""
    most = choice.stage_layers(model).most
    experts, rest = parameters_of_rank(model, choice, most, 1)
    if choice.shard != "none":
        rest, experts = rest / choice.sharers, experts / choice.expert_sharers
    return machine.bytes((rest + experts) * (choice.gradient_bytes + 12 + 12 + 2))
