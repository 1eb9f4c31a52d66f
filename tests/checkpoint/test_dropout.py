"""A run resumed from a checkpoint has the losses of an uninterrupted run."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import commgrid
from commgrid import checkpoint
from commgrid.data_parallel import GradientReducer
from commgrid.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    initialize_parameters,
    set_random_seed,
    sharded_rng,
)
from commgrid.testing import run_on_ranks

STEPS, HALF = 8, 4


class OtherCurve(Exception):
    """The resumed run has other losses than the one without an interruption."""


class Block(nn.Module):
    """An MLP with dropout on a sharded and on a replicated activation."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.up, self.down, self.rate = ColumnParallelLinear(8, 16), RowParallelLinear(16, 8), rate

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        with sharded_rng("tp"):
            x = F.dropout(x, self.rate)
        return F.dropout(self.down(x), self.rate)


def train(folder: str, rate: float, steps: range) -> list[float]:
    """Losses of these steps; a first step other than 0 resumes, a last one of HALF saves."""
    commgrid.initialize(tp=2)
    model = Block(rate).double()
    initialize_parameters(model, 1)
    set_random_seed(3)
    reducer = GradientReducer(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if steps.start:
        assert checkpoint.load(folder, model, optimizer, progress=False).step == steps.start
    losses = []
    for step in steps:
        x = torch.linspace(-1, 1 + step, 64, dtype=torch.float64).view(8, 8)
        loss = (model(x) - 1).square().mean()
        loss.backward()
        reducer.finish()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if steps.stop == HALF:
        checkpoint.save(folder, HALF, model, optimizer, progress=False)
    commgrid.shutdown()
    return losses


@pytest.mark.parametrize(
    "rate",
    [
        0.0,
        pytest.param(
            0.5,
            marks=pytest.mark.xfail(
                strict=True,
                raises=OtherCurve,
                reason="checkpoints keep no state of random number generators: after a resume "
                "dropout draws other masks than in the run without an interruption",
            ),
        ),
    ],
)
def test_a_resumed_run_has_the_same_curve(rate: float, tmp_path: Path) -> None:
    folder = str(tmp_path)
    whole = run_on_ranks(train, 4, folder, rate, range(STEPS))
    before = run_on_ranks(train, 4, folder, rate, range(HALF))
    after = run_on_ranks(train, 4, folder, rate, range(HALF, STEPS))
    assert before == [losses[:HALF] for losses in whole]
    if after != [losses[HALF:] for losses in whole]:
        raise OtherCurve(f"{after} after a resume, {whole} without")
