"""Ways to run a step: 8 bits, kernels, dispatch, imbalance, schedules, and newer models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from commgrid.cost_model.calibration import CALIBRATION
from commgrid.cost_model.cluster import CLUSTERS
from commgrid.cost_model.collective import bus_factor
from commgrid.cost_model.config import ParallelConfig
from commgrid.cost_model.layer import Job, LayerCost, Machine, layer_cost
from commgrid.cost_model.memory import memory_of
from commgrid.cost_model.model import MODELS, Model
from commgrid.cost_model.placement import of_spec
from commgrid.cost_model.search import search
from commgrid.cost_model.step import StepCost, beyond, step_cost, traffic
from commgrid.errors import SpecError

H100 = CLUSTERS["h100"]
LLAMA = replace(MODELS["llama3-8b"], batch=64)
MIXTRAL = replace(MODELS["mixtral-8x22b"], batch=64)
QWEN = replace(MODELS["qwen3-235b-a22b"], batch=64)


def step(model: Model = LLAMA, kind: str = "h100", **config: Any) -> StepCost:
    return step_cost(model, ParallelConfig.of(**config), CLUSTERS[kind])


def layer(model: Model = LLAMA, **config: Any) -> LayerCost:
    made = ParallelConfig.of(**config)
    return layer_cost(Job(model, made, Machine(H100, CALIBRATION), of_spec(made.spec, H100)))


def test_8_bits_take_half_of_large_products_and_casts() -> None:
    """Twice the operations a second, less what casting the input costs."""
    machine = Machine(H100, CALIBRATION)
    size = 1 << 16
    plain, small = (machine.gemm(size, size, size, dtype) for dtype in ("bf16", "mxfp8"))
    cast = machine.bytes(4 * size * size)
    assert small - cast == pytest.approx(plain * 989 / (1979 * CALIBRATION.fp8), rel=5e-3)
    seconds = {dtype: step(dp=8, dtype=dtype).seconds for dtype in ("bf16", "fp8", "mxfp8")}
    assert seconds["mxfp8"] < seconds["fp8"] < seconds["bf16"]
    with pytest.raises(SpecError, match="dtype='fp8': A100-80GB of cluster 'a100' has no fp8_tf"):
        step(kind="a100", dp=8, dtype="fp8")


def test_kernels_around_the_products_take_their_time() -> None:
    seconds = {kernels: step(dp=8, kernels=kernels) for kernels in ("fused", "compiled", "eager")}
    fused, compiled, eager = (cost.seconds for cost in seconds.values())
    assert fused < compiled < eager
    kept = [cost.memory.parts["activations"] for cost in seconds.values()]
    logits = LLAMA.sequence * LLAMA.vocabulary
    assert kept[1] - kept[0] == kept[2] - kept[0] == 8 * logits


@pytest.mark.parametrize("nodes", [2, 4])
def test_a_row_for_each_choice_or_a_token_once_to_a_node(nodes: int) -> None:
    """Of k choices among u nodes u · (1 - (1 - 1/u)^k) differ; commgrid sends all k."""
    ranks = 8 * nodes
    ours, once = (
        step(QWEN, dp=ranks, ep=ranks, etp=1, dispatch=dispatch) for dispatch in ("rows", "deepep")
    )
    (rows,) = (each for each in ours.terms if each.part == "ep")
    assert rows.bytes == QWEN.sequence * QWEN.top_k * QWEN.hidden * 2
    (across,) = (each for each in once.terms if each.part == "ep" and each.spread[0] == 1)
    copies = nodes * (1 - (1 - 1 / nodes) ** QWEN.top_k)
    assert across.bytes == pytest.approx(rows.bytes * copies / QWEN.top_k)
    sent = {each.name: each.sent for each in traffic(ours)}["ep"]
    assert sent == rows.sends * rows.bytes * bus_factor("all_to_all", ranks)
    assert ours.parts["ep"] > 1.5 * once.parts["ep"]


def test_context_parallelism_is_not_free_in_a_node() -> None:
    """cp 1, 2, 4 and 8 took the same to the last digit; results of a ring's steps are merged, and
    a rank's matrices are smaller."""
    seconds = [step(cp=cp, dp=8 // cp, zero_stage=3).seconds for cp in (1, 2, 4, 8)]
    assert seconds == sorted(set(seconds))
    slow = replace(H100, levels=(replace(H100.levels[0], bandwidth=2e9), H100.levels[1]))
    long, config = replace(LLAMA, sequence=1 << 15), ParallelConfig.of(cp=4)
    uncovered = step_cost(long, config, slow).parts["cp"]
    made = layer(long, cp=4)
    assert made.collectives[0].forward == 0.0  # at 450 GB/s all is hidden
    assert uncovered > 0


def test_a_kernel_takes_some_microseconds_at_the_least() -> None:
    """Of 128 experts on one rank, with a token each, the products take that and nothing less."""
    machine = Machine(H100, CALIBRATION)
    assert machine.gemm(1, 1536, 4096) > machine.gemm(1, 8, 8) == CALIBRATION.kernel
    few = replace(QWEN, sequence=16)
    experts = 2 * 128 * 3 * CALIBRATION.kernel  # forward, by input, by weight
    made = layer(few, dispatch="deepep")
    assert made.forward + made.backward > experts


def test_an_unequal_load_is_the_fullest_ranks() -> None:
    equal, more = (layer(QWEN, dp=8, ep=8, etp=1, dispatch="deepep", imbalance=i) for i in (1, 1.2))
    assert 1.0 < more.forward / equal.forward < 1.2
    for one, two in zip(equal.collectives, more.collectives, strict=True):
        assert two.bytes == pytest.approx(1.2 * one.bytes)
    with pytest.raises(SpecError, match=r"imbalance=0.9: expected a number from 1 on"):
        ParallelConfig.of(imbalance=0.9)


def test_a_part_of_the_layers_is_computed_again() -> None:
    none, some, full = (
        step(pp=2, dp=4, recompute=how, recompute_layers=layers)
        for how, layers in (("none", None), ("full", 4), ("full", None))
    )
    assert none.seconds < some.seconds < full.seconds
    share = 4 / 16
    one, all_ = (cost.parts["compute"] for cost in (none, full))
    assert some.parts["compute"] == pytest.approx(one + share * (all_ - one))
    assert none.memory.total > some.memory.total > full.memory.total


def test_zb_h1_fills_the_bubble_with_weight_gradients() -> None:
    """Qi et al. 2023, table 2: (p - 1)(F + B + W) of 1F1B, (p - 1)(F + B - W) of ZB-H1."""
    one, two = (step(pp=4, dp=2, schedule=name) for name in ("1f1b", "zb-h1"))
    by_weight = 8 * layer(pp=4, dp=2).by_weight
    assert one.parts["bubble"] - two.parts["bubble"] == pytest.approx(3 * 2 * by_weight)
    assert one.parts["compute"] == two.parts["compute"]


def test_sends_hide_behind_another_virtual_stage() -> None:
    plain, interleaved = (step(pp=4, dp=2, virtual_stages=v) for v in (1, 4))
    (each,) = (term.each for term in plain.terms if term.part == "pp")
    assert plain.parts["pp"] == pytest.approx(2 * (32 + 3) * each)
    assert interleaved.parts["pp"] == pytest.approx(4 * 3 * each)


def test_tensor_parallelism_behind_the_products() -> None:
    shown, hidden = (step(tp=8, tp_overlap=overlap).parts["tp"] for overlap in (False, True))
    assert hidden == pytest.approx(shown / 8)


def test_deepseeks_numbers() -> None:
    """671 billion parameters, of which 37 are used for a token (arXiv 2412.19437, abstract)."""
    model = MODELS["deepseek-v3"]
    assert model.parameters / 1e9 == pytest.approx(671, rel=1e-3)
    assert model.active_parameters / 1e9 == pytest.approx(37, rel=0.02)
    more = replace(model, mtp_layers=1)
    assert more.parameters / 1e9 == pytest.approx(683, rel=3e-3)  # 14 with the shared embedding
    assert more.flops_per_token > model.flops_per_token
    whole = memory_of(replace(model, batch=64), ParallelConfig.of(dp=64, ep=64, etp=1))
    experts = (61 - 3) * 256 / 64 * model.expert_parameters
    weights = next(t for t in whole.terms if t.part == "weights" and t.what.startswith("experts"))
    assert weights.number == experts


def test_a_window_cuts_the_keys_that_a_query_sees() -> None:
    model = replace(MODELS["gpt-oss-120b"], batch=64)
    assert model.parameters / 1e9 == pytest.approx(116.8, rel=2e-3)
    assert model.seen == (2048 + 128) / 2
    assert "sliding windows" in beyond(model, ParallelConfig.of())
    assert step(model, dp=8, ep=8, etp=1).seconds < step(
        replace(model, window=0, windowed=None), dp=8, ep=8, etp=1
    ).seconds  # fmt: skip


def test_the_search_tries_to_shard_weights() -> None:
    """8 billion parameters on 8 devices: FSDP was found 4 % faster, and never proposed."""
    found = search(LLAMA, 8, H100)
    assert found.best[0].config.zero_stage == 3
    kept = search(LLAMA, 8, H100, zero_stage=1)
    assert found.best[0].seconds < kept.best[0].seconds
