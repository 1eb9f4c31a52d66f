"""The router, against loops over single tokens and against megatron-core's routing functions."""

import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import commgrid
from commgrid import CommGridError, ShapeError, SpecError
from commgrid.expert import Router, Routing
from commgrid.testing import run_on_ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")


def router(seed: int = 0, **options: Any) -> Router:
    """Of 8 experts for tokens of 4 numbers, in fp64."""
    torch.manual_seed(seed)
    options = {"num_experts": 8, "top_k": 2, **options}
    return Router(4, dtype=torch.float64, **options)


def tokens(count: int = 500, seed: int = 1) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(routing: Routing) -> Tensor:
    """Weights as a table of (tokens, num_experts)."""
    empty = routing.weights.new_zeros(len(routing.experts), routing.num_experts)
    return empty.scatter(1, routing.experts, routing.weights)


# -- the choice and its weights ----------------------------------------------------------

OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "softmax": ({}, {}),
    "softmax over all": ({"softmax_over": "all"}, {"use_pre_softmax": True}),
    "top 1": ({"top_k": 1, "softmax_over": "all"}, {"topk": 1, "use_pre_softmax": True}),
    "all experts": ({"top_k": 8}, {"topk": 8}),
    "sigmoid": ({"score": "sigmoid"}, {"score_function": "sigmoid"}),
    "sigmoid, top 1": (
        {"score": "sigmoid", "top_k": 1}, {"score_function": "sigmoid", "topk": 1},
    ),
    "groups": (
        {"score": "sigmoid", "num_groups": 4, "top_groups": 2, "top_k": 4, "scale": 2.5},
        {"score_function": "sigmoid", "num_groups": 4, "group_topk": 2, "topk": 4,
         "scaling_factor": 2.5},
    ),
    "groups of softmax": (
        {"softmax_over": "all", "num_groups": 2, "top_groups": 1},
        {"use_pre_softmax": True, "num_groups": 2, "group_topk": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("which", OPTIONS)
def test_as_megatrons(which: str) -> None:
    ours, theirs = OPTIONS[which]
    made, x = router(**ours), tokens()
    logits = (x @ made.weight.t()).detach().requires_grad_()
    wanted, chosen = moe_utils.topk_routing_with_score_function(logits, **{"topk": 2, **theirs})
    found = made(x)
    # Both in fp64 but for Megatron's softmax, which is fp32: 2^-24 of weights up to 2.5.
    torch.testing.assert_close(dense(found), wanted.to(torch.float64), rtol=1e-6, atol=1e-6)
    assert torch.equal(found.counts, chosen.sum(0))
    upstream = torch.linspace(-1, 1, wanted.numel(), dtype=torch.float64).view_as(wanted)
    wanted.backward(upstream.to(wanted.dtype))
    assert logits.grad is not None
    dense(found).backward(upstream)
    assert made.weight.grad is not None
    torch.testing.assert_close(made.weight.grad, logits.grad.t() @ x, rtol=1e-5, atol=1e-5)


@given(st.integers(0, 10_000), st.sampled_from([(1, 1, 3), (2, 1, 2), (4, 2, 4), (8, 3, 3)]))
@settings(max_examples=60, deadline=None)
def test_each_token_gets_its_best_experts(seed: int, groups: tuple[int, int, int]) -> None:
    num_groups, top_groups, top_k = groups
    made = router(seed, num_groups=num_groups, top_groups=top_groups, top_k=top_k)
    x = tokens(6, seed)
    found = made(x)
    size, per_group = 8 // num_groups, top_k // top_groups
    for token, row in enumerate((x @ made.weight.t()).tolist()):
        parts = [row[g * size : (g + 1) * size] for g in range(num_groups)]
        rated = [sum(sorted(part, reverse=True)[:per_group]) for part in parts]
        best = sorted(range(num_groups), key=lambda g: -rated[g])[:top_groups]
        allowed = [g * size + i for g in best for i in range(size)]
        expected = sorted(allowed, key=lambda expert: -row[expert])[:top_k]
        assert found.experts[token].tolist() == expected
        exps = [math.exp(row[expert]) for expert in expected]
        shares = [value / sum(exps) for value in exps]
        assert found.weights[token].tolist() == pytest.approx(shares, rel=1e-12)


def test_no_tokens() -> None:
    for options in ({}, {"capacity_factor": 1.0, "aux_loss": 0.1, "z_loss": 0.1}):
        found = router(**options)(tokens(0))
        assert found.experts.shape == found.weights.shape == (0, 2)
        assert found.counts.tolist() == [0] * 8
        found.weights.sum().backward()


# -- capacity ----------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.sampled_from([0.25, 0.5, 1.0, 1.25, 8.0]), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_an_expert_takes_those_that_weigh_most(seed: int, factor: float, top_k: int) -> None:
    options, x = {"top_k": top_k, "softmax_over": "all"}, tokens(12, seed)
    made = router(seed, capacity_factor=factor, **options)
    free = router(seed, **options)(x)
    found = made(x)
    assert found.capacity == max(math.ceil(12 * top_k / 8 * factor), 1)
    assert found.kept is not None
    for expert in range(8):
        wishes = [
            (-free.weights[t, k].item(), t, k)
            for t in range(12) for k in range(top_k) if free.experts[t, k] == expert
        ]  # fmt: skip
        for place, (_, t, k) in enumerate(sorted(wishes)):
            assert bool(found.kept[t, k]) == (place < found.capacity)
    assert torch.equal(found.weights, free.weights * found.kept)
    assert found.counts.max() <= found.capacity
    assert found.counts.sum() == found.kept.sum()


def test_of_equal_weights_the_earlier_tokens_are_taken() -> None:
    made = router(capacity_factor=0.5, top_k=1, num_experts=2, softmax_over="all")
    found = made(tokens(1).expand(8, 4))
    assert found.capacity == 2
    assert found.kept is not None
    assert found.kept.flatten().tolist() == [True, True] + [False] * 6


# -- balance -----------------------------------------------------------------------------


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_auxiliary_losses_are_in_the_gradients(score: str) -> None:
    made, x = router(score=score, aux_loss=0.3, z_loss=0.2), tokens(16).requires_grad_()
    upstream = torch.linspace(-1, 1, 32, dtype=torch.float64).view(16, 2)
    found = made(x)
    (found.weights * upstream).sum().backward()
    weight, gradient = made.weight.detach().clone().requires_grad_(), x.grad
    plain = x.detach().clone().requires_grad_()
    logits = plain @ weight.t()
    scores = torch.sigmoid(logits) if score == "sigmoid" else logits.softmax(-1)
    chosen = scores.gather(1, found.experts)
    weights = (
        chosen / chosen.sum(-1, keepdim=True) if score == "sigmoid"
        else logits.gather(1, found.experts).softmax(-1)
    )  # fmt: skip
    aux = moe_utils.switch_load_balancing_loss_func(
        scores / scores.sum(-1, keepdim=True), found.counts, 16, 2, 8, 0.3
    )  # fmt: skip
    z = 0.2 * logits.logsumexp(-1).square().mean()
    torch.testing.assert_close(found.losses["aux_loss"], aux.detach())
    torch.testing.assert_close(found.losses["z_loss"], z.detach())
    ((weights * upstream).sum() + aux + z).backward()
    torch.testing.assert_close(made.weight.grad, weight.grad, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient, plain.grad, rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        assert not made(x).losses


def test_the_bias_moves_the_choice_and_not_the_weights() -> None:
    made, x = router(score="sigmoid", bias_rate=0.5), tokens(64)
    assert made.bias is not None
    made.bias[3] = 10.0
    found = made(x)
    assert (found.experts[:, 0] == 3).all()
    scores = torch.sigmoid(x @ made.weight.t())
    chosen = scores.gather(1, found.experts)
    torch.testing.assert_close(found.weights, chosen / chosen.sum(-1, keepdim=True))


def lopsided(seed: int) -> Tensor:
    """Tokens that have much in common, and so go to few experts."""
    return tokens(256, seed) / 2 + 1


def balanced(rank: int) -> tuple[list[float], float, float]:
    """The bias after its first update, and the load's spread before and after many."""
    commgrid.initialize()
    made = router(score="sigmoid", bias_rate=0.01)
    spreads = []
    for step in range(300):
        load = made(lopsided(2 * step + rank)).counts.double()
        spreads.append((load.std() / load.mean()).item())
        made.update_bias("dp_cp")
        if step == 0:
            assert made.bias is not None
            first = made.bias.tolist()
        assert not made.seen.any()
    return first, sum(spreads[:20]), sum(spreads[-20:])


def test_the_bias_evens_out_the_load_of_all_ranks() -> None:
    (first, before, after), (other, *_) = run_on_ranks(balanced, 2, per_rank=[(0,), (1,)])
    assert first == other
    made = router(score="sigmoid")
    load = sum(made(lopsided(rank)).counts for rank in (0, 1))
    assert isinstance(load, Tensor)
    assert first == (0.01 * torch.sign(load.double().mean() - load)).tolist()
    assert after < before / 2


# -- what is wrong -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"top_k": 9}, "top_k=9 of num_experts=8: expected 1 to 8"),
        ({"top_k": 0}, "top_k=0 of num_experts=8"),
        ({"score": "sigmoit"}, "score='sigmoit': expected one of .*did you mean 'sigmoid'"),
        ({"softmax_over": "some"}, "softmax_over='some': expected one of chosen, all"),
        ({"capacity_factor": 0.0}, "capacity_factor=0.0: expected above 0, such as 1.25, or None"),
        ({"capacity_factor": math.nan}, "capacity_factor=nan: expected above 0"),
        ({"num_groups": 0}, "num_groups=0: expected 1 or more"),
        ({"aux_loss": math.nan}, "aux_loss=nan: expected 0 or more"),
        ({"bias_rate": -1.0}, "bias_rate=-1.0: expected 0 or more"),
        ({"scale": 0.0}, "scale=0.0: expected above 0"),
        ({"num_groups": 3}, "num_groups=3, top_groups=1: expected a divisor of num_experts=8"),
        ({"num_groups": 2, "top_groups": 3}, "top_groups=3: expected .* 1 to 2"),
        ({"num_groups": 8, "top_k": 2}, "top_k=2 cannot be chosen from top_groups=1 groups of 1"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        router(**options)


def test_tokens_that_do_not_fit() -> None:
    made = router()
    with pytest.raises(ShapeError, match=r"tokens of shape \(3, 5\); expected \(tokens, 4\)"):
        made(torch.zeros(3, 5, dtype=torch.float64))
    x = tokens(5)
    assert made(x).finite
    x[3, 1] = math.nan
    assert not made(x).finite
    with pytest.raises(CommGridError, match="made without a bias; give bias_rate="):
        made.update_bias()
