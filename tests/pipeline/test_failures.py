"""A stage raises, or is killed, in the middle of a step: every other rank ends, naming it."""

import os
import re
import signal
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commgrid
from commgrid.collectives import all_reduce
from commgrid.pipeline import Pipeline
from commgrid.runtime.named_failures import FailureBoard, named_failures
from commgrid.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from commgrid.testing import RanksFailed, run_on_ranks
from tests.flags import hear, tell
from tests.waiting import until

TIMEOUT = 240.0
MICROBATCHES = 6


class Failing(nn.Module):
    """Linear over tp; does something in one microbatch's forward, or in its backward."""

    def __init__(self, act: Callable[[], object] | None, microbatch: int, backward: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))
        self.act, self.microbatch, self.backward = act, microbatch, backward
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        y = all_reduce(x @ self.weight, "tp", op="avg").detach() + x @ self.weight
        if self.act is not None and self.seen == self.microbatch:
            if self.backward:
                y.register_hook(lambda _: self.act and self.act())
            else:
                self.act()
        self.seen += 1
        return y


def boom() -> None:
    raise ValueError("boom")


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    os._exit(7)


def training(
    act: Callable[[], object], odd: int, backward: bool, sizes: dict[str, int], schedule: str
) -> None:
    """Four steps; one rank acts in the middle of the second."""
    grid = commgrid.initialize(**sizes, timeout=10 * TIMEOUT)  # an error does not wait for it
    module = Failing(act if grid.rank == odd else None, MICROBATCHES + 2, backward)
    pipeline = Pipeline(
        module, schedule, num_microbatches=MICROBATCHES, loss=lambda y, target: y.square().sum()
    )
    inputs = [torch.ones(4, 8)] * MICROBATCHES
    with named_failures(grid):
        for _ in range(4):
            pipeline.step(inputs, inputs)
            all_reduce(module.weight.grad, "dp")
            module.zero_grad()


def outcomes(
    act: Callable[[], object], odd: int, world: int, launcher: str | None = None, **job: object
) -> dict[int, str]:
    """The last line that each rank printed; every one of them has failed."""
    sizes = {"pp": 4} if world == 4 else {"pp": 2, "tp": 2}
    given = (act, odd, job.get("backward", False), sizes, job.get("schedule", "1f1b"))
    init = None if launcher else "gloo"
    with pytest.raises(RanksFailed) as failed:
        run_on_ranks(training, world, *given, backend=init, launcher=launcher, timeout=TIMEOUT)
    parts = re.split(r"--- rank (\d+) \((.*)\)\n", str(failed.value))[1:]
    found = {}
    for rank, how, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        assert how != "exit code 0"
        raised = [line for line in text.splitlines() if re.match(r"[\w.]*Error: ", line)]
        found[int(rank)] = raised[-1] if raised else how
    assert sorted(found) == list(range(world)), "a rank that ended as if nothing had happened"
    return found


@pytest.mark.full("0-False-zb-h1", "3-True-gpipe")
@pytest.mark.nightly("0-True-*", "3-False-*", "0-*-gpipe", "0-*-1f1b", "3-*-1f1b", "3-*-zb-h1",
                     "1-*-gpipe", "1-False-zb-h1", "1-True-1f1b")  # fmt: skip
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("odd", [0, 1, 3])
def test_a_stage_raises(odd: int, backward: bool, schedule: str) -> None:
    found = outcomes(boom, odd, 4, backward=backward, schedule=schedule)
    assert found.pop(odd) == "ValueError: boom"
    for rank, said in found.items():
        what = r"(forward|backward|input gradients|weight gradients)" if backward else "forward"
        where = rf"rank {odd} failed in the {what} of microbatch 2 of stage {odd}: ValueError: boom"
        assert re.search(f"PeerFailedError: {where} \\(rank {rank} was in ", said), said


@pytest.mark.parametrize("odd", [0, 1, 3])
def test_a_stage_is_killed(odd: int) -> None:
    found = outcomes(killed, odd, 4)
    assert found.pop(odd) == "ended by SIGKILL"
    for said in found.values():
        assert f"PeerFailedError: stage {odd} (rank {odd}) is gone or does not answer" in said


def test_the_rank_that_serves_the_store_is_killed() -> None:
    found = outcomes(killed, 0, 4, launcher="torchrun")
    assert found.pop(0) == "ended by SIGKILL"
    for said in found.values():
        served = "PeerFailedError: rank 0 is gone or does not answer, which serves the store: "
        assert served in said


@pytest.mark.parametrize("act", [boom, killed, leave])
def test_ranks_beside_the_stage_name_it_too(act: Callable[[], object]) -> None:
    """One rank of pp 2 × tp 2 × dp 2: its tp peer, other stages, and the other replica."""
    found = outcomes(act, 5, 8)
    found.pop(5)
    for said in found.values():
        assert "PeerFailedError" in said
        assert "rank 5" in said or "(rank 5)" in said, said


class Layers(nn.Module):
    """Layers over tp, whose graph holds the group that the exception's traceback holds."""

    def __init__(self, odd: bool) -> None:
        super().__init__()
        self.up, self.down = ColumnParallelLinear(8, 8), RowParallelLinear(8, 8)
        self.act, self.seen = boom if odd else None, 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(x))
        self.seen += 1
        if self.act is not None and self.seen == 3:
            self.act()
        return y


def caught(rank: int) -> str:
    """A rank's error text; the failing rank catches its own error and waits for the others'."""
    grid = commgrid.initialize(pp=2, tp=2)
    held = grid.get_group("pp"), grid.get_group("tp")
    pipeline = Pipeline(
        Layers(rank == 3), num_microbatches=MICROBATCHES,
        loss=lambda y, target: y.square().sum(),
    )  # fmt: skip
    inputs = [torch.ones(4, 8)] * MICROBATCHES
    try:
        pipeline.step(inputs, inputs)
    except ValueError:
        hear("rank 0", "rank 1", "rank 2")
        return f"{grid.is_destroyed}, {len(held)} groups held"
    except commgrid.PeerFailedError as error:
        tell(f"rank {rank}")
        return str(error)
    return "nothing"


def test_a_rank_that_goes_on_after_its_error_keeps_nobody_waiting() -> None:
    # A grid that failed leaves keys in the store.
    *others, own = run_on_ranks(caught, 4, per_rank=[(rank,) for rank in range(4)], check=False)
    assert own == "True, 2 groups held"
    for said in others:
        assert "rank 3 failed in the forward of microbatch 2 of stage 1: ValueError: boom" in said


def in_a_loop(rank: int) -> str:
    """Failures outside of a pipeline are named as well."""
    grid = commgrid.initialize(tp=2)
    try:
        with named_failures(grid, lambda: "step 3"):
            if rank == 2:
                raise OSError("no more data")
            while True:
                all_reduce(torch.ones(4), "dp_tp")
    except (commgrid.PeerFailedError, OSError) as error:
        return f"{type(error).__name__}: {error}"


def test_any_failure_is_named() -> None:
    # A grid that failed leaves keys in the store.
    found = run_on_ranks(in_a_loop, 4, per_rank=[(rank,) for rank in range(4)], check=False)
    assert found.pop(2) == "OSError: no more data"
    for said in found:
        assert said.startswith("PeerFailedError: rank 2 failed in step 3: OSError: no more data (")


def posted_while_connecting(rank: int) -> str:
    """Rank 1's own error is that a connection timed out, though rank 0 has told why."""
    grid = commgrid.initialize(dp=2)
    try:
        with named_failures(grid, lambda: "step 3"):
            if rank == 0:
                tell("rank 0 fails")
                raise OSError("no more data")
            hear("rank 0 fails")
            until(lambda: FailureBoard(grid).told_by([0]) is not None, "rank 0 has told")
            raise dist.DistNetworkError("connect() timed out: Connection refused")
    except (commgrid.PeerFailedError, OSError) as error:
        return type(error).__name__


def test_a_connection_that_times_out_makes_no_failure_late() -> None:
    found = run_on_ranks(posted_while_connecting, 2, per_rank=[(0,), (1,)], check=False)
    assert found == ["OSError", "PeerFailedError"]
