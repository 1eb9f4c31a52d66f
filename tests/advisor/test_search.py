"""The best grids: against brute force, with pins, and where nothing fits."""

import itertools
import random
import re
from dataclasses import replace

import pytest

from commgrid.advisor.cluster import CLUSTERS, Cluster
from commgrid.advisor.comparison import limits, why_worse
from commgrid.advisor.config import ORDERS, RECOMPUTE, ParallelConfig
from commgrid.advisor.model import Model
from commgrid.advisor.models import MODELS
from commgrid.advisor.search import FAR, Pins, describe, tune
from commgrid.advisor.step import StepCost, Term, step_cost
from commgrid.errors import SpecError
from commgrid.planning.spec import GridSpec

H100 = CLUSTERS["h100"]
SMALL = Model("small", layers=12, hidden=4096, heads=32, vocabulary=32000, sequence=4096, batch=48,
              kv_heads=8, gated=True)  # fmt: skip
EXPERTS = replace(SMALL, name="experts", experts=8, top_k=2, expert_ffn=4096)


def brute(model: Model, world: int, cluster: Cluster, limit: float) -> dict[str, StepCost]:
    """The best step of every grid, by trying everything that a choice can be."""
    sizes = [size for size in range(1, world + 1) if world % size == 0]
    best: dict[str, StepCost] = {}
    for tp, cp, pp, ep in itertools.product(sizes, sizes, sizes, sizes if model.experts else [1]):
        if world % (tp * cp * pp):
            continue
        ways = itertools.product(
            (1, 2, 4, 8, 16), range(1, 13), RECOMPUTE, ORDERS,
            sorted({1, tp}) if model.experts else [None],
        )  # fmt: skip
        for microbatch, chunks, recompute, order, etp in ways:
            choice = ParallelConfig(
                tp=tp, cp=cp, pp=pp, dp=world // (tp * cp * pp), ep=ep, etp=etp, order=order,
                microbatch=microbatch, chunks=chunks, recompute=recompute,
            )  # fmt: skip
            if choice.refusal(model) is None:
                cost = step_cost(model, choice, cluster)
                key = describe(choice)
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
                tune(model, world, cluster, Pins(max_memory=limit))
            continue
        first = min(every.values(), key=lambda cost: cost.seconds)
        found = tune(model, world, cluster, Pins(max_memory=limit)).best[0]
        assert found.seconds == pytest.approx(first.seconds, rel=1e-9), (model, world, cluster.name)


@pytest.mark.full("model0-16-12")
@pytest.mark.parametrize(
    ("model", "world", "gb"), [(SMALL, 16, 12), (SMALL, 8, 80), (EXPERTS, 4, 60)]
)
def test_the_best_is_that_of_trying_everything(model: Model, world: int, gb: int) -> None:
    every = brute(model, world, H100, gb * 1e9)
    found = tune(model, world, H100, Pins(max_memory=gb * 1e9))
    first = min(every.values(), key=lambda cost: cost.seconds)
    assert found.best[0].seconds == pytest.approx(first.seconds, rel=1e-9)
    assert describe(found.best[0].choice) == describe(first.choice)
    seconds = [cost.seconds for cost in found.best]
    assert seconds == sorted(seconds)
    ours = {describe(cost.choice): cost for cost in found.best}
    for key, cost in every.items():
        if cost.choice.cp > 1:
            continue  # with several sequences at once it is another grid with fewer cp
        if key in ours:
            assert ours[key].seconds == pytest.approx(cost.seconds, rel=1e-9), key
        else:
            assert cost.seconds > FAR * first.seconds, key


def test_pins_are_obeyed() -> None:
    model = replace(MODELS["gpt-175b"], batch=512)
    free = tune(model, 256, H100).best[0]
    for pins in (
        Pins(tp=8), Pins(pp=4, microbatch=1), Pins(recompute="full"), Pins(order=ORDERS[1]),
        Pins(chunks=3), Pins(tp=2, cp=2, pp=16, dp=4), Pins(max_memory=60e9),
        Pins(base=ParallelConfig(shard="weights")),
    ):  # fmt: skip
        found = tune(model, 256, H100, pins).best
        for cost in found:
            for key, value in pins.given().items():
                if key == "max_memory":
                    assert cost.memory.total <= 60e9
                else:
                    assert getattr(cost.choice, key) == value
            assert cost.choice.shard == pins.base.shard
            assert cost.choice.world_size == 256
        if pins.base.shard == "optimizer":
            assert found[0].seconds >= free.seconds


def test_every_grid_that_is_found_is_a_real_one() -> None:
    model = replace(MODELS["mixtral-8x22b"], batch=256)
    for cost in tune(model, 128, H100).best:
        choice = cost.choice
        spec = GridSpec.build(
            tp=choice.tp, cp=choice.cp, pp=choice.pp, dp=choice.dp, ep=choice.ep,
            etp=choice.expert_tp, order=choice.order,
        ).resolve(128)  # fmt: skip
        expert = spec.layout("expert").shape
        assert expert["ep"] == choice.ep
        assert expert["edp"] == choice.edp
        assert cost.memory.total <= H100.device.memory


def test_the_same_again() -> None:
    first, second = (tune(MODELS["llama3-70b"], 128, H100) for _ in range(2))
    assert first == second


@pytest.mark.full
def test_the_search_is_small_at_any_size() -> None:
    """Counted, since a clock tells of the machine: 16,384 devices within seconds."""
    for name in ("llama3-405b", "mixtral-8x22b"):
        model = replace(MODELS[name], batch=2048)
        assert tune(model, 16384, H100).evaluated < 5000


def test_why_the_next_is_worse_is_told_by_its_parts() -> None:
    model = replace(MODELS["gpt-175b"], batch=1536)
    best = tune(model, 1024, H100, Pins(tp=8)).best[0]
    wide = tune(model, 1024, H100, Pins(tp=32)).best[0]
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
    costs = tune(model, 64, H100).best
    wide = next(cost for cost in costs if (cost.choice.dp, cost.choice.cp) == (1, 8))
    slower = replace(wide, terms=(*wide.terms, Term("dp", "a second more", 1, 1.0)))
    told = why_worse(slower, costs[0])
    assert "gradients and weights of dp +" in told
    assert told.endswith("(cp 8 leaves the node: 50 GB/s)")


def test_a_model_with_a_million_times_the_layers_is_refused_at_once() -> None:
    """A typing error: every number up to the layers of a stage was tried as its chunks."""
    model = replace(MODELS["llama3-8b"], layers=100_000_000)
    with pytest.raises(SpecError, match=r"no grid fits in 72 GB; .*no single change"):
        tune(model, 64, H100)


@pytest.mark.parametrize(
    ("name", "world", "pins", "said"),
    [
        ("gpt-1t", 64, Pins(), r"no grid fits in 72 GB; the nearest, .* needs 2\d\d\.\d, of which "
         r"\d+\.\d are optimizer; .*on 512 devices tp 2 · pp 128 · dp 2 fits"),
        ("gpt-175b", 64, Pins(tp=5), r"no grid is valid with tp=5, .*; without tp=5 .* fits"),
        ("gpt-175b", 64, Pins(tp=8, dp=8), r"no grid fits .*; without dp=8 .*; with shard=weights"),
        ("gpt-175b", 64, Pins(ep=2), r"no grid is valid; ep=2: model 'gpt-175b' has no experts"),
        ("gpt-175b", 64, Pins(recompute="none", max_memory=54e9), "without recompute=none .* fits"),
        ("gpt-22b", 8, Pins(max_memory=1e9), "no single change that was tried makes it fit"),
    ],
)  # fmt: skip
def test_where_nothing_fits_it_says_what_would(
    name: str, world: int, pins: Pins, said: str
) -> None:
    with pytest.raises(SpecError, match=said):
        tune(MODELS[name], world, H100, pins)


def test_pins_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(SpecError, match="tp=0: expected a whole number from 1 on"):
        Pins(tp=0)
    with pytest.raises(SpecError, match="max_memory=-1: expected bytes above 0"):
        Pins(max_memory=-1)
    with pytest.raises(SpecError, match=r"recompute='ful': .*; did you mean 'full'\?"):
        ParallelConfig(recompute="ful")
