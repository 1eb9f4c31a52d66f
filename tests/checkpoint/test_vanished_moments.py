"""Optimizer state that a narrower dtype does not hold: refused while everything is as it was."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import commgrid
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.tensor_parallel import ColumnParallelLinear
from commgrid.testing import run_on_ranks
from tests.ways import bring

SIZE = 64
ENTRIES: dict[str, Any] = {
    "moment": {"moment": torch.full((SIZE, SIZE), 1e-9)},
    "large": {"moment": torch.full((SIZE, SIZE), 1e6)},
    "nested": {"of": {"a": [torch.full((3,), 1e-9), 5]}},
    "right": {"moment": torch.full((SIZE, SIZE), 0.5), "of": [torch.ones(3)]},
    "exact": {"moment": torch.full((SIZE, SIZE), 1e-9, dtype=torch.float64)},
    "few": {"moment": torch.eye(SIZE).index_fill(0, torch.tensor([0]), 0.0) + 0.5},
}
ENTRIES["few"]["moment"][0, :2] = 1e-9


class Held(torch.optim.Optimizer):
    """An optimizer whose state tests set."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.25})


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def made(kind: str, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    model: nn.Module
    if kind == "tp":
        model = ColumnParallelLinear(SIZE, SIZE, bias=False).to(dtype)
    else:
        model = nn.Linear(SIZE, SIZE, bias=False, dtype=dtype)
    nn.init.ones_(model.weight)
    if kind == "fsdp":
        fully_shard(model, mesh=commgrid.get_grid().device_mesh("dp"))
    if kind == "sharded":
        inner: Any = Held
        return model, ShardedOptimizer(GradientReducer(model, shard=True), inner, element_wise=True)
    return model, Held(model.parameters())


def kept(kind: str, model: nn.Module, full: Any) -> Any:
    """An entry of a rank's part: its rows of a tensor of the parameter's shape."""
    if not isinstance(full, Tensor):
        return full
    weight, rank = model.weight, commgrid.get_grid().rank
    if kind == "fsdp":
        assert isinstance(weight, DTensor)
        return DTensor.from_local(full.chunk(2)[rank], weight.device_mesh, weight.placements)
    return full.chunk(2)[rank].clone() if kind == "tp" else full.clone()


def brought(way: str, folder: str, what: str, kind: str) -> tuple[str, str, Any, list[str]]:
    """The error's type and text, the state of the target, and warnings."""
    commgrid.initialize(tp=2 if kind == "tp" else 1)
    model, optimizer = made(kind, torch.float32)
    other, fresh = made(kind, torch.float16)
    for key, full in ENTRIES[what].items():
        if kind == "sharded":
            for _, tensor, _ in optimizer.parts():
                value = full[0, 0].expand(tensor.shape).clone()
                optimizer.inner.state.setdefault(tensor, {})[key] = value
        else:
            optimizer.state[model.weight][key] = kept(kind, model, full)
    nn.init.zeros_(other.weight)
    name, told = "", ""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            bring(way, folder, (model, optimizer), (other, fresh))
        except commgrid.CommGridError as error:
            name, told = type(error).__name__, str(error)
    inner = getattr(fresh, "inner", fresh)
    found = [inner.state.get(p, {}) for group in inner.param_groups for p in group["params"]]
    dtypes = {
        key: str(local(each).dtype)[6:]
        for state in found for key, each in state.items() if isinstance(each, Tensor)
    }  # fmt: skip
    assert bool(local(other.weight).any()) == (not told), "weights have moved, and were refused"
    assert bool(found and found[0]) == (not told), found
    commgrid.shutdown()
    texts = [str(one.message) for one in seen if "became zero" in str(one.message)]
    return name, told, dtypes, texts


FULL = pytest.mark.full
WAYS = ["load", pytest.param("recover", marks=FULL), "transfer"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("moment", "plain"),
        *[pytest.param("moment", kind, marks=FULL) for kind in ("tp", "fsdp")],
        pytest.param("nested", "plain", marks=FULL),
        pytest.param("large", "tp", marks=FULL),
    ],
)
def test_state_that_is_lost_is_refused_before_anything_changes(
    what: str, kind: str, way: str, tmp_path: Any
) -> None:
    ranks = run_on_ranks(brought, 2, way, str(tmp_path), what, kind, check=way != "transfer")
    for name, told, _, _ in ranks:
        assert name == ("TransferError" if way == "transfer" else "CheckpointError"), told
        key = "of" if what == "nested" else "moment"
        assert re.search(rf"optimizer.state.weight.{key}: (\d+) of \1 numbers are too ", told), told
        assert "not to be used" not in told


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("right", "plain"),
        *[pytest.param("right", kind, marks=FULL) for kind in ("tp", "fsdp")],
        pytest.param("exact", "tp", marks=FULL),
        pytest.param("few", "plain", marks=FULL),
    ],
)
def test_state_that_fits_is_converted(what: str, kind: str, way: str, tmp_path: Any) -> None:
    for name, told, dtypes, texts in run_on_ranks(brought, 2, way, str(tmp_path), what, kind):
        assert (name, told) == ("", "")
        assert dtypes["moment"] == ("float64" if what == "exact" else "float16")
        if what == "few":
            assert "of optimizer.state.weight.moment" in texts[0]
        else:
            assert texts == []


@pytest.mark.full
@pytest.mark.parametrize("way", ["load", "transfer"])
def test_fp32_copies_of_half_precision_keep_small_moments(way: str, tmp_path: Any) -> None:
    for name, told, dtypes, _ in run_on_ranks(brought, 2, way, str(tmp_path), "moment", "sharded"):
        assert (name, told, dtypes) == ("", "", {"moment": "float32"})
