"""The best grids: against brute force, with pins, and where nothing fits."""

import itertools
import random
import re
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from commgrid.cost_model.cluster import CLUSTERS, Cluster
from commgrid.cost_model.config import ORDERS, RECOMPUTE, ParallelConfig
from commgrid.cost_model.model import MODELS, Model
from commgrid.cost_model.search import FAR, describe, fastest, search
from commgrid.cost_model.step import StepCost, step_cost
from commgrid.cost_model.term import Term
from commgrid.cost_model.why import limits, why_worse
from commgrid.errors import SpecError
from commgrid.planning.spec import GridSpec

H100 = CLUSTERS["h100"]
SMALL = Model("small", layers=12, hidden=4096, heads=32, vocabulary=32000, sequence=4096, batch=48,
              kv_heads=8, gated=True)  # fmt: skip
EXPERTS = replace(SMALL, name="experts", experts=8, top_k=2, expert_ffn=4096)


def brute(model: Model, world: int, cluster: Cluster, limit: float) -> dict[str, StepCost]:
    """The best step of every grid, by trying everything that a config can be."""
    sizes = [size for size in range(1, world + 1) if world % size == 0]
    best: dict[str, StepCost] = {}
    for tp, cp, pp, ep in itertools.product(sizes, sizes, sizes, sizes if model.experts else [1]):
        if world % (tp * cp * pp):
            continue
        grids = []
        for etp, order in itertools.product(sorted({1, tp}) if model.experts else [None], ORDERS):
            with suppress(SpecError):  # it is no grid
                grids.append(
                    ParallelConfig.of(
                        tp=tp, cp=cp, pp=pp, dp=world // (tp * cp * pp), ep=ep, etp=etp, order=order
                    )
                )
        ways = itertools.product((1, 2, 4, 8, 16), range(1, 13), RECOMPUTE, grids, (1, 3))
        for microbatch, virtual_stages, recompute, grid, zero_stage in ways:
            config = replace(
                grid, microbatch=microbatch, virtual_stages=virtual_stages, recompute=recompute,
                zero_stage=zero_stage,
            )  # fmt: skip
            if config.refusal(model) is None:
                cost = step_cost(model, config, cluster)
                key = describe(config)
                known = best.get(key)
                if cost.memory.total <= limit and (not known or cost.seconds < known.seconds):
                    best[key] = cost
    return best


def random_model(draw: random.Random) -> Model:
    heads = draw.choice([2, 4, 6])
    experts = draw.choice([0, 0, 4])
    made = Model(
        "random", layers=draw.choice([2, 3, 4, 6]), hidden=heads * 64, heads=heads,
        vocabulary=draw.choice([1000, 50000]), sequence=draw.choice([128, 1024]),
        batch=draw.choice([4, 8, 12]), attention=draw.choice(["flash", "plain"]),
    )  # fmt: skip
    return replace(made, experts=experts, top_k=2, expert_ffn=256) if experts else made


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_that_of_trying_everything_on_small_cases(seed: int) -> None:
    """200 models on 1 to 8 devices, in much memory and in little."""
    draw = random.Random(seed)
    for _ in range(50):
        model, world = random_model(draw), draw.choice([1, 2, 3, 4, 6, 8])
        cluster = draw.choice([H100, replace(H100, levels=H100.levels[1:]), CLUSTERS["gb200"]])
        if world > cluster.per_node and world % cluster.per_node:
            continue
        limit = draw.choice([80e9, 3.5e9])
        every = brute(model, world, cluster, limit)
        if not every:
            with pytest.raises(SpecError, match=r"no grid"):
                search(model, world, cluster, max_memory=limit)
            continue
        first = min(every.values(), key=lambda cost: cost.seconds)
        found = search(model, world, cluster, max_memory=limit).best[0]
        assert found.seconds == pytest.approx(first.seconds, rel=1e-9), (model, world, cluster.name)


@pytest.mark.full("model0-16-12")
@pytest.mark.parametrize(
    ("model", "world", "gb"), [(SMALL, 16, 12), (SMALL, 8, 80), (EXPERTS, 4, 60)]
)
def test_the_best_is_that_of_trying_everything(model: Model, world: int, gb: int) -> None:
    every = brute(model, world, H100, gb * 1e9)
    found = search(model, world, H100, max_memory=gb * 1e9)
    first = min(every.values(), key=lambda cost: cost.seconds)
    assert found.best[0].seconds == pytest.approx(first.seconds, rel=1e-9)
    assert describe(found.best[0].config) == describe(first.config)
    seconds = [cost.seconds for cost in found.best]
    assert seconds == sorted(seconds)
    ours = {describe(cost.config): cost for cost in found.best}
    for key, cost in every.items():
        if key in ours:
            assert ours[key].seconds == pytest.approx(cost.seconds, rel=1e-9), key
        else:
            assert cost.seconds > FAR * first.seconds, key


def test_what_is_given_stays() -> None:
    model = replace(MODELS["gpt-175b"], batch=512)
    free = search(model, 256, H100).best[0]
    every: list[dict[str, Any]] = [
        {"tp": 8}, {"pp": 4, "microbatch": 1}, {"recompute": "full"}, {"order": ORDERS[1]},
        {"virtual_stages": 3}, {"tp": 2, "cp": 2, "pp": 16, "dp": 4}, {"max_memory": 60e9},
        {"zero_stage": 3},
    ]  # fmt: skip
    for given in every:
        found = search(model, 256, H100, **given).best
        for cost in found:
            for key, value in given.items():
                if key == "max_memory":
                    assert cost.memory.total <= 60e9
                else:
                    assert getattr(cost.config, key) == value
            assert cost.config.world_size == 256
        if "zero_stage" not in given:
            assert found[0].seconds >= free.seconds


def test_every_grid_that_is_found_is_a_real_one() -> None:
    model = replace(MODELS["mixtral-8x22b"], batch=256)
    for cost in search(model, 128, H100).best:
        config = cost.config
        spec = GridSpec.build(
            tp=config.tp, cp=config.cp, pp=config.pp, dp=config.dp, ep=config.ep,
            etp=config.expert_tp, order=config.order,
        ).resolve(128)  # fmt: skip
        expert = spec.layout("expert").shape
        assert expert["ep"] == config.ep
        assert expert["edp"] == config.edp
        assert cost.memory.total <= H100.device.memory


def test_a_dense_models_grid_is_told_without_experts() -> None:
    """torchtitan's region of experts is there for any model."""
    spec = GridSpec.from_preset("torchtitan", tp=2).resolve(16)
    cost = fastest(replace(MODELS["llama3-8b"], batch=64), spec, H100, zero_stage=3)
    assert cost is not None
    assert describe(cost.config, cost.model) == "tp 2 · dp 8"
    assert describe(cost.config) == "tp 2 · dp 8 · etp 1"


def test_the_same_again() -> None:
    first, second = (search(MODELS["llama3-70b"], 128, H100) for _ in range(2))
    assert first == second


@pytest.mark.full
def test_the_search_is_small_at_any_size() -> None:
    """Counted, since a clock tells of the machine: 16,384 devices within seconds."""
    for name in ("llama3-405b", "mixtral-8x22b"):
        model = replace(MODELS[name], batch=2048)
        assert search(model, 16384, H100).evaluated < 15_000


def test_why_the_next_is_worse_is_told_by_its_parts() -> None:
    model = replace(MODELS["gpt-175b"], batch=1536)
    best = search(model, 1024, H100, tp=8).best[0]
    wide = search(model, 1024, H100, tp=32).best[0]
    told = re.fullmatch(r"\+(.+)%: tp's collectives \+(.+)% \((.+)\)", why_worse(wide, best))
    assert told is not None
    assert told[3] == "tp 32 leaves the node: 50 GB/s"
    assert float(told[1]) == pytest.approx(100 * (wide.seconds / best.seconds - 1), abs=0.06)
    more = (wide.parts["tp"] - best.parts["tp"]) / best.seconds
    assert float(told[2]) == pytest.approx(100 * more, abs=0.06)
    assert limits(best).startswith("tp's collectives")
    assert FAR > 1


def test_why_names_the_axes_that_share_gradients() -> None:
    """It said that "dp 1" leaves the node, where gradients are summed over cp as well."""
    model = replace(MODELS["llama3-8b"], batch=7)
    costs = search(model, 64, H100).best
    wide = next(cost for cost in costs if (cost.config.dp, cost.config.cp) == (1, 8))
    slower = replace(wide, terms=(*wide.terms, Term("dp", "a second more", 1, 1.0)))
    told = why_worse(slower, costs[0])
    assert "gradients and weights of dp +" in told
    assert told.endswith("(cp 8 leaves the node: 50 GB/s)")


def test_a_model_with_a_million_times_the_layers_is_refused_at_once() -> None:
    """A typing error: every number up to the layers of a stage was tried as its chunks."""
    model = replace(MODELS["llama3-8b"], layers=100_000_000)
    with pytest.raises(SpecError, match=r"no grid fits in 72 GB; .*no single change"):
        search(model, 64, H100)


@pytest.mark.parametrize(
    ("name", "world", "given", "said"),
    [
        ("gpt-1t", 64, {"zero_stage": 1},
         r"no grid fits in 72 GB; the nearest, .* needs 2\d\d\.\d, of which "
         r"\d+\.\d are optimizer; .*on 512 devices tp 2 · pp 128 · dp 2 fits"),
        ("gpt-175b", 64, {"tp": 5}, r"no grid is valid with tp=5, .*; without tp=5 .* fits"),
        ("gpt-175b", 64, {"tp": 8, "dp": 8, "zero_stage": 1},
         r"no grid fits .*; without dp=8 .*; without zero_stage=1"),
        ("gpt-175b", 64, {"ep": 2}, r"no grid is valid; ep=2: model 'gpt-175b' has no experts"),
        ("gpt-175b", 64, {"recompute": "none", "max_memory": 54e9},
         "without recompute=none .* fits"),
        ("gpt-22b", 8, {"max_memory": 1e9}, "no single change that was tried makes it fit"),
    ],
)  # fmt: skip
def test_where_nothing_fits_it_says_what_would(
    name: str, world: int, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(SpecError, match=said):
        search(MODELS[name], world, H100, **given)


def test_what_cannot_be_given_is_refused() -> None:
    model = MODELS["gpt-175b"]
    for given, said in (
        ({"tp": 0}, "tp=0: expected a whole number from 1 on"),
        ({"max_memory": -1}, "max_memory=-1: expected bytes above 0"),
        ({"recompute": "ful"}, r"recompute='ful': .*; did you mean 'full'\?"),
        ({"zero_stage": 2}, "zero_stage=2: expected 0, 1"),
        ({"order": "dp-tp"}, "order='dp-tp': expected tp-cp-ep-dp-pp"),
        ({"microbatches": 2}, "microbatches=2: no argument of ParallelConfig.of; did you mean"),
    ):
        with pytest.raises(SpecError, match=said):
            search(model, 64, H100, **given)
