"""A step's numbers follow where ranks lie: any order, any ranks, compared with counting."""

from __future__ import annotations

import math
import random
import re
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from commgrid.bench import Measured
from commgrid.cli.commands.plan_model import asked, given_step
from commgrid.cost_model.calibration import CALIBRATION
from commgrid.cost_model.cluster import CLUSTERS, Cluster
from commgrid.cost_model.collective import bus_factor, collective_time
from commgrid.cost_model.collective_form import Fit, Span
from commgrid.cost_model.config import ORDERS, RECOMPUTE, ZERO_STAGES, ParallelConfig
from commgrid.cost_model.layer import Machine
from commgrid.cost_model.model import MODELS
from commgrid.cost_model.placement import of_spec
from commgrid.cost_model.search import search
from commgrid.cost_model.step import StepCost, step_cost, traffic
from commgrid.cost_model.term import PARTS
from commgrid.cost_model.why import why
from commgrid.errors import SpecError
from commgrid.planning.spec import GridSpec
from tests.benchmarks.fit_cluster import fit

H100 = CLUSTERS["h100"]


def on(*sizes: int | None) -> Cluster:
    """A cluster with units of these sizes."""
    levels = tuple(
        replace(H100.levels[0], name=f"level {place}", size=size, bandwidth=4e11 / 8**place)
        for place, size in enumerate(sizes)
    )
    return replace(H100, levels=levels)


def random_choice(draw: random.Random, world: int = 0) -> tuple[ParallelConfig, str]:
    """A config that its model can run."""
    while True:
        name = draw.choice(list(MODELS))
        pick = draw.choice
        experts = MODELS[name].experts
        sizes = {
            "tp": pick([1, 2, 4, 8, 16]), "cp": pick([1, 1, 2, 4]), "pp": pick([1, 2, 4, 8]),
            "dp": pick([1, 2, 4, 8, 16]), "ep": pick([1, 2, 4, 8]) if experts else 1,
            "etp": pick([None, 1, 2]) if experts else None,
        }  # fmt: skip
        with suppress(SpecError):  # they make no grid
            config = ParallelConfig.of(
                **sizes, order=pick(ORDERS), microbatch=pick([1, 2, 4]),
                virtual_stages=pick([1, 1, 2]), recompute=pick(RECOMPUTE),
                sequence_parallel=pick([True, False]), zero_stage=pick(ZERO_STAGES),
                overlap=pick([True, False]),
            )  # fmt: skip
            if config.refusal(MODELS[name]) is None:
                return config, name


def counted(cluster: Cluster, groups: list[list[int]]) -> tuple[int, ...]:
    """The spread of the worst group, rank by rank."""
    return max((cluster.spread(ranks) for ranks in groups), key=lambda spread: spread[::-1])


@pytest.mark.parametrize("seed", range(4))
def test_every_group_lies_as_counted(seed: int) -> None:
    """Closed form against all groups of a spec, on units that sizes do and do not fill."""
    draw = random.Random(seed)
    for _ in range(60):
        axes = {axis: draw.choice([1, 2, 3, 4, 6]) for axis in ("tp", "cp", "dp", "pp")}
        order = draw.sample(list(axes), 4)
        world = math.prod(axes.values())
        node = draw.choice([n for n in (1, 2, 3, 4, 6, 8, 12) if world % n == 0 or n >= world])
        cluster = on(node, draw.choice([2, 3, 9]), None)
        spec = GridSpec.build(**axes, order="-".join([*order, "ep"])).resolve(world)
        layout = spec.layouts["dense"]
        found = of_spec(spec, cluster)
        for name, along in {
            "tp": ["tp"],
            "cp": ["cp"],
            "pp": ["pp"],
            "dp_cp": ["dp", "cp"],
        }.items():
            groups = [list(ranks) for ranks in layout.groups(*along)]
            assert found.spreads[name] == counted(cluster, groups), (axes, order, node, name)


def test_every_start_of_a_group_counts() -> None:
    """Nodes of 400: of tp 6 ranks 0 to 5 share one, and 396 to 401 do not."""
    for world, spread in ((2400, (4, 2)), (396, (6, 1))):
        spec = GridSpec.build(tp=6).resolve(world)
        assert of_spec(spec, on(400, None)).spreads["tp"] == spread


def test_order_and_ranks_change_the_step() -> None:
    model, plain = MODELS["llama3-8b"], GridSpec.build(tp=8, dp=8).resolve(64)
    config = ParallelConfig.of(tp=8, dp=8, microbatch=8)

    def seconds(spec: GridSpec) -> float:
        return step_cost(model, replace(config, spec=spec), H100).seconds

    inside = seconds(plain)
    assert inside == step_cost(model, config, H100).seconds
    across = seconds(GridSpec.build(tp=8, dp=8, order="dp-tp-cp-ep-pp").resolve(64))
    ranks = [node * 8 + place for place in range(8) for node in range(8)]
    assert seconds(replace(plain, ranks=tuple(ranks))) == across
    expected = collective_time("all_gather", 1e9, (1, 8), H100) / collective_time(
        "all_gather", 1e9, (8, 1), H100
    )
    inside_node = of_spec(config.spec, H100)
    between = replace(inside_node, spans={**inside_node.spans, "tp": Span((1, 8), (1, 8))})
    tp = [
        sum(t.seconds for t in step_cost(model, config, H100, placement=p).terms if t.part == "tp")
        for p in (between, inside_node)
    ]
    assert across > 3 * inside
    assert tp[0] / tp[1] == pytest.approx(expected, rel=0.01)  # latencies are the rest


def test_groups_wait_for_the_unit_with_fewest_links() -> None:
    """7 ranks of a node and 1 of another send over 1 link; they were reckoned as if over 7."""
    draw, machine = random.Random(3), Machine(H100, CALIBRATION)
    link = H100.levels[1].bandwidth * CALIBRATION.network
    for _ in range(200):
        held = [draw.randint(1, 8) for _ in range(draw.randint(2, 5))]
        ranks = [8 * node + place for node, count in enumerate(held) for place in range(count)]
        span = H100.span(ranks)
        assert span.spread == (max(held), len(held))
        if len(set(held)) == 1:
            assert span.narrow == span.spread
        # All other parts come into the smallest unit over its links.
        least = (len(ranks) - min(held)) / len(ranks) * 1e9 / (link * min(held))
        seconds = machine.collective("all_gather", 1e9, span.narrow)
        assert 0.999 * least <= seconds <= 1.5 * least + 1e-3, held


def test_a_grid_on_part_of_a_node_is_slower() -> None:
    model, config = MODELS["llama3-8b"], ParallelConfig.of(tp=8, microbatch=8)
    seconds = {}
    for ranks in ("0-6,8", "0-3,8-11"):
        placed = replace(config, spec=GridSpec.build(tp=8, ranks=ranks).resolve())
        seconds[ranks] = step_cost(model, placed, H100).parts["tp"]
    assert seconds["0-6,8"] > 3 * seconds["0-3,8-11"]


def test_nodes_can_be_exchanged() -> None:
    """Numbers of nodes change neither ranks, traffic nor time."""
    draw, model, config = random.Random(1), MODELS["llama3-8b"], ParallelConfig.of(tp=4, pp=2, dp=8)
    spec = GridSpec.build(tp=4, pp=2, dp=8).resolve(64)
    expected = step_cost(model, config, H100)
    for _ in range(5):
        nodes = draw.sample(range(8), 8)
        moved = replace(spec, ranks=tuple(8 * node + place for node in nodes for place in range(8)))
        cost = step_cost(model, replace(config, spec=moved), H100)
        assert cost.seconds == expected.seconds
        assert traffic(cost) == traffic(expected)


def test_ranks_of_a_node_that_the_grid_has_not_send_nothing() -> None:
    spec = GridSpec.build(tp=8, ranks="0-56/8").resolve()
    cost = step_cost(
        MODELS["llama3-8b"],
        ParallelConfig.of(tp=8, microbatch=8),
        H100,
        placement=of_spec(spec, H100),
    )
    (tp,) = [each for each in traffic(cost) if each.name == "tp"]
    assert tp.link == tp.sent  # one group alone, which has one rank on each node


def products(cost: StepCost) -> float:
    """The sum of the products that `--why` prints."""
    total = 0.0
    for each in why(cost):
        found = re.search(r": ([\d,.e+]+) · ([\d.e+-]+) ms", each.formula)
        if found is not None:
            total += float(found[1].replace(",", "")) * float(found[2]) / 1e3
    return total


@pytest.mark.parametrize("seed", range(4))
def test_time_traffic_and_reasons_are_of_the_same_terms(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(500):
        config, name = random_choice(draw)
        cluster = draw.choice([*CLUSTERS.values(), on(6, 7, None), on(400, None)])
        size, node = config.world_size, cluster.per_node
        if size > node and size % node:
            continue  # it does not fill nodes
        cost = step_cost(MODELS[name], config, cluster)
        assert sum(cost.parts[part] for part in PARTS) == cost.seconds
        assert products(cost) == pytest.approx(cost.seconds, rel=2e-5)  # six digits are shown
        sent: dict[str, float] = {}
        for term in cost.terms:
            if term.group:
                factor = bus_factor(term.collective, term.ranks)
                sent[term.group] = sent.get(term.group, 0) + term.sends * term.bytes * factor
        assert {t.name: t.sent for t in traffic(cost)} == {k: v for k, v in sent.items() if v}


@pytest.mark.parametrize("seed", range(2))
def test_tp_out_of_a_node_is_never_faster(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(200):
        config, name = random_choice(draw)
        inside = of_spec(config.spec, H100)
        count, nodes = inside.spreads["tp"]
        spread = (1, count * nodes)
        apart = replace(inside, spans={**inside.spans, "tp": Span(spread, spread)})
        times = [
            step_cost(MODELS[name], config, H100, placement=each).seconds
            for each in (inside, apart)
        ]
        assert times[1] >= times[0] * (1 - 1e-12)  # the last digit, of sums in another order


def test_experts_links_carry_what_the_time_says() -> None:
    """Each rank of a node sends a token's copies to the other nodes itself."""
    model = MODELS["qwen3-235b-a22b"]
    config = ParallelConfig.of(tp=4, pp=8, dp=32, ep=32, etp=1, dispatch="deepep")
    assert config.refusal(model) is None
    cost = step_cost(model, config, H100)
    assert cost.placement.spreads["ep"] == (8, 4)
    across = [each for each in cost.terms if each.group == "ep" and each.spread == (1, 4)]
    (ep,) = [each for each in traffic(cost) if each.name == "ep"]
    assert ep.link == 8 * sum(each.sent for each in across)
    bandwidth = H100.levels[1].bandwidth * CALIBRATION.network
    least = sum(each.seconds for each in across) - sum(each.times for each in across) * 1e-4
    assert ep.link / (8 * bandwidth) >= 0.8 * least


def test_measured_collectives_are_not_discounted() -> None:
    fit = Fit("all_reduce", "node", "ring", latency=1e-5, bandwidth=3e11)
    measured = replace(H100, fits=(fit,))
    for size in (1e6, 1e9):
        direct = collective_time("all_reduce", size, (8, 1), measured)
        assert Machine(measured, CALIBRATION).collective("all_reduce", size, (8, 1)) == direct
        stated = collective_time("all_reduce", size, (8, 1), H100)
        assert Machine(H100, CALIBRATION).collective("all_reduce", size, (8, 1)) > stated


def test_a_fit_is_of_its_own_collective() -> None:
    """A fit of all-reduce in a node had broadcasts over nodes go level by level, 8 times slower."""
    fitted = replace(H100, fits=(Fit("all_reduce", "node", "ring", latency=1e-5, bandwidth=3e11),))
    for collective in ("broadcast", "all_gather", "all_to_all"):
        for spread in ((8, 4), (8, 1), (1, 4)):
            plain = collective_time(collective, 1e8, spread, H100)
            assert collective_time(collective, 1e8, spread, fitted) == plain
    assert collective_time("all_reduce", 1e8, (8, 4), fitted) > collective_time(
        "all_reduce", 1e8, (8, 4), H100
    )
    sends = replace(H100, fits=(Fit("send_recv", "cluster", "direct", 1e-5, 25e9),))
    for spread in ((1, 2), (8, 2)):  # a message takes one link, wherever the others are
        expected = 1e-5 + 1e8 / 25e9
        assert collective_time("send_recv", 1e8, spread, sends) == pytest.approx(expected)


def test_measured_levels_are_not_discounted() -> None:
    """A fit of one collective gives its level's numbers, which all others then take."""
    row = Measured(
        "tp", ("tp",), "all_reduce", 1 << 26, 1 << 24, 8, 1, (8, 1), 0.3455e-3, 0.34e-3, 0.35e-3
    )
    measured = fit([row, replace(row, size=1 << 20, seconds=2e-5)], H100)
    assert [level.measured for level in measured.levels] == [True, False]
    machine = Machine(measured, CALIBRATION)
    for collective in ("all_reduce", "all_gather", "broadcast"):
        direct = collective_time(collective, 1 << 26, (8, 1), measured)
        assert machine.collective(collective, 1 << 26, (8, 1)) == direct
    assert machine.collective("all_reduce", 1 << 26, (8, 1)) == pytest.approx(row.seconds)
    across = collective_time("all_reduce", 1 << 26, (1, 8), measured)
    assert machine.collective("all_reduce", 1 << 26, (1, 8)) > across  # still a datasheet's
    read = Cluster.from_dict(measured.to_dict())
    assert [level.measured for level in read.levels] == [True, False]


def test_any_order_of_a_given_grid_is_reckoned_as_it_is() -> None:
    """Stages next to each other, with experts: the two orders of a search do not matter here."""
    spec = GridSpec.build(pp=2, tp=2, ep=4, etp=1, order="pp-tp-cp-ep-dp").resolve(16)
    cost = given_step(spec, MODELS["mixtral-8x22b"], H100)
    assert cost.config.order == "pp-tp-cp-dp"
    assert cost.placement.spreads["pp"] == (2, 1)
    for order in ORDERS:
        spec = GridSpec.build(pp=2, tp=2, order=order).resolve(16)
        assert given_step(spec, MODELS["llama3-8b"], H100).config.order == order


def test_a_searched_order_is_one_that_the_grid_can_have() -> None:
    """Refused where pp groups of experts and of the rest differ."""
    given: dict[str, Any] = {"order": ORDERS[1], "pp": 2, "tp": 2, "cp": 1, "ep": 8, "etp": 1}
    with pytest.raises(SpecError, match="pp groups differ between regions"):
        search(MODELS["mixtral-8x7b"], 64, H100, **given)


def test_copies_of_shards_take_memory_and_send() -> None:
    """HSDP: over fewer ranks a rank holds more, and copies average their gradients."""
    model, found = MODELS["llama3-8b"], {}
    for replicate, shard in ((1, 32), (2, 16), (16, 2)):
        spec = GridSpec.build(dp_replicate=replicate, dp_shard=shard).resolve(32)
        found[replicate] = given_step(spec, model, H100, microbatch=1, recompute="full")
    parameters = model.parameters
    for replicate, cost in found.items():
        expected = 12 * parameters * replicate / 32
        assert cost.memory.parts["optimizer"] == pytest.approx(expected, rel=0.02)
        sent = {each.name: each.sent for each in traffic(cost)}
        assert ("dp_replicate" in sent) == (replicate > 1)
        if replicate > 1:
            each = 2 * (replicate - 1) / replicate * 4 * parameters * replicate / 32
            microbatches = cost.config.microbatches(model)
            assert sent["dp_replicate"] == pytest.approx(each * microbatches, rel=0.02)


@pytest.mark.parametrize("replicas", [1, 2])
def test_copies_of_experts_are_found_by_any_name(replicas: int) -> None:
    """torchtitan calls them efsdp and dp_replicate; they were taken for a group of one rank."""
    sizes: dict[str, Any] = {"tp": 2, "ep": 2, "dp_replicate": replicas}
    theirs = GridSpec.from_preset("torchtitan", **sizes).resolve(32)
    ours = GridSpec.build(**sizes, etp=1, dp_shard=-1).resolve(32)
    model = replace(MODELS["mixtral-8x7b"], batch=64)
    costs = [
        given_step(spec, model, H100, microbatch=2, recompute="none") for spec in (theirs, ours)
    ]
    assert costs[0].seconds == costs[1].seconds
    assert traffic(costs[0]) == traffic(costs[1])


def test_sums_are_of_one_stage() -> None:
    """Of 126 layers on 32 stages those with 4 layers have neither embedding nor output."""
    model, config = MODELS["llama3-405b"], ParallelConfig.of(tp=4, cp=4, pp=32, dp=2)
    cost = step_cost(model, config, H100)
    (weights,) = [each.number for each in cost.memory.terms if each.part == "weights"]
    found = [term for term in cost.terms if (term.part, term.group) == ("dp", "dp_cp")]
    gradients = [term.bytes for term in found if term.collective == "reduce_scatter"]
    assert gradients == [weights * config.gradient_bytes]


def test_shards_of_experts_lie_within_a_copy() -> None:
    """Collectives of experts took the spread of all their copies."""
    order = "tp-cp-ep-dp_shard-dp_replicate-pp"
    spec = GridSpec.build(tp=2, dp_shard=8, dp_replicate=4, ep=4, etp=1, order=order).resolve(64)
    dense, expert = spec.layout("dense"), spec.layout("expert")
    copies: dict[tuple[int, int], list[int]] = {}
    for rank in range(64):
        copy, at = dense.coordinate(rank)["dp_replicate"], expert.coordinate(rank)["ep"]
        copies.setdefault((copy, at), []).append(rank)
    found = of_spec(spec, H100)
    assert found.spreads["edp_shard"] == counted(H100, list(copies.values()))


def test_ranks_beyond_the_devices_are_refused() -> None:
    small = on(8, 2)
    with pytest.raises(SpecError, match="rank 31 is beyond the 16 devices"):
        of_spec(GridSpec.build(tp=8, ranks="0-31").resolve(), small)
    assert of_spec(GridSpec.build(tp=8, ranks="0-15").resolve(), small).spreads["dp_cp"] == (1, 2)


@pytest.mark.parametrize("seed", range(2))
def test_a_choice_lies_as_the_grid_that_starts_it(seed: int) -> None:
    """The search's grid, and that of the arguments which the last lines of a plan name."""
    draw = random.Random(seed)
    for _ in range(100):
        config, _ = random_choice(draw)
        spec = GridSpec.build(**asked(config)).resolve(config.world_size)
        for cluster in (H100, CLUSTERS["gb200"], on(1, 4, None)):
            if config.world_size > cluster.per_node and config.world_size % cluster.per_node:
                continue  # it does not fill nodes
            found = of_spec(spec, cluster)
            expected = of_spec(config.spec, cluster)
            for group, spread in expected.spreads.items():
                assert found.spreads.get(group, spread) == spread, (config, cluster.name, group)
            for group in found.spans.keys() & expected.spans.keys():
                assert found.load(group) == expected.load(group), (config, cluster.name, group)
