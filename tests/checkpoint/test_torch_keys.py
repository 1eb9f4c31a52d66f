"""Files of torch's own: keys of optimizer state whose types they do not tell, and dicts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import commgrid
from commgrid import checkpoint
from commgrid.testing import run_on_ranks

KEYS: dict[str, list[Any]] = {
    "numbers": [7, "mean"],
    "tuples": [("m", 0)],
    "texts": ["mean", "ema.fast", "v-1", "x y", "_7"],
}


class Keyed(torch.optim.Optimizer):
    """SGD that keeps each parameter times a number under some keys, or what `made` makes."""

    def __init__(self, params: Any, keys: list[Any], made: Any = None) -> None:
        self.keys, self.made = keys, made
        super().__init__(params, {"lr": 0.25})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"]
                for number, key in enumerate(self.keys):
                    kept = parameter.detach() * (number + 2)
                    self.state[parameter][key] = kept if self.made is None else self.made()


def plain(held: Tensor) -> Tensor:
    return held.full_tensor() if isinstance(held, DTensor) else held


def loaded(folder: str, what: str, flat: bool, steps: int) -> str:
    """The error of a load into an optimizer that has made some steps; "": the state is right."""
    grid = commgrid.initialize()
    model, keys = nn.Linear(4, 4), KEYS[what]
    nn.init.ones_(model.weight), nn.init.ones_(model.bias)
    fully_shard(model, mesh=grid.device_mesh("dp"))
    optimizer = Keyed(model.parameters(), keys)
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, state = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    other, told = nn.Linear(4, 4), ""
    fresh = Keyed(other.parameters(), keys)
    for _ in range(steps):
        fresh.step()
    try:
        checkpoint.load(folder, other, fresh, progress=False)
    except commgrid.CheckpointError as error:
        told = str(error)
    else:
        for mine, held in zip(other.parameters(), model.parameters(), strict=True):
            assert fresh.state[mine].keys() == {*keys}
            for key in keys:
                assert torch.equal(fresh.state[mine][key], plain(optimizer.state[held][key]))
    commgrid.shutdown()
    return told


@pytest.mark.parametrize("flat", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize(("what", "key"), [("numbers", "7"), ("tuples", "('m', 0)")])
def test_keys_that_are_no_texts_are_refused_until_the_optimizer_has_them(
    what: str, key: str, flat: bool, tmp_path: Any
) -> None:
    for told in run_on_ranks(loaded, 2, str(tmp_path / "fresh"), what, flat, 0):
        assert f"its optimizer state has the key {key}, a text or" in told
    assert run_on_ranks(loaded, 2, str(tmp_path / "stepped"), what, flat, 1) == ["", ""]


@pytest.mark.parametrize("flat", [False, pytest.param(True, marks=pytest.mark.full)])
def test_texts_are_loaded_into_a_fresh_optimizer(flat: bool, tmp_path: Any) -> None:
    assert run_on_ranks(loaded, 2, str(tmp_path), "texts", flat, 0) == ["", ""]


@pytest.mark.parametrize("made", [lambda: {"n": 1, "of": torch.ones(2)}, lambda: [torch.ones(2)]])
def test_dicts_that_torch_takes_apart_are_named(made: Any, tmp_path: Any) -> None:
    commgrid.initialize()
    model = nn.Linear(2, 2)
    optimizer = Keyed(model.parameters(), ["hist"], made)
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "torch")
    with pytest.raises(commgrid.CheckpointError, match="a dict or a list for weight, hist, whose"):
        checkpoint.load(tmp_path / "torch", model, optimizer, progress=False)
    checkpoint.load(tmp_path / "torch", model, progress=False)
    checkpoint.save(tmp_path / "ours", 1, model, optimizer, progress=False)
    fresh = Keyed(model.parameters(), [])
    checkpoint.load(tmp_path / "ours", model, fresh, progress=False)
    assert repr(fresh.state[model.weight]) == repr(optimizer.state[model.weight])
    commgrid.shutdown()
