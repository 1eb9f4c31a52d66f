"""Time and memory of a step against papers' formulas, the simulator, and counting."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from commgrid.cost_model.calibration import CALIBRATION, SOURCES
from commgrid.cost_model.cluster import CLUSTERS
from commgrid.cost_model.config import ORDERS, ParallelConfig
from commgrid.cost_model.layer import Job, Machine, layer_cost
from commgrid.cost_model.memory import MEMORY_PARTS, layer_activations, memory_of
from commgrid.cost_model.model import MODELS, Model
from commgrid.cost_model.placement import of_spec
from commgrid.cost_model.step import step_cost
from commgrid.cost_model.term import PARTS
from commgrid.cost_model.why import why
from commgrid.pipeline_schedules.schedule import interleaved, one_f_one_b
from commgrid.pipeline_schedules.simulator import Times, simulate
from commgrid.planning.spec import GridSpec

H100 = CLUSTERS["h100"]
GPT = Model(
    "gpt", layers=48, hidden=6144, heads=64, vocabulary=51200, sequence=2048, batch=64,
    biases=True, dropout=True, tied=True, attention="plain",
)  # fmt: skip


@pytest.mark.parametrize("t", [1, 2, 8])
@pytest.mark.parametrize("b", [1, 4])
def test_activations_are_those_of_the_papers_table(t: int, b: int) -> None:
    """Korthikanti et al. 2022, table 2: bytes of one layer."""
    s, h, a = GPT.sequence, GPT.hidden, GPT.heads
    sbh, scores = s * b * h, 5 * a * s / h
    plain = ParallelConfig.of(tp=t, microbatch=b, sequence_parallel=False)
    split = ParallelConfig.of(tp=t, microbatch=b)
    table = {
        (plain, "none"): sbh * (10 + 24 / t + scores / t),
        (split, "none"): sbh / t * (34 + scores),
        (plain, "selective"): sbh * (10 + 24 / t),
        (split, "selective"): sbh * 34 / t,
        (plain, "full"): sbh * 2,
    }
    for (config, recompute), bytes_ in table.items():
        assert layer_activations(GPT, config, recompute) == pytest.approx(bytes_, rel=1e-12)


def test_attention_in_one_kernel_keeps_no_scores() -> None:
    flash, config = replace(GPT, attention="flash"), ParallelConfig.of()
    fewer = layer_activations(GPT, config) - layer_activations(flash, config)
    assert fewer == 5 * GPT.heads * GPT.sequence**2


@pytest.mark.parametrize(("zero_stage", "bytes_"), [(0, 18.0), (1, 6 + 12 / 8)])
def test_model_state_is_18_bytes_a_parameter(zero_stage: int, bytes_: float) -> None:
    memory = memory_of(GPT, ParallelConfig.of(dp=8, zero_stage=zero_stage))
    state = sum(memory.parts[part] for part in ("weights", "gradients", "optimizer"))
    # A stage counts what is on it: positions, which are few, are not.
    known = GPT.parameters - GPT.sequence * GPT.hidden
    assert state == pytest.approx(bytes_ * known, rel=1e-12)
    assert memory.total == sum(memory.parts[part] for part in MEMORY_PARTS)


def test_all_ranks_hold_the_whole_model_once() -> None:
    """Parameters of experts and of the rest over tp, pp and ep, where stages are even."""
    model = replace(MODELS["mixtral-8x22b"], batch=64)
    config = ParallelConfig.of(tp=2, pp=4, dp=8, ep=8, etp=1, zero_stage=0)
    memory = memory_of(model, config)
    layers = model.layers // config.pp
    experts = layers * model.experts * model.expert_parameters / 8
    rest = model.attention_parameters + model.dense_parameters
    held = layers * (rest / 2 + model.small_parameters) + model.embedding_parameters / 2
    assert memory.parts["weights"] == 2 * (experts + held)
    assert config.edp == 2 * 8 // 8


@pytest.mark.parametrize(("pp", "chunks", "count"), [(4, 1, 8), (2, 1, 2), (4, 2, 8), (4, 3, 12)])
def test_bubble_and_live_microbatches_are_the_simulators(pp: int, chunks: int, count: int) -> None:
    model = replace(GPT, layers=pp * chunks * 2, batch=count, vocabulary=8)
    config = ParallelConfig.of(pp=pp, virtual_stages=chunks)
    cost = step_cost(model, config, H100)
    machine = Machine(H100, CALIBRATION)
    layer = layer_cost(Job(model, config, machine, of_spec(config.spec, H100)))
    forward, backward = 2 * layer.forward_total, 2 * layer.backward_total
    schedule = one_f_one_b(pp, count) if chunks == 1 else interleaved(pp, count, num_chunks=chunks)
    ran = simulate(schedule, Times(forward, backward / 2, backward / 2))
    assert cost.parts["compute"] + cost.parts["bubble"] == pytest.approx(
        ran.makespan, rel=2e-3
    )  # 8 words of output
    assert config.in_flight(model) * chunks == pytest.approx(max(ran.peak_live), abs=chunks)


def test_the_fullest_stage_sets_the_pace() -> None:
    """126 layers on 16 stages: 7, 14 times 8, and 7; on 12 the last has 10 and the output."""
    model = MODELS["llama3-405b"]
    for pp in range(1, 20):
        first, most, last = ParallelConfig.of(pp=pp).stage_layers(model)
        assert 1 <= min(first, last) <= most == -(-126 // pp)
    even = step_cost(model, ParallelConfig.of(tp=8, pp=14, dp=8), H100)
    assert even.config.stage_layers(model) == (9, 9, 9)
    heavy = replace(model, vocabulary=8 * model.vocabulary)
    assert step_cost(heavy, even.config, H100).parts["compute"] > 1.2 * even.parts["compute"]


@pytest.mark.full
def test_groups_lie_as_a_real_grids_do() -> None:
    """In closed form, against the ranks of a plan of the same sizes and order."""
    sizes = [1, 2, 3, 4, 8]
    for tp, cp, dp, pp in itertools.product(sizes, [1, 2], sizes, [1, 2, 4]):
        for order, cluster in itertools.product(ORDERS, (CLUSTERS["h100"], CLUSTERS["gb200"])):
            config = ParallelConfig.of(tp=tp, cp=cp, pp=pp, dp=dp, order=order)
            if config.world_size > cluster.per_node and config.world_size % cluster.per_node:
                continue  # it does not fill nodes
            layout = (
                GridSpec.build(tp=tp, cp=cp, pp=pp, dp=dp, order=order)
                .resolve(config.world_size)
                .layout("dense")
            )
            found = of_spec(config.spec, cluster).spreads
            for name in ("tp", "cp", "pp", "dp_cp"):
                every = [cluster.spread(ranks) for ranks in layout.groups(*name.split("_"))]
                worst = max(every, key=lambda spread: spread[::-1])
                assert found[name] == worst, (config, name)


def test_expert_groups_lie_as_a_real_grids_do() -> None:
    for tp, dp, pp, ep, etp in itertools.product([1, 2, 4], [4, 8], [1, 2], [2, 4, 8], [1, 2]):
        if tp * dp % (ep * etp):
            continue
        config = ParallelConfig.of(tp=tp, pp=pp, dp=dp, ep=ep, etp=etp)
        spec = GridSpec.build(tp=tp, pp=pp, dp=dp, ep=ep, etp=etp).resolve(config.world_size)
        found = of_spec(config.spec, H100).spreads
        for name, axis in (("ep", "ep"), ("etp", "etp"), ("edp", "edp")):
            ranks = spec.layout("expert").group(0, axis)
            assert found[name] == H100.spread(ranks), (config, name)


def test_less_is_never_slower() -> None:
    """More computed again, slower links, a smaller share of the peak: each takes longer."""
    model, config = MODELS["llama3-70b"], ParallelConfig.of(tp=8, pp=4, dp=8)
    base = step_cost(model, config, H100).seconds
    none, some, full = (
        step_cost(model, replace(config, recompute=each), H100)
        for each in ("none", "selective", "full")
    )
    assert none.seconds < some.seconds < full.seconds
    assert none.memory.total > some.memory.total > full.memory.total
    slow = replace(CALIBRATION, gemm=(("H100-80GB", 0.3),))
    assert step_cost(model, config, H100, slow).seconds > base
    links = replace(H100, levels=tuple(replace(e, bandwidth=e.bandwidth / 4) for e in H100.levels))
    slower = step_cost(model, config, links)
    assert slower.parts["tp"] > 3 * none.parts["tp"]
    assert slower.seconds > base
    plain = step_cost(model, replace(config, overlap=False), H100)
    assert plain.parts["dp"] > none.parts["dp"]


def test_a_measured_cluster_is_taken_as_it_is() -> None:
    model, config = MODELS["llama3-70b"], ParallelConfig.of(tp=8, pp=4, dp=8)
    told = step_cost(model, config, H100)
    own = replace(H100, levels=tuple(replace(level, measured=True) for level in H100.levels))
    measured = step_cost(model, config, own)
    links = [each.value for each in why(measured) if each.name == "share of links"]
    assert links == ["1", "1"]
    assert measured.parts["tp"] == pytest.approx(0.8 * told.parts["tp"], rel=0.05)


def product(formula: str) -> float:
    """Of the two numbers of a line of memory, in bytes."""
    number, each = formula.rpartition(": ")[2].split(" · ")
    units = {"billion": 1e9, "MB": 1e6, "bytes": 1.0}
    factors = [word.split() for word in (number, each)]
    return math.prod(
        float(value.replace(",", "")) * (units[unit[0]] if unit else 1.0)
        for value, *unit in factors
    )


@pytest.mark.parametrize(
    "sizes",
    [
        {"dp": 32, "dp_replicate": 16, "zero_stage": 3}, {"dp": 8, "recompute": "full"},
        {"tp": 2, "pp": 4, "dp": 8, "zero_stage": 0}, {"pp": 8, "dp": 8, "zero_stage": 3},
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b"])
def test_products_of_memory_are_what_is_shown(name: str, sizes: dict[str, Any]) -> None:
    """Of HSDP the formula was divided by all of dp, and logits were in none."""
    experts = {"ep": 2, "etp": 1} if MODELS[name].experts else {}
    cost = step_cost(MODELS[name], ParallelConfig.of(**sizes, **experts), H100)
    lines = [each for each in why(cost) if each.value.endswith(" GB") and each.name != "memory"]
    assert sum(product(each.formula) for each in lines) == pytest.approx(cost.memory.total, 1e-5)
    for each in lines:
        assert each.value == f"{product(each.formula) / 1e9:.1f} GB"


def test_every_number_says_where_it_is_from() -> None:
    model = replace(MODELS["mixtral-8x22b"], batch=64)
    cost = step_cost(model, ParallelConfig.of(tp=2, cp=2, pp=4, dp=4, ep=8, etp=1), H100)
    found = {each.name: each for each in why(cost)}
    shown = [(each.name, float(each.value.removesuffix(" s"))) for each in why(cost)
             if each.value.endswith(" s")]  # fmt: skip
    times = ("kernels", "bubble", "tp", "cp", "ep", "sends", "dp", "optimizer")
    for part, name in zip(PARTS, times, strict=True):
        seconds = sum(value for each, value in shown if each == name)
        assert seconds == pytest.approx(cost.parts[part], abs=1.6e-2), name
        assert found[name].formula
        assert found[name].source
    kept = [(each.name, each.formula) for each in why(cost) if " · " in each.formula]
    for part, name in zip(MEMORY_PARTS, (
        "weights", "gradients", "optimizer state", "activations", "communicators", "reserved",
    ), strict=True):  # fmt: skip
        total = sum(product(formula) for each, formula in kept if each == name)
        assert total == pytest.approx(cost.memory.parts[part], rel=1e-5), name
        assert found[name].source
    assert {"gemm", "gemm_other", "flash", "memory", "network"} <= SOURCES.keys()
    shares = [each.source for each in why(cost) if each.name == "share of the peak"]
    assert shares == [SOURCES["gemm"], SOURCES["flash"]]


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"tp": 5}, "tp=5: does not divide 64 heads"),
        ({"cp": 2}, "cp=2: needs attention: flash"),
        ({"pp": 64}, "pp=64: more stages than the 48 layers"),
        ({"dp": 3}, "dp=3: times 1 sequences of a microbatch does not divide the batch of 64"),
        ({"ep": 2, "dp": 2}, "ep=2: model 'gpt' has no experts"),
        ({"pp": 4, "virtual_stages": 5}, "virtual_stages=5: needs pp above 1"),
    ],
)
def test_what_cannot_run_says_why(sizes: dict[str, int], said: str) -> None:
    assert (ParallelConfig.of(**sizes).refusal(GPT) or "").startswith(said)


def test_a_vocabulary_is_filled_up() -> None:
    odd = replace(GPT, vocabulary=50257)
    assert ParallelConfig.of(tp=8).refusal(odd) is None
    assert (ParallelConfig.of(tp=8).refusal(replace(odd, ffn=4 * 6144 + 2)) or "").startswith(
        "tp=8: does not"
    )
