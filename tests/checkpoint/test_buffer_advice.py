"""Advice in errors on buffers that ranks cut unevenly, or had of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import commgrid
from commgrid import checkpoint
from commgrid.parameters import mark_buffers
from commgrid.testing import run_on_ranks


def holder(tensor: Tensor) -> nn.Module:
    model = nn.Module()
    model.register_buffer("t", tensor)
    return model


def told_of(action: Any, *given: Any) -> str:
    try:
        action(*given, progress=False)
    except commgrid.CommGridError as error:
        return str(error)
    return ""


def cut(folder: str, sizes: tuple[int, ...]) -> str:
    grid = commgrid.initialize(tp=2)
    model = holder(torch.ones(2, sizes[grid.rank]))
    mark_buffers(model, cut={"tp": 1})
    told = told_of(checkpoint.save, folder, 1, model)
    commgrid.shutdown()
    return told


def test_uneven_slices_of_a_buffer_are_named(tmp_path: Any) -> None:
    for told in run_on_ranks(cut, 2, str(tmp_path), (3, 2)):
        assert "model.t" in told
        assert (
            "slices have one length on all ranks, and these have shapes (2, 2) and (2, 3)" in told
        )
    assert run_on_ranks(cut, 2, str(tmp_path), (3, 3)) == [""] * 2


def own(folder: str) -> list[str]:
    grid = commgrid.initialize()
    model = holder(torch.full((3,), float(grid.rank)))
    mark_buffers(model, own="dp", merge="mean")
    checkpoint.save(folder, 1, model, progress=False)
    told = [told_of(checkpoint.load, folder, holder(torch.zeros(3)))]
    told.append(told_of(checkpoint.load, folder, holder(torch.zeros(4, 5))))
    told.append(told_of(checkpoint.load, folder, model))
    commgrid.shutdown()
    return told


def test_buffers_that_ranks_had_of_their_own_are_named(tmp_path: Any) -> None:
    for unmarked, other, right in run_on_ranks(own, 2, str(tmp_path)):
        assert "model.t is (2, 3), here (3,); if 2 ranks each had a buffer" in unmarked
        assert "mark_buffers(…, own=…, merge=…)" in unmarked
        assert "mark_buffers" not in other
        assert not right
