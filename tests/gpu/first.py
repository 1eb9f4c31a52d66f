"""Ten checks to run first on a machine with a GPU, in one command.

    python tests/gpu/first.py                                  # on one GPU, within 25 minutes
    python tests/gpu/first.py --python A/bin/python            # and with the torch of another one
    python tests/gpu/first.py --emulate                        # over gloo on the CPU, in a minute

Several ranks share a GPU if there are fewer. A check that does not fit in the time that is left is
not run, and the exit status says so.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

import commgrid
from commgrid import CommGridError, GridMismatchError, HyperCommGrid
from commgrid.collectives import all_reduce, all_to_all
from commgrid.failures import named_failures
from commgrid.pipeline import Pipeline
from commgrid.testing import run_on_ranks
from tests.flags import hear, meet, tell
from tests.gpu.on_gpus import take_device

HEARTBEAT_SECONDS = 15
"""Limit of NCCL's heartbeat monitor, which ends a process that it takes for stuck."""
MIB = 2**20


@dataclass(frozen=True)
class Where:
    """Where a check runs.

    Args:
        emulated: over gloo on the CPU, with shorter waits and fewer repeats.
    """

    emulated: bool

    @property
    def device(self) -> str:
        return "cpu" if self.emulated else "cuda"

    def start(self, **options: Any) -> HyperCommGrid:
        backend = "gloo" if self.emulated else "nccl"
        return commgrid.initialize(backend=backend, **options)

    def of(self, real: float, emulated: float) -> float:
        """Seconds, or a count."""
        return emulated if self.emulated else real

    def ones(self, count: int = 4) -> torch.Tensor:
        return torch.ones(count, device=self.device)

    def wait(self) -> None:
        """Wait for the device."""
        if not self.emulated:
            torch.cuda.synchronize()

    def memory(self) -> float:
        """MiB in use: of the device, or of this process."""
        if not self.emulated:
            free, total = torch.cuda.mem_get_info()
            return (total - free) / MIB
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * 4096 / MIB


def survives(where: Where) -> str:
    """Rank 2 sleeps and is named; the others rebuild, and live past the heartbeat's limit."""
    timeout = where.of(10.0, 3.0)
    grid = where.start(watch=True, timeout=timeout)
    rank, told = grid.rank, ""
    try:
        with named_failures(grid):
            all_reduce(where.ones(), "dp")
            if rank == 2:
                hear("0 rebuilds", "1 rebuilds")
            all_reduce(where.ones(), "dp")
            where.wait()
    except CommGridError as error:
        told = str(error)
    if rank == 2:
        hear("0 has lived", "1 has lived")
        return "slept"
    assert "rank 2" in told, told
    tell(f"{rank} rebuilds")
    rebuilt = commgrid.rebuild(ranks=[0, 1])
    assert rebuilt is not None
    seconds = where.of(HEARTBEAT_SECONDS + 90.0, 2.0)
    until = time.monotonic() + seconds
    goes_on = True
    while goes_on:
        # Rank 0's clock decides for both.
        goes_on = bool(all_reduce(where.ones(1) * (rank == 0 and time.monotonic() < until), "dp"))
        time.sleep(0.5)
    tell(f"{rank} has lived")
    return f"lived for {seconds:g} s after: {told.splitlines()[0][:60]}"


def redistributes(where: Where) -> str:
    """A DTensor on a grid's mesh goes from rows to columns."""
    mesh = where.start(tp=2).device_mesh("tp")
    whole = torch.arange(64.0, device=where.device).reshape(8, 8)
    moved = distribute_tensor(whole, mesh, [Shard(0)]).redistribute(mesh, [Shard(1)])
    assert torch.equal(moved.to_local(), whole.chunk(2, 1)[mesh.get_local_rank()])
    return "as a whole tensor cut by columns"


def suspends(where: Where) -> str:
    """A grid is suspended after a pipeline's step, and the next step gives the same loss."""
    grid = where.start(pp=2)
    torch.manual_seed(0)
    stage = nn.Linear(8, 8, device=where.device)
    pipeline = Pipeline(stage, "1f1b", num_microbatches=2, loss=nn.functional.mse_loss)
    batch = torch.randn(2, 4, 8, device=where.device)
    losses = []
    for _ in range(2):
        found = pipeline.step(batch, targets=batch)
        losses.append(None if found is None else found.tolist())
        grid.suspend()
        grid.resume()
    assert losses[0] == losses[1]
    return "the same losses"


def eight_bytes(where: Where) -> str:
    """Latency of an all-reduce of 8 bytes on a grid's group, and on WORLD."""
    grid = where.start(tp=2)
    number = torch.ones(1, dtype=torch.float64, device=where.device)
    repeats, took = int(where.of(5000, 200)), {}
    for name, group in (("tp", grid.get_group("tp")), ("WORLD", dist.group.WORLD)):
        for counted in (repeats // 10, repeats):
            where.wait()
            started = time.perf_counter()
            for _ in range(counted):
                dist.all_reduce(number, group=group)
            where.wait()
            took[name] = (time.perf_counter() - started) / counted * 1e6
    return ", ".join(f"{name} {microseconds:.1f} us" for name, microseconds in took.items())


def exchanges(where: Where) -> str:
    """Many all-to-alls of unequal sizes give what was sent, and take no memory."""
    grid = where.start(tp=2)
    repeats, me = int(where.of(200_000, 500)), grid.get_local_rank("tp")
    before = 0.0
    for number in range(repeats):
        sizes = [[1 + (number + a + 2 * b) % 5 for b in range(2)] for a in range(2)]
        send, receive = sizes[me], [sizes[other][me] for other in range(2)]
        rows = torch.full((sum(send), 2), float(me), device=where.device)
        got = all_to_all(rows, "tp", send=send, receive=receive)
        if number % 100 == 0:
            assert got[:, 0].tolist() == [0.0] * receive[0] + [1.0] * receive[1]
        if number == repeats // 2:
            where.wait()
            before = where.memory()
    where.wait()
    grown = where.memory() - before
    assert grown < 64, f"{grown:.0f} MiB more after half of {repeats} exchanges"
    return f"{repeats:,}, {grown:.0f} MiB more in the second half"


def never_comes(where: Where) -> str:
    """A rank that never comes to the first use of a group that is not connected is named."""
    timeout = where.of(20.0, 4.0)
    grid = where.start(dp=2, cp=2, watch=True, timeout=timeout)
    rank, told, started = grid.rank, "", time.monotonic()
    if rank != 3:
        try:
            with named_failures(grid):
                all_reduce(where.ones(), "dp_cp")
                where.wait()
        except CommGridError as error:
            told = str(error)
        assert "rank 3" in told, told
    took = time.monotonic() - started
    meet(rank, 4)
    return "" if rank == 3 else f"after {took:.0f} s: {told.splitlines()[0][:70]}"


def slow_stage(where: Where) -> str:
    """A stage is later than `startup_timeout` for its first message, and nothing fails."""
    startup = where.of(15.0, 2.0)
    grid = where.start(pp=2, connect="none", startup_timeout=startup, timeout=120.0)
    if grid.rank == 0:
        time.sleep(1.5 * startup)
    assert all_reduce(where.ones(), "pp").tolist() == [2.0] * 4
    return f"{1.5 * startup:g} s late"


def ordered(where: Where) -> str:
    """`verify="order"` tells of two calls that half of the ranks make the other way round."""
    grid = where.start(tp=2, share="all", verify="order", timeout=60.0)
    all_reduce(where.ones(), "tp")
    told = ""
    works: list[Any] = []
    other = where.ones()[:2].double()  # as many bytes: gloo ends a process that gets more
    try:
        for is_first in (True, False) if grid.get_local_rank("dp") == 0 else (False, True):
            if is_first:
                work = dist.all_reduce(where.ones(), group=grid.get_group("dp"), async_op=True)
            else:
                work = dist.all_reduce(other, group=grid.get_group("pp_dp"), async_op=True)
            works.append(work)
        for work in works:
            work.wait()
        where.wait()
    except GridMismatchError as error:
        told = str(error)
    meet(grid.rank, 4)
    grid.abort()
    assert "first.py" in told, told
    return "named with its line"


def memory(where: Where) -> str:
    """Memory that a connected communicator takes."""
    where.start(tp=2, create=["tp"], connect="all")
    all_reduce(where.ones(), "tp")
    commgrid.destroy()
    where.wait()
    before = where.memory()
    names = ["tp", "dp_tp", "pp_tp"]
    grid = where.start(tp=2, create=names, connect="all")
    for name in names:
        all_reduce(where.ones(2**20), name)
    where.wait()
    made = sum(len(each.ranks) > 1 for each in grid.communicators)
    # The ranks of a GPU share its counter.
    ranks = 1.0 if where.emulated else dist.get_world_size() / torch.cuda.device_count()
    ranks = max(1.0, ranks)
    taken = (where.memory() - before) / made / ranks
    return f"{taken:.1f} MiB each, of {made}"


def captured(where: Where) -> str:
    """An all-reduce on a grid's group in a CUDA graph."""
    grid = where.start(tp=2)
    x, group = where.ones(), grid.get_group("tp")
    dist.all_reduce(x, group=group)
    if where.emulated:
        assert x.tolist() == [2.0] * 4
        return "called, not captured: there is no CUDA"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(x, group=group)
    x.fill_(1.0)
    for _ in range(3):
        graph.replay()
    where.wait()
    assert x.tolist() == [8.0] * 4
    return "replayed three times"


@dataclass(frozen=True)
class Check:
    """One check: a function on some ranks, and its limit in seconds, on a GPU."""

    function: Callable[[Where], str]
    ranks: int
    limit: float


CHECKS = {
    "a slept rank, rebuild, the heartbeat": Check(survives, 3, 240),
    "DTensor Shard(0) to Shard(1)": Check(redistributes, 2, 90),
    "suspend after a pipeline's step": Check(suspends, 2, 90),
    "an all-reduce of 8 bytes": Check(eight_bytes, 2, 90),
    "all-to-alls of unequal sizes": Check(exchanges, 2, 380),
    "a rank that never comes to dp_cp": Check(never_comes, 4, 150),
    "a stage later than startup_timeout": Check(slow_stage, 2, 120),
    "two orders": Check(ordered, 4, 150),
    "memory of a communicator": Check(memory, 2, 90),
    "graph capture": Check(captured, 2, 90),
}


def on_rank(name: str, emulated: bool, rank: int) -> str:
    """Run a check on one rank."""
    if not emulated:
        take_device(rank)
    found = CHECKS[name].function(Where(emulated))
    commgrid.shutdown()
    return found


def run(name: str, emulated: bool) -> str:
    """Run a check on its ranks; return what the first of them tells.

    Raises:
        RanksFailed: with the traceback of every rank that failed.
    """
    check = CHECKS[name]
    return str(
        run_on_ranks(
            on_rank, check.ranks, name, emulated, per_rank=[(r,) for r in range(check.ranks)],
            backend=None, launcher="torchrun", method="fork" if emulated else "spawn",
            environ={"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(HEARTBEAT_SECONDS)},
            timeout=check.limit, check=False,
        )[0]
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all checks; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--emulate", action="store_true", help="over gloo, on the CPU")
    parser.add_argument("--minutes", type=float, default=25.0, help="for all checks (default 25)")
    parser.add_argument("--python", action="append", default=[], metavar="PATH",
                        help="an interpreter with another torch, for a second run")  # fmt: skip
    chosen = parser.parse_args(arguments)
    if not chosen.emulate and not torch.cuda.is_available():
        parser.error("torch.cuda.is_available() is false here; --emulate runs over gloo")
    device = "cpu" if chosen.emulate else torch.cuda.get_device_name()
    print(f"torch {torch.__version__} on {device}", flush=True)
    until = time.monotonic() + 60 * chosen.minutes
    failures = 0
    for name, check in CHECKS.items():
        started = time.monotonic()
        if until - started < check.limit:
            outcome, text = "not run", f"{until - started:.0f} s left, it may take {check.limit:g}"
        else:
            try:
                outcome, text = "passed", run(name, chosen.emulate)
            except Exception as error:
                outcome, text = "FAILED", str(error)
        failures += outcome != "passed"
        print(f"{outcome:8} {time.monotonic() - started:5.1f} s  {name}: {text}", flush=True)
    options = [f"--minutes={chosen.minutes}", *["--emulate"] * chosen.emulate]
    for python in chosen.python:
        failures += subprocess.run([python, __file__, *options], check=False).returncode != 0
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
