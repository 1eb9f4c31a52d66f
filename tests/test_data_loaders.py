"""Workers of a DataLoader, forked beside a live grid: neither disturbs the other."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import commgrid
from commgrid.failures import named_failures
from commgrid.testing import run_on_ranks
from commgrid.testing.leftovers import snapshot

ROWS, BATCH = 12, 2


class Rows(Dataset[Tensor]):
    """Row i is i; the worker that is asked for row `deadly` is killed."""

    def __init__(self, deadly: int | None = None) -> None:
        self.deadly = deadly

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Tensor:
        if index == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(float(index))


def summed(grid: commgrid.HyperCommGrid, value: float) -> float:
    """Sum of a value over tp, which has both ranks."""
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, group=grid.get_group("tp"))
    return tensor.item()


def reading(watch: bool) -> list[str]:
    before = snapshot()
    grid = commgrid.initialize(tp=2, watch=watch, connect="all")
    for _ in range(2):  # epochs, each with workers of its own
        read = 0.0
        with named_failures(grid):
            for batch in DataLoader(Rows(), batch_size=BATCH, num_workers=2):
                read += float(batch.sum())
                assert summed(grid, float(batch[0])) == 2 * float(batch[0])
        assert read == sum(range(ROWS))
    assert summed(grid, 1.0) == 2
    commgrid.destroy()
    dist.barrier()
    return before.left()


@pytest.mark.parametrize("watch", [False, True], ids=["alone", "watched"])
def test_workers_come_and_go_beside_a_grid(watch: bool) -> None:
    assert run_on_ranks(reading, 2, watch) == [[], []]


def losing_a_worker() -> tuple[str, bool, list[str]]:
    """Rank 0's error when its worker is killed, while rank 1 waits in a collective."""
    before = snapshot()
    grid = commgrid.initialize(tp=2, watch=True, connect="all")
    said = ""
    loader = DataLoader(Rows(deadly=7 if grid.rank == 0 else None), BATCH, num_workers=2)
    try:
        for batch in loader:
            float(batch.sum())
    except RuntimeError as error:
        said = f"{type(error).__name__}: {error}"
    works = summed(grid, 1.0) == 2
    commgrid.destroy()
    dist.barrier()
    return said, works, before.left()


def test_a_killed_worker_is_not_a_failure_of_the_grid() -> None:
    (said, *rest), other = run_on_ranks(losing_a_worker, 2)
    assert said.startswith("RuntimeError: DataLoader worker (pid")
    assert "Killed" in said or "exited unexpectedly" in said
    assert rest == [True, []]
    assert other == ("", True, [])


def losing_a_worker_in_named_failures() -> str:
    grid = commgrid.initialize(tp=2, watch=True, connect="all")
    try:
        with named_failures(grid, lambda: "step 3"):
            for _ in DataLoader(Rows(deadly=7 if grid.rank == 0 else None), BATCH, num_workers=2):
                pass
            summed(grid, 1.0)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_the_rank_of_a_killed_worker_is_named_with_the_loaders_error() -> None:
    """In named_failures the error ends the step: it is rank 0's own, and rank 1 is not to blame."""
    # A grid that has failed leaves its addresses in the store, which is gone with the job.
    own, told = run_on_ranks(losing_a_worker_in_named_failures, 2, check=False)
    assert own.startswith("RuntimeError: DataLoader worker (pid")
    assert told.startswith(
        "PeerFailedError: rank 0 failed in step 3: RuntimeError: DataLoader worker (pid"
    )
