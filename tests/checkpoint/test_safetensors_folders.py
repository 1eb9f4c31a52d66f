"""Folders of safetensors files that do not belong together, and indexes that are none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commgrid
from commgrid import checkpoint
from commgrid.errors import CheckpointError

safetensors = pytest.importorskip("safetensors.torch")
INDEX = "model.safetensors.index.json"


@pytest.fixture
def grid() -> Iterator[Any]:
    yield commgrid.initialize()
    commgrid.shutdown()


def write(path: Path, number: float = 1.0, **more: Tensor) -> str:
    path.parent.mkdir(exist_ok=True)
    tensors = more or {"weight": torch.full((2, 2), number)}
    safetensors.save_file(tensors, path)
    return path.name


def loaded(folder: Path, **options: Any) -> float:
    model = nn.Linear(2, 2, bias=False)
    checkpoint.load(folder, model, prefix="", progress=False, **options)
    return float(model.weight.detach().sum())


def refused(folder: Path, told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        loaded(folder)


def index(folder: Path, said: Any, name: str = INDEX) -> None:
    (folder / name).write_text(said if isinstance(said, str) else json.dumps(said))


def test_a_tensor_in_two_files_is_told(grid: Any, tmp_path: Path) -> None:
    """It was said to be a file that is missing."""
    write(tmp_path / "model.safetensors")
    write(tmp_path / "consolidated.safetensors", 2.0)
    refused(tmp_path, r"weight is in consolidated\.safetensors and model\.safetensors of ")
    index(tmp_path, {"weight_map": {"weight": "model.safetensors"}})
    assert loaded(tmp_path) == 4.0


def test_scaled_weights_in_two_files_are_told(grid: Any, tmp_path: Path) -> None:
    """The last file's were taken."""
    eight = torch.full((2, 2), 3.0).to(torch.float8_e4m3fn)
    tensors = {"weight": eight, "weight_scale_inv": torch.full((1, 1), 2.0)}
    write(tmp_path / "model.safetensors", **tensors)
    assert loaded(tmp_path) == 24.0
    write(tmp_path / "other.safetensors", **tensors)
    refused(tmp_path, r"is in model\.safetensors and other\.safetensors of ")


def test_two_indexes_of_one_tensor_are_told(grid: Any, tmp_path: Path) -> None:
    for kind in ("model", "model.fp16"):
        name = write(tmp_path / f"{kind}-1.safetensors")
        index(tmp_path, {"weight_map": {"weight": name}}, f"{kind}.safetensors.index.json")
    refused(tmp_path, r"weight is in model-1\.safetensors and model\.fp16-1\.safetensors")
    (tmp_path / "model.fp16.safetensors.index.json").unlink()
    assert loaded(tmp_path) == 4.0


def test_the_index_that_lists_a_missing_file_is_named(grid: Any, tmp_path: Path) -> None:
    name = write(tmp_path / "model-1.safetensors")
    index(tmp_path, {"weight_map": {"weight": name}})
    index(tmp_path, {"weight_map": {"v": "v.safetensors"}}, "v.safetensors.index.json")
    refused(tmp_path, r"no v\.safetensors, which v\.safetensors\.index\.json lists")


@pytest.mark.parametrize("said", ["{}", "[]", '{"weight_map": ["a"]}', '{"weight_map": {"w": 1}}'])
def test_an_index_without_files_is_named(said: str, grid: Any, tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors")
    index(tmp_path, said)
    refused(tmp_path, rf"{INDEX} has no weight_map")


def test_an_index_that_was_cut_off_is_named(grid: Any, tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors")
    index(tmp_path, '{"weight_map"')
    refused(tmp_path, rf"{INDEX} is no JSON")


@pytest.mark.parametrize("absolute", [True, False])
def test_an_index_names_no_file_elsewhere(absolute: bool, grid: Any, tmp_path: Path) -> None:
    folder, other = tmp_path / "in", tmp_path / "elsewhere.safetensors"
    write(folder / "model.safetensors")
    write(other)
    index(folder, {"weight_map": {"weight": str(other) if absolute else f"../{other.name}"}})
    refused(folder, rf"{INDEX} names a file outside of the folder")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({}, ""),
        ({"quantization_config": None}, ""),
        ({"quantization_config": {"weight_block_size": None}}, ""),
        ({"quantization_config": {"weight_block_size": [64, 64]}}, ""),
        (
            {"quantization_config": {"weight_block_size": 128}},
            "weight_block_size=128; expected two",
        ),
        ({"quantization_config": {"weight_block_size": [0, 0]}}, "expected two lengths"),
        ({"quantization_config": "fp8"}, "expected a mapping"),
        ([], "expected a mapping"),
    ],
)
def test_a_config_says_the_side_of_blocks_or_is_named(
    config: Any, told: str, grid: Any, tmp_path: Path
) -> None:
    eight = torch.ones(256, 256).to(torch.float8_e4m3fn)
    side = 64 if "[64" in str(config) else 128
    scales = torch.full((256 // side, 256 // side), 2.0)
    write(tmp_path / "model.safetensors", weight=eight, weight_scale_inv=scales)
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = nn.Linear(256, 256, bias=False)
    if told:
        with pytest.raises(CheckpointError, match=f"config.json has .*{told}"):
            checkpoint.load(tmp_path, model, prefix="", progress=False)
        return
    checkpoint.load(tmp_path, model, prefix="", progress=False)
    assert model.weight.unique().tolist() == [2.0]
