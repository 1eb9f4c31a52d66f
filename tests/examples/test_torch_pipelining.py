"""torch's own schedules on the grid's groups: the losses of the whole model on one process."""

import pytest
import torch
from torch import nn

import commgrid
from commgrid.testing import run_on_ranks
from tests.examples.curves import load


def run(jobs: list[list[str]]) -> list[list[float]]:
    """Each job's losses, in one process after the other."""
    example = load("torch_pipelining")
    down, commgrid.shutdown = commgrid.shutdown, commgrid.destroy
    found = [example.train(example.parse(job)) for job in jobs]
    down()
    return found


def whole_model() -> list[float]:
    """The example's model and data in plain torch."""
    example = load("torch_pipelining")
    model = nn.Sequential(*(example.layer(i, 0) for i in range(8)))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(5):
        torch.manual_seed(500 + step)
        x, target = torch.randn(2, example.ROWS, example.WIDTH, dtype=torch.float64)
        loss = example.mean_square(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.full("2-1", "4-1")
@pytest.mark.parametrize(("pp", "dp"), [(2, 1), (4, 1), (2, 2)])
def test_torchs_schedules_on_our_groups(pp: int, dp: int) -> None:
    alone = whole_model()
    jobs = [["--pp", str(pp), "--schedule", name] for name in load("torch_pipelining").SCHEDULES]
    for found in run_on_ranks(run, pp * dp, jobs, backend=None, launcher="torchrun"):
        for job, losses in zip(jobs, found, strict=True):
            # The same products; sums over microbatches and ranks in another order.
            assert losses == pytest.approx(alone, rel=1e-12), job
    assert alone[-1] < alone[0]


def test_what_does_not_fit_is_named() -> None:
    example = load("torch_pipelining")
    with pytest.raises(commgrid.SpecError, match="3 layers cannot be cut into 4 parts"):
        example.train(example.parse(["--layers", "3", "--chunks", "4", "--schedule", "LoopedBFS"]))
    commgrid.shutdown()
