"""What Python code can give the planner that is none: an error of the value, not of arithmetic."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from commgrid.bench import Measured
from commgrid.cost_model.cluster import CLUSTERS, Cluster, nodes_of
from commgrid.cost_model.collective import collective_time
from commgrid.cost_model.config import ParallelConfig
from commgrid.cost_model.model import MODELS, Model
from commgrid.cost_model.placement import of_spec
from commgrid.cost_model.search import fastest, search
from commgrid.cost_model.step import step_cost
from commgrid.cost_model.why import why
from commgrid.errors import SpecError
from commgrid.layout.ranks import Mode, RankSet
from commgrid.planning.spec import GridSpec
from tests.benchmarks.fit_cluster import fit

H100, SMALL = CLUSTERS["h100"], MODELS["llama3-8b"]


def measured(**changes: Any) -> Measured:
    row = {"group": "tp", "names": ("tp",), "collective": "all_reduce", "size": 1024, "count": 256,
           "ranks": 8, "groups": 1, "spread": (8, 1), "seconds": 1e-3, "least": 1e-3,
           "most": 1e-3}  # fmt: skip
    return Measured(**{**row, **changes})


WRONG: dict[str, Callable[[], object]] = {
    "gradient_bytes='x': expected a whole number": lambda: search(
        SMALL, 8, H100, gradient_bytes="x"
    ),
    "dp_replicate=0: expected a whole number": lambda: search(SMALL, 8, H100, dp_replicate=0),
    "world_size=-8: expected a whole number": lambda: search(SMALL, -8, H100),
    "world_size='8': expected a whole number": lambda: search(SMALL, "8", H100),  # type: ignore[arg-type]
    "world_size=8999999999991: expected a whole number": lambda: search(
        SMALL, 9 * 999999999999, H100
    ),
    "max_memory='80': expected bytes": lambda: search(SMALL, 8, H100, max_memory="80"),  # type: ignore[arg-type]
    "dp=2048: times 1 sequences": lambda: step_cost(SMALL, ParallelConfig.of(dp=2048), H100),
    "1024 bytes in 0 s; expected both above 0": lambda: fit([measured(seconds=0)], H100),
    "0 bytes in 0.001 s; expected both": lambda: fit([measured(size=0)], H100),
    "1024 bytes in nan s; expected both": lambda: fit([measured(seconds=math.nan)], H100),
    "config=None: expected a mapping": lambda: Model.from_dict(None),  # type: ignore[arg-type]
    "gpus_per_node='4': expected a whole number": lambda: H100.with_node("4"),  # type: ignore[arg-type]
    "expected a number above 0": lambda: Cluster.from_launcher(
        None, {"LOCAL_WORLD_SIZE": "1" * 5000}
    ),
    "layers=10": lambda: Model.from_dict({**SMALL.to_dict(), "layers": 10**13}),
    "level 'node': latency and bandwidth are not known": lambda: collective_time(
        "all_reduce", 1e6, (8, 1), nodes_of(8)
    ),
    "cluster 'nodes': its device is not known": lambda: step_cost(
        SMALL, ParallelConfig.of(tp=8), nodes_of(8)
    ),
    "open sizes (-1); call spec.resolve": lambda: of_spec(GridSpec.build(tp=2), H100),
}


@pytest.mark.parametrize("said", WRONG)
def test_it_is_refused(said: str) -> None:
    with pytest.raises(SpecError, match=re.escape(said)):
        WRONG[said]()


def test_copies_that_do_not_divide_dp_are_left_out() -> None:
    found = search(SMALL, 8, H100, dp_replicate=2, zero_stage=3)
    assert {cost.config.dp % 2 for cost in found.best} == {0}


def test_sizes_that_are_not_given_are_1() -> None:
    cost = fastest(SMALL, GridSpec.build(tp=8).resolve(8), H100)
    assert cost is not None
    assert (cost.config.tp, cost.config.world_size) == (8, 8)


@pytest.mark.parametrize(
    ("name", "sizes"), [("mixtral-8x22b", {"tp": 8, "pp": 2, "dp": 4}), ("llama3-8b", {"tp": 8})]
)
def test_the_mfu_follows_from_the_numbers_that_are_shown(name: str, sizes: dict[str, int]) -> None:
    """Its operations had three digits, which gave 40.0% for 39.9%."""
    cost = step_cost(MODELS[name], ParallelConfig.of(**sizes, recompute="full"), H100)  # type: ignore[arg-type]
    shown = {each.name: each for each in why(cost)}
    tokens = float(shown["tokens/s"].value.replace(",", ""))
    numbers = re.findall(r"[\d,.]+(?:e\+\d+)?", shown["MFU"].formula)
    each, devices, peak = (float(number.replace(",", "")) for number in numbers)
    assert f"{each * tokens / (devices * peak * 1e12):.1%}" == shown["MFU"].value


def test_stages_are_found_by_their_ranks() -> None:
    """Under a name of their own, whether their size is pp's or the same number."""
    sizes = {"etp": 1, "ep": 2, "epp": "pp", "edp": -1}
    order = "etp-ep-epp-edp"
    grids = [
        {"axes": {"tp": 2, "pp": 2, "dp": -1}, "order": "tp-pp-dp",
         "regions": {"expert": {"axes": {**sizes, **given}, "order": order}}}
        for given in ({}, {"epp": 2})
    ]  # fmt: skip
    found = [of_spec(GridSpec.from_dict(grid).resolve(32), H100) for grid in grids]
    assert found[0].spans == found[1].spans


def test_a_region_without_etp_splits_experts_over_its_tp() -> None:
    sizes = {"tp": 2, "ep": 2, "edp": -1}
    one, other = (
        {"axes": {"tp": 2, "dp": -1}, "regions": {"expert": {"axes": axes}}}
        for axes in (sizes, {"etp" if k == "tp" else k: n for k, n in sizes.items()})
    )
    found = [of_spec(GridSpec.from_dict(grid).resolve(16), H100) for grid in (one, other)]
    assert found[0].spans == found[1].spans
    assert found[0].spreads["etp"] == (2, 1)


def test_members_at_even_places_are_few_modes_or_listed() -> None:
    draw, in_modes = random.Random(0), 0
    for _ in range(2000):
        modes, stride = [], 1
        for _ in range(draw.randint(0, 3)):
            stride *= draw.choice([1, 1, 2, 3])
            modes.append(Mode(draw.randint(1, 6), stride))
            stride *= modes[-1].size
        ranks = RankSet(draw.randint(0, 5), tuple(modes))
        step, start = draw.randint(1, len(ranks)), draw.randrange(len(ranks))
        count = draw.randint(1, (len(ranks) - 1 - start) // step + 1)
        places = range(start, start + step * (count - 1) + 1, step)
        assert tuple(ranks.take(places)) == tuple(ranks[place] for place in places)
        in_modes += ranks._every(places) is not None
        assert {b - a for a, b in pairwise(ranks)} == ranks.steps
    assert in_modes > 1000
