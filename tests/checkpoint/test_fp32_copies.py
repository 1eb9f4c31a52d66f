"""FP32 copies of parameters: an optimizer without copies gets its own state alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commgrid
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.testing import run_on_ranks
from tests.ways import bring

KINDS: dict[str, list[str]] = {"no copy of its own": ["mean"], "its own": ["master", "mean"]}


class Keeper(torch.optim.Optimizer):
    """SGD that keeps numbers made of each parameter under some keys."""

    def __init__(self, params: Any, keys: list[str]) -> None:
        self.keys = keys
        super().__init__(params, {"lr": 0.25})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= 1 / 3
                for number, key in enumerate(self.keys):
                    self.state[parameter][key] = parameter.detach().float() * 3 + number


def plain_state(way: str, folder: str, keys: list[str], several: bool) -> bool:
    """Whether a plain optimizer has the weights and the state that a sharded one kept."""
    commgrid.initialize()
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    inner: Any = Keeper
    reducer = GradientReducer(model, shard=True)
    sharded = ShardedOptimizer(reducer, inner, element_wise=True, keys=keys)
    model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
    reducer.finish()
    before = model.weight.detach().float()
    sharded.step()
    sharded.wait()
    right = {key: (before - 1 / 3) * 3 + number for number, key in enumerate(keys)}
    other = nn.Linear(64, 64, bias=False)
    fresh = Keeper(other.parameters(), keys)
    mine: Any = [sharded] if several else sharded
    theirs: Any = [fresh] if several else fresh
    bring(way, folder, (model, mine), (other, theirs))
    found: dict[Any, Tensor] = fresh.state[other.weight]
    assert found.keys() == right.keys(), found.keys()
    commgrid.shutdown()
    same = all(torch.equal(found[key], right[key]) for key in keys)
    return same and torch.equal(other.weight.detach(), before - 1 / 3)


FULL = pytest.mark.full


@pytest.mark.parametrize("way", ["load", "transfer", pytest.param("recover", marks=FULL)])
@pytest.mark.parametrize("kind", ["no copy of its own", pytest.param("its own", marks=FULL)])
def test_a_plain_optimizer_gets_no_fp32_copy_as_state(kind: str, way: str, tmp_path: Any) -> None:
    several = kind == "its own"
    assert all(run_on_ranks(plain_state, 2, way, str(tmp_path), KINDS[kind], several))
