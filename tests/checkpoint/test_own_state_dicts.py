"""Modules whose state_dict has more than parameters and buffers: none of it is lost in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import commgrid
from commgrid import checkpoint
from commgrid.testing import run_on_ranks
from commgrid.transfer import Transfer


class Quantized(nn.Linear):
    """As 4-bit layers: scales that only its state_dict has."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.absmax = torch.full((2,), 3.0)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = self.absmax


class Whole(nn.Linear):
    """A state_dict of its own, with an entry more."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {**super().state_dict(*args, **kwargs), "scale": 2.0}


def with_hook(public: bool) -> nn.Module:
    model = nn.Linear(2, 2)

    def hook(module: nn.Module, state: Any, prefix: str, _: Any) -> None:
        state[f"{prefix}scale"] = torch.ones(2)

    if public:
        model.register_state_dict_post_hook(hook)
    else:
        model._register_state_dict_hook(hook)
    return model


MORE = {
    "its own saving": (Quantized, "0.weight.absmax", "Quantized"),
    "its own state_dict": (lambda: Whole(2, 2), "scale", "Whole"),
    "a hook": (lambda: with_hook(public=True), "0.scale", "Linear"),
    "torch's own hook": (lambda: with_hook(public=False), "0.scale", "Linear"),
}


def refused(folder: str, what: str) -> list[str]:
    grid = commgrid.initialize()
    made = MORE[what][0]
    plain = nn.Sequential(nn.Linear(2, 2))
    checkpoint.save(folder, 1, plain, copies="first", progress=False)
    model = made() if what == "its own state_dict" else nn.Sequential(made())
    found = []
    sides = {"source_grid": grid, "target_grid": grid, "timeout": 30}
    for action in (
        lambda: checkpoint.save(folder, 2, model, progress=False),
        lambda: checkpoint.load(folder, model, progress=False),
        lambda: checkpoint.keep(2, model),
        lambda: Transfer(model, plain, **sides),
    ):
        with pytest.raises(commgrid.CommGridError) as error:
            action()
        found.append(str(error.value))
    assert checkpoint.steps(folder) == [1]
    commgrid.shutdown()
    return found


@pytest.mark.parametrize("what", MORE)
def test_a_state_dict_with_more_than_is_saved_is_refused(what: str, tmp_path: Path) -> None:
    for found in run_on_ranks(refused, 2, str(tmp_path), what):
        for told in found:
            assert f"{MORE[what][1]} is in the state_dict of {MORE[what][2]}" in told


class Counted(nn.Linear):
    """The same numbers as a buffer, and a state_dict that has what it would have anyway."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("absmax", torch.full((2,), 3.0))
        self.calls = 0

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.calls += 1
        super()._save_to_state_dict(destination, prefix, keep_vars)


def brought_back(folder: str) -> list[Any]:
    commgrid.initialize()
    found: list[Any] = []
    for number, wrap in enumerate((lambda m: m, checkpoint_wrapper, torch.compile)):
        torch.manual_seed(0)
        model = nn.Sequential(wrap(Counted()), nn.Linear(2, 2))
        model.append(model[1])  # tied modules have two names in a state_dict
        model[0].register_state_dict_pre_hook(lambda *_: None)
        checkpoint.save(folder, number, model, progress=False)
        other = nn.Sequential(Counted(), nn.Linear(2, 2))
        other.append(other[1])
        with torch.no_grad():
            other[0].absmax.zero_()
        checkpoint.load(folder, other, progress=False)
        found.append((other[0].absmax.tolist(), torch.equal(other[1].weight, model[1].weight)))
    commgrid.shutdown()
    return found


def test_buffers_and_hooks_that_add_nothing_are_saved(tmp_path: Path) -> None:
    for found in run_on_ranks(brought_back, 2, str(tmp_path)):
        assert found == [([3.0, 3.0], True)] * 3
