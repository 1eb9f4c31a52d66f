"""Tensors that NCCL has no type for, which torch refuses on the sender while the receiver waits."""

from typing import Any

import pytest
import torch
from torch import nn

import commgrid
from commgrid import PeerFailedError, SpecError
from commgrid.pipeline import Pipeline
from commgrid.testing import run_on_ranks
from commgrid.torch_compat import messages as torch_transfers


class Halves(nn.Module):
    """Passes a number on beside whole ones of 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Any, counts: Any = None) -> Any:
        return self.layer(x), torch.ones(2, dtype=torch.int16)


def over_nccl() -> str:
    """As if the group's backend were NCCL."""
    grid = commgrid.initialize(pp=2)
    torch_transfers.backend_for = lambda *_: "nccl"
    pipeline = Pipeline(Halves(), "gpipe", num_microbatches=1, loss=lambda y, _: y[0].sum())
    with pytest.raises((SpecError, PeerFailedError)) as caught:
        pipeline.step([torch.ones(1, 2)], [torch.ones(1, 2)])
    assert isinstance(caught.value, SpecError) == (grid.rank == 0)
    return str(caught.value)


def test_a_tensor_that_nccl_does_not_send_is_an_error_on_both_stages() -> None:
    # A grid that failed leaves keys in the store.
    for said in run_on_ranks(over_nccl, 2, timeout=300, check=False):
        assert "a tensor of torch.int16, which NCCL does not send; convert it" in said
