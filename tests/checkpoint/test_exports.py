"""Exports to safetensors files: numbers that a dtype does not hold, scaled weights, and files."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commgrid
from commgrid import checkpoint
from commgrid.errors import CheckpointError, SpecError

safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture
def grid() -> Iterator[Any]:
    yield commgrid.initialize()
    commgrid.shutdown()


def saved(folder: Path, *numbers: Any, **more: Tensor) -> None:
    model = nn.Module()
    for name, tensor in {"w": torch.tensor(numbers), **more}.items():
        model.register_buffer(name, tensor)
    checkpoint.save(folder, 1, model, progress=False)


@pytest.mark.parametrize(
    ("numbers", "told"),
    [((1e5, 1.0), "w: 1 of 2 numbers are too large"), ((1e-9, 1.0), "w: 1 of 2 .*too small")],
)
def test_an_export_refuses_numbers_that_a_dtype_does_not_hold(
    numbers: Any, told: str, grid: Any, tmp_path: Path
) -> None:
    """They were written as infinities and zeros."""
    saved(tmp_path / "runs", *numbers, a=torch.ones(4))
    with pytest.raises(CheckpointError, match=told):
        checkpoint.export(tmp_path / "runs", tmp_path / "to", dtype=torch.float16, file_bytes=8)
    assert not any((tmp_path / "to").iterdir())
    (file, *_) = checkpoint.export(tmp_path / "runs", tmp_path / "to", dtype=torch.bfloat16)
    assert torch.equal(
        safetensors.load_file(file)["w"], torch.tensor(numbers, dtype=torch.bfloat16)
    )


def test_an_export_warns_of_few_numbers_that_vanish(grid: Any, tmp_path: Path) -> None:
    saved(tmp_path / "runs", *[1.0] * 2000, 1e-9)
    with pytest.warns(UserWarning, match="became zero: 1 of 2001 of w"):
        checkpoint.export(tmp_path / "runs", tmp_path / "to", dtype=torch.float16)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int32, torch.complex64]
)
def test_an_export_to_numbers_that_need_scales_is_refused(
    dtype: torch.dtype, grid: Any, tmp_path: Path
) -> None:
    saved(tmp_path / "runs", 1.0, 2.0)
    with pytest.raises(SpecError, match="expected one with fractions and 16 bits or more"):
        checkpoint.export(tmp_path / "runs", tmp_path / "to", dtype=dtype)


def test_an_export_leaves_scaled_weights_and_their_scales(grid: Any, tmp_path: Path) -> None:
    """The weights were converted without the scales, which were rounded."""
    eight, scale = torch.tensor([[96.0, -3.0]]).to(torch.float8_e4m3fn), torch.tensor([1 / 3])
    saved(tmp_path / "runs", 1.0, 2.0, v=eight, v_scale_inv=scale, bare=torch.tensor([7]))
    (file,) = checkpoint.export(tmp_path / "runs", tmp_path / "to", dtype=torch.bfloat16)
    found = safetensors.load_file(file)
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "w": torch.bfloat16, "v": eight.dtype, "v_scale_inv": torch.float32, "bare": torch.int64
    }  # fmt: skip
    assert torch.equal(found["v_scale_inv"], scale)
    assert torch.equal(found["v"].float(), eight.float())


def test_an_export_counts_the_tensors_bytes_in_its_index(grid: Any, tmp_path: Path) -> None:
    saved(tmp_path / "runs", 1.0, 2.0, v=torch.ones(3))
    checkpoint.export(tmp_path / "runs", tmp_path / "to", dtype=torch.float16, file_bytes=4)
    index = (tmp_path / "to" / "model.safetensors.index.json").read_text()
    assert '"total_size": 10' in index


@pytest.mark.parametrize("to", ["file", "file/below"])
def test_an_export_to_a_file_is_refused(to: str, grid: Any, tmp_path: Path) -> None:
    saved(tmp_path / "runs", 1.0)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="file is a file; expected a folder"):
        checkpoint.export(tmp_path / "runs", tmp_path / to)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.export(tmp_path / "runs", tmp_path / "a" / "new")


def test_an_export_of_no_tensor_says_of_which_folder(grid: Any, tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "runs", 1, nn.Identity(), progress=False)
    with pytest.raises(CheckpointError, match="runs has no tensor of a model to write"):
        checkpoint.export(tmp_path / "runs", tmp_path / "to")
