"""`run(verify=True)` finds every difference of a target, and no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commgrid
from commgrid.resharding.transport import Carrier
from commgrid.tensor_parallel import ColumnParallelLinear, initialize_parameters
from commgrid.testing import run_on_ranks
from commgrid.transfer import Transfer
from tests.transfer.programs import said

VICTIM = 2


def flip(weight: Tensor) -> None:
    """The lowest bit of one number."""
    weight.view(-1)[3:4].view(torch.int16)[0] ^= 1


def swap(weight: Tensor) -> None:
    """Two halves, whose numbers stay the same together."""
    half = len(weight) // 2
    weight.copy_(torch.cat([weight[half:], weight[:half]]))


def stay(weight: Tensor) -> None:
    weight.zero_()


DAMAGES: dict[str, Callable[[Tensor], None]] = {"flip": flip, "swap": swap, "stay": stay}


def damaging(damage: Callable[[Tensor], None], weight: Tensor) -> Any:
    """The target's weight is damaged once it has arrived."""
    carry = Carrier.carry

    def carried(carrier: Carrier) -> None:
        carry(carrier)
        with torch.no_grad():
            damage(weight)

    return carried


def on_ranks(damage: str) -> list[str]:
    """Ranks 0 and 1 have the source over tp, ranks 0 and 2 the target, whose halves are bf16."""
    rank = dist.get_rank()
    training = commgrid.initialize(name="training", ranks=[0, 1], tp=2) if rank < 2 else None
    serving = commgrid.initialize(name="serving", ranks=[0, 2], tp=2) if rank != 1 else None
    model = served = None
    if training:
        with commgrid.use_grid(training):
            model = ColumnParallelLinear(8, 16)
        initialize_parameters(model, 1)
    if serving:
        with commgrid.use_grid(serving):
            served = ColumnParallelLinear(8, 16).bfloat16()
    transfer = Transfer(model, served, source_grid=training, target_grid=serving, staged=not damage)
    transfer.run(verify=True)
    transfer.run(verify=rank == 1)  # one rank asks, all of them verify
    if damage and rank == VICTIM:
        assert served is not None
        Carrier.carry = damaging(DAMAGES[damage], served.weight.data)  # type: ignore[method-assign]
    transfer.run()  # nothing looks
    found = [said(lambda: transfer.run(verify=rank == 1)), transfer.broken]
    if not damage and served is not None:
        assert served.weight.any()
    commgrid.destroy()
    return found


@pytest.mark.parametrize(
    "damage",
    ["flip", *(pytest.param(each, marks=pytest.mark.full) for each in ("swap", "stay", ""))],
)
def test_a_damaged_tensor_is_named_on_all_ranks(damage: str) -> None:
    named = "TransferError: weight on rank 2 of the target differs from the source"
    # A run that has failed leaves addresses, for which another rank's gloo may wait.
    for told, broken in run_on_ranks(on_ranks, 3, damage, leftovers=["groups", "keys"]):
        if damage:
            assert told.startswith(named), told
            assert "the target is not to be used" in broken
        else:
            assert (told, broken) == ("", "")


def with_state() -> list[Tensor]:
    """An optimizer's state, and a tensor that is there several times."""
    grid = commgrid.initialize(dp=2)
    models = [nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)) for _ in range(2)]
    for model in models:
        model[1].weight = model[0].weight
    given, taken = (torch.optim.AdamW(model.parameters()) for model in models)
    for parameter in models[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    given.step()
    transfer = Transfer(
        models[0], models[1], source_grid=grid, target_grid=grid, optimizer=(given, taken)
    )
    transfer.run(verify=True)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
    commgrid.destroy()
    return []


@pytest.mark.full
def test_what_goes_with_an_optimizer_is_verified_too() -> None:
    run_on_ranks(with_state, 2)
