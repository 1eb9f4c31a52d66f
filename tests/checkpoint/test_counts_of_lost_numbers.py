"""The counts in messages on lost numbers: each number once, whichever ranks have copies of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commgrid
from commgrid import checkpoint
from commgrid.testing import run_on_ranks
from commgrid.transfer import Transfer


def holder(tensor: Tensor) -> nn.Module:
    model = nn.Module()
    model.register_buffer("w", tensor)
    return model


def told_by(folder: str, way: str, numbers: Tensor, dtype: torch.dtype) -> str:
    grid: Any = commgrid.initialize()
    source, target = holder(numbers), holder(torch.zeros(numbers.shape, dtype=dtype))
    told = ""
    try:
        if way == "load":
            checkpoint.save(folder, 1, source, progress=False)
            checkpoint.load(folder, target, progress=False)
        else:
            Transfer(source, target, source_grid=grid, target_grid=grid).run()
    except commgrid.CommGridError as error:
        told = str(error)
    commgrid.shutdown()
    return told


@pytest.mark.parametrize("way", ["load", "transfer"])
@pytest.mark.parametrize(
    ("numbers", "dtype", "said"),
    [
        (torch.tensor([7e4, 1.0, 7e4, 2.0]), torch.float16, "2 of 4 numbers are too large"),
        (torch.tensor([1e-9, 1.0, 0.5, 2.0]), torch.float16, "1 of 4 numbers are too small"),
        (torch.tensor([1e300 + 1j], dtype=torch.complex128), torch.complex64,
         "1 of 2 numbers are too large for complex64"),
    ],
    ids=["overflow", "vanish", "complex"],
)  # fmt: skip
def test_copies_count_once(
    numbers: Tensor, dtype: torch.dtype, said: str, way: str, tmp_path: Any
) -> None:
    for told in run_on_ranks(told_by, 2, str(tmp_path), way, numbers, dtype, check=way == "load"):
        assert said in told


def run_again() -> str:
    """The error of a run after one that was refused."""
    grid: Any = commgrid.initialize()
    source, target = holder(torch.full((2,), 7e4)), holder(torch.zeros(2, dtype=torch.float16))
    transfer = Transfer(source, target, source_grid=grid, target_grid=grid)
    told = ""
    for _ in range(2):
        try:
            transfer.run()
        except commgrid.TransferError as error:
            told = str(error)
    commgrid.shutdown()
    return told


def test_the_advice_of_a_refused_run_is_given_once() -> None:
    for told in run_on_ranks(run_again, 2, check=False):
        assert told.startswith("an earlier run has ended")
        assert "2 of 2 numbers are too large" in told
        assert told.count("make a new Transfer") == 1
