"""Tensors whose memory has other numbers than they show, and models that hide theirs."""

from __future__ import annotations

import warnings
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import commgrid
from commgrid import SpecError, checkpoint
from commgrid.transfer import Transfer


class Halves(Tensor):
    """A weight in int8 with a scale, as quantization libraries wrap one."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> Halves:
        made: Any = Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32)
        made.numbers = numbers
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers"], None

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), options: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return Halves(args[0].numbers)
        plain = [a.numbers / 2 if isinstance(a, Halves) else a for a in args]
        return function(*plain, **(options or {}))


class Tagged(Tensor):
    """A plain subclass, which only adds an attribute."""

    tag = "of mine"


def with_parameter(data: Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(data, requires_grad=False)
    return model


def with_buffer(data: Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("table", data)
    return model


def quantized() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to leave it out
        return torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)


REFUSED = {
    "weight of shape (2, 2) has no plain numbers: it is a Halves, whose": lambda: with_parameter(
        Halves(torch.ones(2, 2, dtype=torch.int8))
    ),
    "table of shape (2,) has no plain numbers: it is torch.qint8; keep its": lambda: with_buffer(
        quantized()
    ),
    "table of shape (2, 2) has no plain numbers: it is torch.sparse_coo; keep": lambda: with_buffer(
        torch.eye(2).to_sparse()
    ),
    "weight has no plain numbers: it has no shape yet; run the model once": lambda: nn.LazyLinear(
        2
    ),
    "weight of shape (2, 2) has no plain numbers: it is on the meta device": lambda: with_parameter(
        torch.empty(2, 2, device="meta")
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_has_no_plain_numbers_is_refused_by_name(said: str, tmp_path: Path) -> None:
    """A quantized one was saved and loaded without a word, and kept its old numbers."""
    grid = commgrid.initialize()
    model, plain = REFUSED[said](), nn.Linear(2, 2)
    for refused in (
        lambda: checkpoint.save(tmp_path, 1, model, progress=False),
        lambda: Transfer(model, plain, source_grid=grid, target_grid=grid, timeout=20),
    ):
        with pytest.raises(commgrid.CommGridError) as raised:
            refused()
        assert said in f"{raised.value}"
    assert not any(tmp_path.iterdir())
    commgrid.shutdown()


def test_a_mapping_of_such_tensors_is_refused_too() -> None:
    grid = commgrid.initialize()
    target = {"table": torch.zeros(2)}
    with pytest.raises(
        commgrid.CommGridError,
        match=r"table of shape \(2,\) has no plain numbers: it is torch\.qint8",
    ):
        Transfer({"table": quantized()}, target, source_grid=grid, target_grid=grid, timeout=20)
    commgrid.shutdown()


def test_a_plain_subclass_is_as_a_tensor(tmp_path: Path) -> None:
    commgrid.initialize()
    model = with_parameter(torch.ones(2, 2).as_subclass(Tagged))
    checkpoint.save(tmp_path, 1, model, progress=False)
    other = with_parameter(torch.zeros(2, 2).as_subclass(Tagged))
    checkpoint.load(tmp_path, other, progress=False)
    assert torch.equal(other.weight, torch.ones(2, 2))
    commgrid.shutdown()


class Turned(nn.Linear):
    """A layer whose state_dict has its square weight transposed, or a copy of it."""

    turn = True

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]
        weight = destination[f"{prefix}weight"].clone()
        destination[f"{prefix}weight"] = weight.T if self.turn else weight


def test_a_state_dict_with_other_numbers_is_refused(tmp_path: Path) -> None:
    commgrid.initialize()
    model = nn.Sequential(Turned(2, 2))
    with pytest.raises(commgrid.CommGridError, match=r"0\.weight differs between state_dict"):
        checkpoint.save(tmp_path, 1, model, progress=False)
    Turned.turn = False
    try:
        with torch.no_grad():
            model[0].weight[0, 0] = torch.nan
        checkpoint.save(tmp_path, 1, model, progress=False)
    finally:
        Turned.turn = True
    commgrid.shutdown()


def test_fsdp_of_flat_parameters_is_named(tmp_path: Path) -> None:
    commgrid.initialize()
    model = FullyShardedDataParallel(
        nn.Linear(2, 2), device_id=torch.device("cpu"), sharding_strategy=ShardingStrategy.NO_SHARD
    )
    with pytest.raises(commgrid.CommGridError, match="shard it with fully_shard instead"):
        checkpoint.save(tmp_path, 1, model, progress=False)
    commgrid.shutdown()


class Key(StrEnum):
    MASS = "mass"


def test_a_key_that_is_a_member_of_an_enum_is_refused(tmp_path: Path) -> None:
    """It came back as text, by which the optimizer looks nothing up."""
    commgrid.initialize()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight] = {Key.MASS: torch.zeros(2, 2)}
    with pytest.raises(commgrid.CommGridError, match=r"has the key <Key\.MASS"):
        checkpoint.save(tmp_path, 1, model, optimizer, progress=False)
    optimizer.state[model.weight] = {"mass": torch.zeros(2, 2)}
    checkpoint.save(tmp_path, 1, model, optimizer, progress=False)
    assert issubclass(SpecError, commgrid.CommGridError)
    commgrid.shutdown()
