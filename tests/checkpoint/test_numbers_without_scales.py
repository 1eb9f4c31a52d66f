"""Numbers of eight bits and the scales beside them: multiplied, moved together, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commgrid
from commgrid import checkpoint
from commgrid.resharding.dtypes import scales_beside
from commgrid.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from commgrid.testing import run_on_ranks
from commgrid.transfer import Transfer

EIGHT = torch.float8_e4m3fn
NUMBERS = torch.tensor([[96.0, -3.0], [1.0, 2.0]]).to(EIGHT)


def holder(**tensors: Tensor) -> nn.Module:
    model = nn.Module()
    for name, tensor in tensors.items():
        model.register_buffer(name, tensor.clone())
    return model


def moved(folder: Path, way: str, source: nn.Module, target: nn.Module, only: list[str]) -> None:
    """Move what the target has, and leave the rest of the source alone."""
    grid = commgrid.get_grid()
    if way == "load":
        checkpoint.save(folder, 1, source, progress=False)
        checkpoint.load(folder, target, strict=False, progress=False)
    else:
        grids: Any = {"source_grid": grid, "target_grid": grid}
        Transfer(source, target, only=only, **grids).run()


@pytest.mark.parametrize("way", ["load", "transfer"])
@pytest.mark.parametrize("scale", ["w_scale_inv", "w_scale", "scale_w", "w_scales", "input_scale"])
def test_wider_numbers_without_their_scale_are_refused(
    way: str, scale: str, tmp_path: Path
) -> None:
    commgrid.initialize()
    source = holder(w=NUMBERS, **{scale: torch.tensor([1e-4])})
    target = holder(w=torch.full((2, 2), 7.0, dtype=torch.bfloat16))
    with pytest.raises(commgrid.CommGridError, match=rf"\bw\b.*{scale}"):
        moved(tmp_path, way, source, target, ["w"])
    assert target.w.unique().tolist() == [7.0]
    commgrid.shutdown()


@pytest.mark.parametrize("way", ["load", "transfer"])
@pytest.mark.parametrize(
    ("beside", "into"),
    [
        ({}, {"w": torch.bfloat16}),
        ({"norm": torch.ones(2)}, {"w": torch.bfloat16}),
        ({"v_scale": torch.ones(2), "v": torch.ones(2)}, {"w": torch.bfloat16}),
        ({"w_scale": torch.ones(2)}, {"w": EIGHT}),
        ({"w_scale": torch.ones(2)}, {"w": torch.bfloat16, "w_scale": torch.float32}),
        ({"w_scale": torch.ones(2), "input_scale": torch.ones(2)},
         {"w": torch.bfloat16, "w_scale": torch.float32}),
    ],
    ids=["alone", "norm", "of another", "same dtype", "both", "of activations"],
)  # fmt: skip
def test_numbers_that_lose_no_scale_are_moved(
    way: str, beside: dict[str, Tensor], into: dict[str, torch.dtype], tmp_path: Path
) -> None:
    commgrid.initialize()
    source = holder(w=NUMBERS, **beside)
    shapes = {"w": (2, 2)}
    target = holder(**{k: torch.zeros(shapes.get(k, (2,))).to(d) for k, d in into.items()})
    moved(tmp_path, way, source, target, [*into])
    assert torch.equal(target.w.float(), NUMBERS.float())
    commgrid.shutdown()


def test_a_scale_that_rename_drops_is_not_taken(tmp_path: Path) -> None:
    commgrid.initialize()
    grid = commgrid.get_grid()
    source = holder(w=NUMBERS, w_scale=torch.ones(1))
    target = holder(w=torch.zeros(2, 2))
    rename = {"w": "w", "w_scale": []}
    checkpoint.save(tmp_path, 1, source, progress=False)
    with pytest.raises(commgrid.CheckpointError, match="w_scale"):
        checkpoint.load(tmp_path, target, rename=rename, progress=False)
    with pytest.raises(commgrid.TransferError, match="w_scale"):
        Transfer(source, target, rename=rename, source_grid=grid, target_grid=grid)
    commgrid.shutdown()


def test_a_conversion_that_multiplies_needs_no_scale_beside_it() -> None:
    commgrid.initialize()
    grid = commgrid.get_grid()
    source = holder(w=NUMBERS, w_scale=torch.full((1,), 0.5))
    target = holder(w=torch.zeros(2, 2))

    def products(name: str, tensor: Tensor) -> Tensor:
        return tensor.float() * 0.5

    Transfer(source, target, only=["w"], convert=products, source_grid=grid, target_grid=grid).run()
    assert torch.equal(target.w, NUMBERS.float() / 2)
    commgrid.shutdown()


def loads_products(folder: str, scale: Tensor, name: str) -> bool:
    """Rows of a weight, cut over tp, are those of the product."""
    safetensors = pytest.importorskip("safetensors.torch")
    grid = commgrid.initialize(tp=2)
    torch.manual_seed(0)
    numbers = torch.randn(4, 6).to(EIGHT)
    if grid.rank == 0:
        stored = {"weight": numbers, name: scale, "input_scale": torch.ones(1)}
        safetensors.save_file(stored, f"{folder}/model.safetensors")
    torch.distributed.barrier()
    full = numbers.float() * scale.reshape(-1, 1) if scale.numel() > 1 else numbers.float() * scale
    right = []
    for dtype in (torch.float32, torch.bfloat16):
        rows = ColumnParallelLinear(6, 4, bias=False).to(dtype)
        columns = RowParallelLinear(6, 4, bias=False).to(dtype)
        for layer, dim in ((rows, 0), (columns, 1)):
            checkpoint.load(folder, layer, prefix="", strict=False, progress=False)
            right.append(torch.equal(layer.weight, full.chunk(2, dim)[grid.rank].to(dtype)))
    commgrid.shutdown()
    return all(right)


@pytest.mark.parametrize(
    ("scale", "name"),
    [
        (torch.tensor([0.01]), "weight_scale"),
        (torch.tensor(0.01), "weight_scale_inv"),
        (torch.arange(1.0, 5.0), "weight_scale"),
        (torch.arange(1.0, 5.0).view(4, 1), "weight_scale"),
    ],
    ids=["one", "inverse", "rows", "columns"],
)
def test_a_scale_of_one_number_or_one_a_row_is_multiplied(
    scale: Tensor, name: str, tmp_path: Path
) -> None:
    assert all(run_on_ranks(loads_products, 2, str(tmp_path), scale, name))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("scale_weight", EIGHT), ("input_scale", EIGHT), ("weight_scale", torch.int8)],
)
def test_a_scale_of_a_form_that_is_not_known_is_refused_at_once(
    name: str, dtype: torch.dtype, strict: bool, tmp_path: Path
) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    commgrid.initialize()
    stored = {"weight": torch.full((4, 4), 96.0).to(dtype), name: torch.tensor(0.01)}
    safetensors.save_file(stored, tmp_path / "model.safetensors")
    model = nn.Linear(4, 4, bias=False)
    with pytest.raises(commgrid.CheckpointError, match=f"weight is .*multiplied by {name}"):
        checkpoint.load(tmp_path, model, prefix="", strict=strict, progress=False)
    commgrid.shutdown()


def test_scales_belong_to_the_tensor_that_they_name() -> None:
    fp8, wide = "float8_e5m2", "float32"
    assert scales_beside({"a": fp8, "scale": wide, "b": "int8"}) == {"a": ["scale"]}
    assert scales_beside({"m.w": fp8, "m.w.scale": wide}) == {"m.w": ["m.w.scale"]}
    assert scales_beside({"m.w": fp8, "n.w_scale": wide, "m.scale": fp8}) == {"m.w": ["m.scale"]}
    assert scales_beside({"gate_up": fp8, "up": fp8, "gate_up_scale": wide}) == {
        "gate_up": ["gate_up_scale"]
    }
