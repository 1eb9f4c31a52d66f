"""Bytes of a step against papers' counts, and against groups counted rank by rank."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from commgrid.cost_model.cluster import CLUSTERS
from commgrid.cost_model.config import ParallelConfig
from commgrid.cost_model.crossing import find_crossings
from commgrid.cost_model.model import find_model
from commgrid.cost_model.placement import of_spec
from commgrid.cost_model.step import StepTraffic, step_cost, traffic
from commgrid.planning.spec import GridSpec

GPT = replace(find_model("gpt-175b"), batch=64)
H100 = CLUSTERS["h100"]


def of(model: str, **config: int | str) -> dict[str, StepTraffic]:
    given = GPT if model == "gpt" else find_model(model)
    cost = step_cost(given, ParallelConfig.of(**config), H100)  # type: ignore[arg-type]
    return {each.name: each for each in traffic(cost)}


def test_tensor_parallel_bytes_are_those_of_the_paper() -> None:
    """8 b s h (t - 1) / t numbers a layer and microbatch (Narayanan et al. 2021, section 3.2)."""
    found = of("gpt", tp=8, pp=4, dp=2, microbatch=1, virtual_stages=1)["tp"]
    paper = 8 * 1 * 2048 * 12288 * 7 / 8 * 2  # of 2 bytes
    assert found.sent == pytest.approx(paper * 96 / 4 * 32)  # layers of a stage, microbatches
    assert (found.level, found.link) == (0, 0.0)
    again = of("gpt", tp=8, pp=4, dp=2, microbatch=1, recompute="full")["tp"]
    assert again.sent == pytest.approx(1.5 * found.sent)


def test_pipeline_bytes_are_those_of_the_paper() -> None:
    """b s h numbers for each microbatch, forward and backward, a v-th of the layers at a time;
    with tp each rank sends its part (section 4.1)."""
    found = of("gpt", tp=8, pp=4, dp=2, microbatch=1, virtual_stages=3)["pp"]
    assert found.sent == pytest.approx(2 * 3 * 32 * 2048 * 12288 * 2 / 8)
    # dp 2 and pp 4 over 8 nodes: a node's 8 ranks send on their own.
    assert (found.level, found.link) == (1, pytest.approx(8 * found.sent))


@pytest.mark.parametrize(("zero_stage", "each"), [(0, 8.0), (1, 6.0)])
def test_data_parallel_bytes_are_a_rings(zero_stage: int, each: float) -> None:
    """fp32 gradients all-reduced, or reduce-scattered with 16-bit weights gathered: 8 and 6 bytes
    a parameter, times (n - 1) / n."""
    found = of("gpt", tp=8, pp=4, dp=2, zero_stage=zero_stage)["dp_cp"]
    layer = 12 * 12288**2 / 8
    assert found.sent == pytest.approx(each * (24 * layer + 51200 * 12288 / 8) / 2, rel=2e-3)
    assert found.link == pytest.approx(8 * found.sent)


def test_a_group_over_two_nodes_sends_over_their_link_once() -> None:
    """tp 16 fills two nodes, so a node's link carries what one rank of one group sends."""
    found = of("gpt", tp=16, pp=4)["tp"]
    assert found.level == 1
    assert found.link == pytest.approx(found.sent)


@pytest.mark.parametrize(
    ("cluster", "per_node", "sizes", "name"),
    [
        ("gb200", None, {"tp": 8, "cp": 2, "pp": 4, "dp": 8}, "cp"),
        ("gb200", None, {"tp": 8, "cp": 2, "pp": 4, "dp": 8}, "dp_cp"),
        ("h100", 6, {"tp": 2, "cp": 2, "pp": 4, "dp": 3}, "cp"),
        ("h100", 3, {"tp": 8, "pp": 2, "dp": 3}, "tp"),
        ("h100", 8, {"tp": 4, "pp": 2, "dp": 8}, "dp_cp"),
    ],
)
def test_a_link_carries_what_the_groups_that_cross_it_send(
    cluster: str, per_node: int | None, sizes: dict[str, int], name: str
) -> None:
    """Where units are not filled, some of their ranks are in groups that stay inside."""
    runs_on = CLUSTERS[cluster] if per_node is None else CLUSTERS[cluster].with_node(per_node)
    spec = GridSpec.build(**sizes, order="tp-cp-ep-dp-pp").resolve(math.prod(sizes.values()))
    at_once = find_crossings(spec, runs_on)[name].at_once
    model = replace(find_model("llama3-70b"), batch=96)
    cost = step_cost(model, ParallelConfig.of(**sizes), runs_on)  # type: ignore[arg-type]
    for placed in (cost, replace(cost, placement=of_spec(spec, runs_on))):
        (found,) = [each for each in traffic(placed) if each.name == name]
        assert found.link == pytest.approx(at_once * found.sent)


def test_experts_send_their_tokens_there_and_back() -> None:
    """top_k copies of 16-bit tokens, to experts and from them, forward and backward."""
    model = find_model("mixtral-8x22b")
    config = ParallelConfig.of(tp=2, ep=8, etp=1, pp=4, dp=16, microbatch=1)
    found = of("mixtral-8x22b", tp=2, ep=8, etp=1, pp=4, dp=16, microbatch=1)["ep"]
    copies = model.sequence / 2 * model.top_k * model.hidden * 2
    layers, count = model.layers / 4, config.microbatches(model)
    assert found.sent == pytest.approx(4 * copies * 7 / 8 * layers * count)


def test_what_is_not_cut_sends_nothing() -> None:
    assert of("llama3-8b") == {}
    assert set(of("llama3-8b", dp=4)) == {"dp_cp"}
    assert set(of("llama3-8b", cp=4)) == {"cp", "dp_cp"}
