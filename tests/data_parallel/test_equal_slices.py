"""Slices that ranks have in common: a second init under one seed is refused, copies are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from commgrid import GridMismatchError
from commgrid.data_parallel import GradientReducer
from commgrid.expert import GroupedExperts, MoELayer
from commgrid.runtime.grid import HyperCommGrid
from commgrid.tensor_parallel import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    initialize_parameters,
    sharded_rng,
)


class Block(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(16, 8, dtype=dtype)
        self.c_attn = QKVParallelLinear(8, 4, dtype=dtype)
        self.c_fc = ColumnParallelLinear(8, 16, dtype=dtype)
        self.c_proj = RowParallelLinear(16, 8, dtype=dtype)


def model_of(dtype: torch.dtype = torch.float32) -> Block:
    model = Block(dtype)
    initialize_parameters(model, seed=0)
    return model


def drawn(*parameters: Tensor, seed: int = 1337) -> None:
    """As a script that seeds all ranks alike draws weights once more."""
    torch.manual_seed(seed)
    for parameter in parameters:
        nn.init.normal_(parameter, 0.0, 0.02)


def scaled_projection(model: Block) -> None:  # as nanoGPT
    torch.manual_seed(1337)
    for name, parameter in model.named_parameters():
        if name.endswith("c_proj.weight"):
            nn.init.normal_(parameter, 0.0, 0.02 / 2**0.5)


def all_linears(model: Block) -> None:  # as model.apply(self._init_weights)
    torch.manual_seed(1337)
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            nn.init.normal_(module.weight, 0.0, 0.02)  # type: ignore[arg-type]
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]


def frozen(model: Block) -> None:
    """A base whose adapters alone are trained."""
    drawn(model.c_fc.weight)  # type: ignore[arg-type]
    model.c_fc.requires_grad_(False)


SECOND_INITS: dict[str, Callable[[Block], None]] = {
    "scaled projection": scaled_projection,
    "all linears": all_linears,
    "embedding": lambda model: drawn(model.embed.weight),  # type: ignore[arg-type]
    "queries": lambda model: drawn(model.c_attn.q_weight),  # type: ignore[arg-type]
    "a bias": lambda model: drawn(model.c_fc.bias),  # type: ignore[arg-type]
    "frozen": frozen,
}


@pytest.mark.ranks(2, tp=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("init", SECOND_INITS)
def test_a_second_init_under_one_seed_is_refused(init: str, dtype: torch.dtype) -> None:
    model = model_of(dtype)
    GradientReducer(model).close()
    SECOND_INITS[init](model)
    with pytest.raises(GridMismatchError, match="same numbers on all of ranks 0-1, as after one r"):
        GradientReducer(model)


def constant(model: Block) -> None:
    for parameter in model.c_proj.parameters():
        nn.init.zeros_(parameter)
    nn.init.ones_(model.c_fc.bias)  # type: ignore[arg-type]


def copied_heads(model: Block) -> None:
    """Multi-query attention made multi-head: each rank has two copies of the one head."""
    torch.manual_seed(0)
    for parameter in (model.c_attn.kv_weight, model.c_attn.kv_bias):
        one = torch.randn(4, *parameter.shape[1:])  # of one head, of keys and values
        parameter.data.copy_(one.repeat(2, *(1 for _ in one.shape[1:])))


def in_sharded_rng(model: Block) -> None:
    torch.manual_seed(1337)
    with sharded_rng():
        for parameter in model.c_proj.parameters():
            nn.init.normal_(parameter)
    torch.manual_seed(1337)
    nn.init.normal_(model.c_proj.bias)  # type: ignore[arg-type]  # whole on each rank


def a_pattern(model: Block) -> None:
    """As the biases of gates, or states that begin with 1, 2, … in every channel."""
    with torch.no_grad():
        model.c_fc.weight.copy_(torch.arange(1.0, 9.0).log().expand(8, 8))
        model.c_fc.bias.copy_(torch.tensor([0.0, 1.0]).repeat_interleave(4))  # type: ignore[union-attr]


RIGHT: dict[str, Callable[[Block], None]] = {
    "constant": constant,
    "copied heads": copied_heads,
    "in sharded_rng": in_sharded_rng,
    "a pattern": a_pattern,
}


@pytest.mark.ranks(2, tp=2)
@pytest.mark.parametrize("init", RIGHT)
def test_slices_that_may_be_equal(init: str) -> None:
    model = model_of()
    RIGHT[init](model)
    GradientReducer(model).close()


@pytest.mark.ranks(4, tp=4)
def test_slices_that_some_ranks_have_in_common(grid: HyperCommGrid) -> None:
    """A seed by node draws rows of a projection; of two heads of keys four ranks have one each."""
    layers = nn.ModuleDict({"k": ColumnParallelLinear(8, 16), "c_proj": RowParallelLinear(16, 8)})
    initialize_parameters(layers, seed=0)
    drawn(layers["k"].weight, seed=grid.rank // 2)  # type: ignore[arg-type]
    GradientReducer(layers).close()
    drawn(layers["c_proj"].weight, seed=grid.rank // 2)  # type: ignore[arg-type]
    with pytest.raises(GridMismatchError, match=r"c_proj.weight .* on all of ranks 0-1"):
        GradientReducer(layers)


@pytest.mark.ranks(2, tp=2, ep=2, etp=1)
def test_experts_under_one_seed_are_refused() -> None:
    """Both of their weights, or the second as a scaled init draws it; four experts, or two."""
    told = r"(up|down) of shape .* same numbers on all of ranks 0-1"
    for num_experts, names in ((4, ("up", "down")), (4, ("down",)), (2, ("down",))):
        layer = MoELayer(4, 8, num_experts, 2)
        initialize_parameters(layer, seed=0)
        drawn(*(getattr(layer.experts, name) for name in names))
        with pytest.raises(GridMismatchError, match=told):
            GradientReducer(layer)


@pytest.mark.ranks(2, ep=1, etp=2)
def test_slices_of_each_expert_under_one_seed_are_refused() -> None:
    experts = GroupedExperts(4, 8, 2)
    drawn(experts.up)
    with pytest.raises(GridMismatchError, match=r"up of shape .* same numbers on all of ranks 0-1"):
        GradientReducer(experts)


@pytest.mark.ranks(2, ep=2, etp=1)
def test_experts_that_begin_as_copies() -> None:
    """Of one MLP on all ranks, one or two on each; of two MLPs; and with a second weight of 0."""
    for num_experts in (2, 4):
        experts = GroupedExperts(4, 8, num_experts)
        torch.manual_seed(0)
        for weight in experts.parameters():
            weight.data.copy_(torch.randn(weight.shape[1:]).expand_as(weight))
        before = experts.up.detach().clone()
        GradientReducer(experts).close()
        assert torch.equal(experts.up, before)
        nn.init.zeros_(experts.down)
        GradientReducer(experts).close()
    experts = GroupedExperts(4, 8, 8)
    torch.manual_seed(0)
    for weight in experts.parameters():
        weight.data.copy_(torch.randn(2, *weight.shape[1:]).repeat(2, 1, 1))
    GradientReducer(experts).close()
