"""Packed dtypes, and state of a rank's own slice: refused by name, with what to keep instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import commgrid
from commgrid import checkpoint
from commgrid.testing import run_on_ranks
from commgrid.transfer import Transfer

FOUR: Any = getattr(torch, "float4_e2m1fn_x2", None)


def with_table(data: Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("table", data)
    return model


@pytest.mark.skipif(FOUR is None, reason="this torch has no packed floats")
def test_packed_floats_are_refused_before_a_save(tmp_path: Path) -> None:
    grid = commgrid.initialize()
    sides: dict[str, Any] = {"source_grid": grid, "target_grid": grid}
    packed = torch.arange(6, dtype=torch.uint8).view(2, 3)
    model, other = with_table(packed.view(FOUR)), with_table(torch.zeros_like(packed).view(FOUR))
    said = r"table of shape \(2, 3\) has no plain numbers: .*two numbers a byte; keep it as"
    for call in (
        lambda: checkpoint.save(tmp_path, 1, model, progress=False),
        lambda: checkpoint.keep(1, model),
        lambda: Transfer(model, other, **sides, timeout=30),
    ):
        with pytest.raises(commgrid.CommGridError, match=said):
            call()
    assert checkpoint.steps(tmp_path) == []
    model, other = with_table(packed), with_table(torch.zeros_like(packed))
    checkpoint.save(tmp_path, 1, model, progress=False)
    checkpoint.load(tmp_path, other, progress=False)
    assert torch.equal(other.table.view(FOUR).view(torch.uint8), packed)
    commgrid.shutdown()


class Doubled(torch.optim.Optimizer):
    """Keeps twice each parameter, as a DTensor or as this rank's slice alone."""

    def __init__(self, params: Any, local: bool) -> None:
        self.local = local
        super().__init__(params, {"lr": 0.25})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = parameter.detach() * 2
                self.state[parameter]["twice"] = kept.to_local() if self.local else kept


def saved(folder: str, local: bool) -> str:
    grid = commgrid.initialize()
    model = nn.Linear(8, 4)
    nn.init.ones_(model.weight), nn.init.ones_(model.bias)
    fully_shard(model, mesh=grid.device_mesh("dp"))
    optimizer = Doubled(model.parameters(), local)
    optimizer.step()
    told = ""
    try:
        checkpoint.save(folder, 1, model, optimizer, progress=False)
        fresh = Doubled(model.parameters(), local)
        checkpoint.load(folder, model, fresh, progress=False)
        for parameter in model.parameters():
            assert torch.equal(
                fresh.state[parameter]["twice"].full_tensor(), parameter.full_tensor() * 2
            )
    except commgrid.CommGridError as error:
        told = str(error)
    commgrid.shutdown()
    return told


def test_state_of_a_ranks_slice_is_to_be_a_dtensor(tmp_path: Path) -> None:
    for told in run_on_ranks(saved, 2, str(tmp_path / "local"), True):
        assert "weight: the optimizer's 'twice' of shape (2, 8) belongs to a part of shape" in told
        assert "with FSDP2 a DTensor, as of zeros_like(parameter)" in told
    assert run_on_ranks(saved, 2, str(tmp_path / "right"), False) == ["", ""]
