"""A training step as a list of terms, from formulas and a few calibrated numbers.

    step = m · (forward + backward of the slowest stage)
         + (p - 1) / v · (forward + backward of the mean stage)
         + what of data-parallel communication nothing hides + the optimizer

with m microbatches, and p stages of v virtual ones (Narayanan et al. 2021, arXiv 2104.04473,
section 2.2).
Time, traffic and the reasons for both are sums and views of the same terms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from commgrid.cost_model.calibration import CALIBRATION, Calibration
from commgrid.cost_model.cluster import Cluster
from commgrid.cost_model.collective_form import highest
from commgrid.cost_model.config import ParallelConfig
from commgrid.cost_model.layer import LINEAR_BYTES, Job, LayerCost, Machine, layer_cost
from commgrid.cost_model.memory import Memory, fullest_parameters, memory_of
from commgrid.cost_model.model import Model
from commgrid.cost_model.placement import GridPlacement
from commgrid.cost_model.term import PARTS, Term
from commgrid.errors import SpecError


@dataclass(frozen=True)
class StepCost:
    """The time and memory of a model's step on a grid.

    Args:
        model, config, cluster: as given.
        placement: of the grid's ranks on the cluster.
        terms: what the slowest stage does.
        memory: of the rank that needs most.
        calibration: the constants that it was reckoned with.
    """

    model: Model
    config: ParallelConfig
    cluster: Cluster
    placement: GridPlacement
    terms: tuple[Term, ...]
    memory: Memory
    calibration: Calibration = CALIBRATION

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
    def mfu(self) -> float:
        """Share of the devices' peak (model FLOPs utilization), by `Model.flops_per_token`."""
        work = self.model.flops_per_token * self.model.tokens
        return work / self.seconds / self.config.world_size / self.cluster.accelerator.flops


def step_cost(
    model: Model,
    config: ParallelConfig,
    cluster: Cluster,
    calibration: Calibration = CALIBRATION,
    *,
    machine: Machine | None = None,
    memory: Memory | None = None,
    placement: GridPlacement | None = None,
) -> StepCost:
    """Time and memory of a step.

    Args:
        machine: of cluster and calibration, kept by who reckons many steps; None: a new one.
        memory: where it is known.
        placement: of the grid's ranks; None: rank r runs on device r.

    Raises:
        SpecError: the model cannot run so, or the ranks do not fill the cluster's nodes.
    """
    if machine is None and (why := config.refusal(model)):
        raise SpecError(why)
    machine = machine or Machine(cluster, calibration)
    job = Job(model, config, machine, placement or machine.placement(config.spec))
    terms = tuple(_terms(job, layer_cost(job)))
    memory = memory or memory_of(model, config)
    return StepCost(model, config, cluster, job.placement, terms, memory, machine.calibration)


def beyond(model: Model, config: ParallelConfig) -> str:
    """Why a step is beyond what the model was calibrated on; empty: it is not."""
    if model.window:
        return "attention with sliding windows: published runs are slower by a third"
    if config.cp > 1 and config.kernels != "fused":
        return "a ring of PyTorch's own kernels: published runs are slower by up to a half"
    if model.experts and config.ep > 1 and config.dispatch == "rows" and config.microbatch == 1:
        return "experts that wait for the host: published runs differ by up to a third"
    return ""


def _terms(job: Job, layer: LayerCost) -> Iterator[Term]:
    model, config = job.model, job.config
    _, most, last = config.stage_layers(model)
    output = output_time(job)
    count = config.microbatches(model)
    per_layer = layer.forward_total + layer.backward_total
    # The slowest stage: the last has the output layer, others perhaps a layer more.
    is_last = config.pp == 1 or last * per_layer + output >= most * per_layer
    layers = last if is_last else most
    all_layers = f"{count:,} microbatches · {layers} layers"
    yield Term(
        "compute", f"{all_layers}, forward and backward", count * layers,
        layer.forward, layer.backward,
    )  # fmt: skip
    if is_last:
        yield Term("compute", f"{count:,} microbatches · output layer and loss", count, output)
    if config.pp > 1:
        mean = (model.layers * per_layer + output) / config.pp
        what = "a stage's mean"
        if config.schedule == "zb-h1":
            mean -= 2 * model.layers * layer.by_weight / config.pp
            what += " less twice its weights' gradients"
        yield Term(
            "bubble",
            f"({config.pp} stages - 1) / {config.virtual_stages} virtual stages · {what}",
            (config.pp - 1) / config.virtual_stages, mean,
        )  # fmt: skip
    for each in layer.collectives:
        # A stage with most layers sends most; the slowest one may have fewer.
        yield replace(each, what=all_layers, times=count * layers, sends=count * most * each.sends)
    if config.pp > 1:
        yield _send(job, count)
    yield from _data_parallel(job, layer)
    yield Term("optimizer", "one update", 1, _optimizer(job))


def output_time(job: Job) -> float:
    """Seconds of logits and loss of one microbatch, forward and backward."""
    vocabulary, machine = job.model.vocabulary / job.config.tp, job.machine
    shape = (job.tokens, vocabulary, job.model.hidden)
    backward = machine.gemm_backward(*shape, job.config.gradient_bytes)
    return machine.gemm(*shape) + sum(backward) + machine.bytes(job.tokens * vocabulary * 16)


def _send(job: Job, count: int) -> Term:
    """Of activations to the next stage and gradients back; with tp each rank sends its part
    (Narayanan et al. 2021, section 4.1)."""
    config = job.config
    size = job.tokens * job.model.hidden * LINEAR_BYTES / config.tp
    times, what = 2 * (count + config.pp - 1), f"{count:,} microbatches + {config.pp} stages - 1"
    if config.virtual_stages > 1:  # others are sent while another virtual stage computes
        times, what = 4 * (config.pp - 1), f"twice {config.pp} stages - 1, the others being hidden"
    return Term(
        "pp", f"there and back, {what}", times,
        job.collective("send_recv", size, "pp"), 0.0,
        "pp", "send_recv", size, config.pp, job.placement.timed("pp"),
        2 * count * config.virtual_stages,
    )  # fmt: skip


def _sums(job: Job) -> Iterator[Term]:
    """Collectives of data parallelism, each with all its time: of gradients, and where state is
    sharded of weights, by all-gathers. Of the stage with most parameters; with ZeRO stage 3 of one
    microbatch."""
    config = job.config
    experts, rest = fullest_parameters(job.model, config)
    reduce = "reduce_scatter" if config.zero_stage else "all_reduce"
    copied = config.dp_replicate > 1

    def term(group: str, collective: str, size: float, ranks: int, placed: str = "") -> Term:
        spread = job.placement.timed(placed or group)
        what = "weights" if collective == "all_gather" else "gradients"
        seconds = job.machine.collective(collective, size, spread)
        return Term("dp", what, 1, seconds, 0.0, group, collective, size, ranks, spread, 1, placed)

    for group, placed, ranks, count in (
        ("dp_shard_cp" if copied else "dp_cp", "", config.shard_size, rest),
        ("edp", "edp_shard" if copied else "", config.expert_shard_size, experts),
    ):
        if count and ranks > 1:
            yield term(group, reduce, count * config.gradient_bytes, ranks, placed)
            if config.zero_stage:
                yield term(group, "all_gather", count * LINEAR_BYTES, ranks, placed)
    if copied:  # of the gradients' shards
        count = rest / config.shard_size + experts / config.expert_shard_size
        size = count * config.gradient_bytes
        yield term("dp_replicate", "all_reduce", size, config.dp_replicate)


def _data_parallel(job: Job, layer: LayerCost) -> Iterator[Term]:
    """Of gradients and weights: what the backward of the last microbatch and the forward of the
    first do not hide; with ZeRO stage 3, of every microbatch."""
    config, found = job.config, list(_sums(job))
    total = {"gradients": 0.0, "weights": 0.0}
    for each in found:
        total[each.what] += each.forward
    whole = config.zero_stage == 3
    times = config.microbatches(job.model) if whole else 1
    often = f"{times:,} microbatches · " if whole else ""
    hidden = "what is not hidden of " if config.overlap else ""
    for each in found:
        share = each.forward / total[each.what] if total[each.what] else 0.0
        # Gathered for the forward and again for the backward, where weights are sharded.
        twice = whole and each.what == "weights"
        yield replace(
            each, what=f"{often}{hidden}{each.what}", times=times, sends=times * (1 + twice),
            forward=share * _visible(job, layer, total, each.what),
        )  # fmt: skip


def _visible(job: Job, layer: LayerCost, total: Mapping[str, float], what: str) -> float:
    """Seconds of all gradients' collectives, or of all weights', that computation does not hide."""
    config, most = job.config, job.config.stage_layers(job.model).most
    forward, backward = most * layer.forward_total, most * layer.backward_total
    reduced, gathered = total["gradients"], total["weights"]
    of_gradients = what == "gradients"
    if config.zero_stage != 3:
        own = total[what]
        behind = backward if of_gradients else forward
        return max(own - behind, own / most) if config.overlap else own
    if not config.overlap:
        return reduced if of_gradients else 2 * gathered
    # Behind a backward go the gradients and the second gathering; what shows is of both.
    shows = max(gathered + reduced - backward, reduced / most)
    both = gathered + reduced
    part = shows * total[what] / both if both else 0.0
    return part if of_gradients else part + max(gathered - forward, gathered / most)


def _optimizer(job: Job) -> float:
    """Adam reads gradient, master weight and moments, and writes the latter three and
    the weight."""
    config = job.config
    experts, rest = fullest_parameters(job.model, config)
    if config.zero_stage:
        rest, experts = rest / config.shard_size, experts / config.expert_shard_size
    return job.machine.bytes((rest + experts) * (config.gradient_bytes + 12 + 12 + 2))


# ---- what it sends ------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepTraffic:
    """Bytes sent in a step on the groups of one name.

    Each rank's bytes are those of the step's terms: over n ranks a ring's all-reduce of s bytes
    sends 2 s (n - 1) / n, its reduce-scatter and its all-gather s (n - 1) / n each (Patarasuk &
    Yuan 2009), and an all-to-all of s bytes as much as one of these. Of each ring one rank in a
    unit sends on to the next unit, so the link that leaves a unit carries as much as one rank
    sends, once for each group that shares it. In an all-to-all every rank of the unit sends to the
    others.

    Args:
        name: of the groups.
        sent: bytes that a rank sends, of a stage with most layers.
        level: the place of the highest level that they cross, 0 within a node.
        link: bytes over the link that leaves a unit of the level below, of all groups that share
            it; 0 within a node.
    """

    name: str
    sent: float
    level: int
    link: float


def traffic(cost: StepCost) -> tuple[StepTraffic, ...]:
    """Bytes sent in a step by group name, the most first; names without any are left out."""
    found: dict[str, list[Term]] = {}
    for term in cost.terms:
        if term.sent > 0:
            found.setdefault(term.group, []).append(term)
    made = []
    for name, terms in found.items():
        placed = terms[0].placed or name
        level, load = cost.placement.place(placed), cost.placement.load(placed)
        link = sum(
            term.sends * term.bytes * load.outward
            if term.collective == "all_to_all"
            else term.sent * load.groups
            for term in terms
            if 0 < level <= highest(term.spread)
        )
        made.append(StepTraffic(name, sum(term.sent for term in terms), level, link))
    return tuple(sorted(made, key=lambda each: -each.sent))
