"""Workers of a DataLoader, forked beside a live grid: neither disturbs the other."""

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import commgrid
from commgrid import PeerFailedError, PeerTimeoutError
from commgrid.failures import named_failures
from commgrid.launching.leftovers import Snapshot
from commgrid.testing import run_on_ranks
from tests.killing import KILLED, kill_me, run_killable

ROWS, BATCH = 12, 2
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on one core


class Rows(Dataset[float]):
    """Row i is i; the worker that is asked for row `deadly` is killed."""

    def __init__(self, deadly: int | None = None) -> None:
        self.deadly = deadly

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> float:
        if index == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return float(index)


def loader(deadly: int | None = None) -> DataLoader[float]:
    # Lists, not tensors: reading a tensor fetches its memory from the worker, which is an OSError
    # and not the loader's error if the worker has just been killed.
    return DataLoader(Rows(deadly), BATCH, num_workers=2, collate_fn=list)


def summed(grid: commgrid.HyperCommGrid, value: float) -> float:
    """Sum of a value over tp, which has both ranks."""
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, group=grid.get_group("tp"))
    return tensor.item()


def reading(watch: bool) -> list[str]:
    before = Snapshot()
    grid = commgrid.initialize(tp=2, watch=watch, connect="all")
    for _ in range(2):  # epochs, each with workers of its own
        read = 0.0
        with named_failures(grid):
            for batch in DataLoader(Rows(), BATCH, num_workers=2):  # tensors, in shared memory
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
    before = Snapshot()
    grid = commgrid.initialize(tp=2, watch=True, connect="all")
    said = ""
    try:
        for _ in loader(deadly=7 if grid.rank == 0 else None):
            pass
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
            for _ in loader(deadly=7 if grid.rank == 0 else None):
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


def outliving_its_rank(pipe: str) -> str:
    """Rank 0's error when rank 1 is killed while a process that rank 1 forked lives on."""
    grid = commgrid.initialize(tp=2, watch=True, connect="all", timeout=5)
    if grid.rank == 1:
        if os.fork() == 0:
            with open(pipe) as told:
                told.read()  # until rank 0 closes it
            os._exit(0)
        summed(grid, 1.0)
        kill_me()
    with open(pipe, "w"):
        summed(grid, 1.0)
        try:
            with named_failures(grid):
                summed(grid, 1.0)
        except (PeerFailedError, PeerTimeoutError) as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.full
def test_a_rank_is_gone_though_a_helper_of_it_lives(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    said, killed = run_killable(outliving_its_rank, 2, str(pipe))
    assert killed == KILLED
    assert said.startswith("PeerFailedError: rank 1 is gone: its process has ended"), said
