"""Numbers that a new dtype does not hold: refused if they overflow, counted if they vanish."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commgrid
from commgrid import checkpoint
from commgrid.equality.lost_numbers import lost_numbers, narrows
from commgrid.parameters import placements
from commgrid.tensor_parallel import ColumnParallelLinear
from commgrid.testing import run_on_ranks
from tests.ways import WAYS, bring

HALF, BRAIN, EIGHT = torch.float16, torch.bfloat16, torch.float8_e4m3fn
ROWS, COLUMNS = 64, 64


def held(numbers: dict[int, float], dtype: torch.dtype, tp: int) -> nn.Module:
    """A layer of ones, some of whose numbers, counted over the whole weight, are others."""
    torch.manual_seed(0)
    model = ColumnParallelLinear(COLUMNS, ROWS, bias=False) if tp > 1 else nn.Linear(
        COLUMNS, ROWS, bias=False
    )  # fmt: skip
    full = torch.ones(ROWS * COLUMNS, dtype=torch.float64)
    for place, number in numbers.items():
        full[place] = number
    (placement,) = placements(model)
    full = full.view(ROWS, COLUMNS)
    for dim, group in placement.shards:
        full = full.chunk(group.size, dim)[group.rank]
    model.weight = nn.Parameter(full.to(dtype), requires_grad=False)
    return model


def converted(
    folder: str, way: str, numbers: dict[int, float], source: torch.dtype, target: torch.dtype
) -> tuple[str, list[str], Any]:
    """The error, the warnings, and the numbers that have arrived in these places."""
    commgrid.initialize(tp=2)
    model, other = held(numbers, source, 2), held({}, target, 2)
    before = other.weight.clone()
    told = ""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            bring(way, folder, (model,), (other,))
        except commgrid.CommGridError as error:
            told = str(error)
    if told:
        assert torch.equal(other.weight, before)
    full = torch.cat(grid_gather(other.weight)).flatten().double()
    commgrid.shutdown()
    texts = [str(one.message) for one in seen if "became zero" in str(one.message)]
    return told, texts, [full[place].item() for place in numbers]


def grid_gather(mine: Tensor) -> list[Tensor]:
    group = commgrid.get_group("tp")
    found = [torch.empty(mine.shape) for _ in range(2)]
    torch.distributed.all_gather(found, mine.float().contiguous(), group=group)
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("source", "target", "number"),
    [(torch.float32, HALF, 7e4), (BRAIN, HALF, -7e4), (torch.float64, torch.float32, 1e300),
     (torch.float32, BRAIN, 3.4e38)],
    ids=["fp32 to fp16", "bf16 to fp16", "fp64 to fp32", "fp32 to bf16"],
)  # fmt: skip
def test_a_number_that_is_too_large_is_refused(
    source: torch.dtype, target: torch.dtype, number: float, way: str, tmp_path: Path
) -> None:
    given = str(tmp_path), way, {ROWS * COLUMNS - 1: number}, source, target
    for told, _, _ in run_on_ranks(converted, 2, *given, check=way != "transfer"):
        assert "weight: 1 of 4096 numbers are too large for" in told


@pytest.mark.parametrize("way", WAYS)
def test_numbers_that_become_zero_are_counted_over_all_slices(way: str, tmp_path: Path) -> None:
    few = dict.fromkeys((0, 1, 4000, 4001), 1e-9)
    ranks = run_on_ranks(converted, 2, str(tmp_path / "few"), way, few, torch.float32, HALF)
    for told, texts, found in ranks:
        assert not told
        assert len(texts) == 1
        assert "weight" in texts[0]
        assert ": 4 of 4096 of " in texts[0]
        assert found == [0.0] * 4
    more = few | {2000: 1e-9}
    given = str(tmp_path / "more"), way, more, torch.float32, HALF
    for told, _, _ in run_on_ranks(converted, 2, *given, check=way != "transfer"):
        assert "weight: 5 of 4096 numbers are too small for float16" in told


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("source", "target"),
    [(torch.float32, HALF), (torch.float32, BRAIN), (HALF, torch.float32), (EIGHT, BRAIN),
     (EIGHT, EIGHT)],
    ids=["fp32 to fp16", "fp32 to bf16", "fp16 to fp32", "fp8 to bf16", "fp8 to fp8"],
)  # fmt: skip
def test_numbers_that_fit_are_converted_without_a_word(
    source: torch.dtype, target: torch.dtype, way: str, tmp_path: Path
) -> None:
    numbers = {0: 0.0, 1: -0.5, 4095: 448.0, 2: 2.0**-6}
    if target == HALF:
        numbers |= {3: 65504.0, 4: 2.0**-24, 5: float("inf")}
    ranks = run_on_ranks(converted, 2, str(tmp_path), way, numbers, source, target)
    assert ranks == [("", [], [*numbers.values()])] * 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("target", [EIGHT, torch.float8_e5m2], ids=str)
def test_floats_without_a_scale_do_not_go_into_eight_bits(
    target: torch.dtype, way: str, tmp_path: Path
) -> None:
    given = str(tmp_path), way, {0: 1000.0}, BRAIN, target
    for told, _, _ in run_on_ranks(converted, 2, *given, check=way != "transfer"):
        assert "bfloat16" in told
        assert str(target).removeprefix("torch.") in told


def test_counts_are_torchs() -> None:
    given = torch.tensor([1.0, 7e4, 1e-9, float("inf"), float("nan"), 0.0])
    lost = lost_numbers(given, HALF, 6)
    assert (lost.overflowed, lost.vanished) == (1, 1)
    double = torch.complex(given[:3], given[:3]).to(torch.complex64)
    lost = lost_numbers(double, torch.complex32, 3)
    assert (lost.overflowed, lost.vanished) == (2, 2)
    assert narrows(torch.float32, BRAIN)
    assert not narrows(BRAIN, torch.float32)
    assert not narrows(torch.int64, HALF)


def moments(folder: str, small: bool) -> str:
    """An optimizer's state into a model of half precision."""
    commgrid.initialize()
    model, other = nn.Linear(4, 4), nn.Linear(4, 4, dtype=HALF)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().mul(1e-6 if small else 1.0).backward()
    optimizer.step()
    checkpoint.save(folder, 1, model, optimizer, progress=False)
    told = ""
    try:
        fresh = torch.optim.AdamW(other.parameters())
        checkpoint.load(folder, other, fresh, progress=False)
        assert fresh.state[other.weight]["exp_avg"].dtype == HALF
        assert fresh.state[other.weight]["exp_avg_sq"].count_nonzero() == 16
    except commgrid.CheckpointError as error:
        told = str(error)
    commgrid.shutdown()
    return told


def test_moments_that_vanish_are_refused(tmp_path: Path) -> None:
    assert run_on_ranks(moments, 1, str(tmp_path / "right"), False) == [""]
    (told,) = run_on_ranks(moments, 1, str(tmp_path / "small"), True)
    assert "optimizer.state.weight.exp_avg_sq: 16 of 16 numbers are too small" in told


# -- weights with scales -------------------------------------------------------------------


def block_fp8(full: Tensor, size: int = 128) -> tuple[Tensor, Tensor]:
    """A matrix in eight bits, and the scale of each block, which gives it back."""
    rows, columns = (-(-length // size) for length in full.shape)
    scales, numbers = torch.empty(rows, columns), torch.empty(full.shape)
    for i in range(rows):
        for j in range(columns):
            part = full[i * size : (i + 1) * size, j * size : (j + 1) * size]
            scales[i, j] = part.abs().max() / 448
            numbers[i * size : (i + 1) * size, j * size : (j + 1) * size] = part / scales[i, j]
    return numbers.to(EIGHT), scales


def product(numbers: Tensor, scales: Tensor, size: int = 128) -> Tensor:
    wide = scales.repeat_interleave(size, 0).repeat_interleave(size, 1)
    return numbers.float() * wide[: numbers.shape[0], : numbers.shape[1]]


def loads_block_fp8(folder: str, key: str, size: int, several: bool) -> tuple[bool, bool]:
    safetensors = pytest.importorskip("safetensors.torch")
    grid = commgrid.initialize(tp=2)
    torch.manual_seed(0)
    numbers, scales = block_fp8(torch.randn(200, 144) * 3e-3, size)
    stored = {key: numbers, f"{key}_scale_inv": scales, "norm": torch.ones(3)}
    if grid.rank == 0:
        safetensors.save_file(
            {k: t for k, t in stored.items() if not several or "scale" not in k},
            f"{folder}/model-1.safetensors",
        )
        if several:
            safetensors.save_file({f"{key}_scale_inv": scales}, f"{folder}/model-2.safetensors")
            names = {k: f"model-{1 + ('scale' in k)}.safetensors" for k in stored}
            Path(f"{folder}/model.safetensors.index.json").write_text(
                json.dumps({"weight_map": names})
            )
    torch.distributed.barrier()
    model = nn.ModuleDict({"cut": ColumnParallelLinear(144, 200, bias=False)})
    model.norm = nn.Parameter(torch.zeros(3))
    rename = {key: "cut.weight"}
    restored = checkpoint.load(folder, model, prefix="", rename=rename, progress=False)
    right = product(numbers, scales, size).chunk(2)[grid.rank]
    raw = nn.Module()
    raw.w = nn.Parameter(torch.zeros(200, 144, dtype=EIGHT), requires_grad=False)
    raw.scales = nn.Parameter(torch.zeros(scales.shape))
    raw.norm = nn.Parameter(torch.zeros(3))
    rename = {key: "w", f"{key}_scale_inv": "scales"}
    checkpoint.load(folder, raw, prefix="", rename=rename, progress=False)
    same = torch.equal(raw.w.float(), numbers.float()) and torch.equal(raw.scales, scales)
    commgrid.shutdown()
    assert restored.step is None
    return torch.equal(model["cut"].weight, right), same


@pytest.mark.parametrize(
    ("key", "size", "several"),
    [("w", 128, False), ("model.up.weight", 128, True), ("up.weight", 64, False)],
)
def test_block_fp8_is_read_with_its_scales(
    key: str, size: int, several: bool, tmp_path: Path
) -> None:
    ranks = run_on_ranks(loads_block_fp8, 2, str(tmp_path), key, size, several)
    assert ranks == [(True, True)] * 2


def test_mxfp4_is_read_with_its_scales(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (2, 4, 3, 16), dtype=torch.uint8)
    scales = torch.randint(120, 130, (2, 4, 3), dtype=torch.uint8)
    stored = {"experts.w_blocks": blocks, "experts.w_scales": scales}
    safetensors.save_file(stored, tmp_path / "model.safetensors")
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    pairs = torch.stack([values[(blocks & 15).long()], values[(blocks >> 4).long()]], -1)
    right = pairs.flatten(-2) * torch.exp2(scales.float() - 127)[..., None]
    commgrid.initialize()
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(2, 4, 96))
    rename = {"experts.w_blocks": "w"}
    checkpoint.load(tmp_path, model, prefix="", rename=rename, progress=False)
    assert torch.equal(model.w, right.flatten(-2))
    commgrid.shutdown()


def test_scales_of_another_form_are_refused(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    commgrid.initialize()
    model = nn.Linear(4, 4, bias=False)
    for name, scales in {
        "weight_scale_inv": torch.ones(3, 1),
        "weight_scale": torch.ones(2, 2),
    }.items():
        stored = {"weight": torch.ones(4, 4).to(EIGHT), name: scales}
        safetensors.save_file(stored, tmp_path / "model.safetensors")
        for strict in (True, False):
            with pytest.raises(commgrid.CheckpointError, match="scale"):
                checkpoint.load(tmp_path, model, prefix="", strict=strict, progress=False)
    commgrid.shutdown()


# -- which files are read ------------------------------------------------------------------


def test_files_that_the_index_does_not_list_are_left_alone(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    one, other = torch.full((2, 2), 1.0), torch.full((2,), 2.0)
    safetensors.save_file({"weight": one}, tmp_path / "model-00001-of-00002.safetensors")
    safetensors.save_file({"bias": other}, tmp_path / "model-00002-of-00002.safetensors")
    wrong = {"weight": -one, "bias": -other}
    safetensors.save_file(wrong, tmp_path / "consolidated.safetensors")
    names = {"weight": "model-00001-of-00002.safetensors",
             "bias": "model-00002-of-00002.safetensors"}  # fmt: skip
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    commgrid.initialize()
    model = nn.Linear(2, 2)
    checkpoint.load(tmp_path, model, prefix="", progress=False)
    assert torch.equal(model.weight, one)
    assert torch.equal(model.bias, other)
    (tmp_path / names["bias"]).unlink()
    with pytest.raises(commgrid.CheckpointError, match=r"has no model-00002-of-00002"):
        checkpoint.load(tmp_path, model, prefix="", progress=False)
    commgrid.shutdown()
