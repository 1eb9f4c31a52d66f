"""Failures of one rank: every other rank gets an error that names it, in time.

Each start has a timeout of a few seconds, and every error has to come within `LATE` more.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commgrid
from commgrid import CommGridError, GridMismatchError, HyperCommGrid
from commgrid.collectives import all_reduce
from commgrid.failures import named_failures
from commgrid.pipeline import Pipeline
from tests.flags import hear, meet, tell
from tests.gpu.on_gpus import HEARTBEAT_SECONDS, LIMIT, Where, nccl_variables, ranks_on_gpus

TIMEOUT = 5.0
LATE = 10.0
"""Seconds after the timeout by which a rank is named."""


def variables(rank: int) -> dict[str, str]:
    return {**nccl_variables(rank), "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(HEARTBEAT_SECONDS)}


def survivors_of(
    program: Callable[..., str], victim: int, world: int, where: Where, *args: Any,
    environ: Callable[[int], dict[str, str]] = variables, timeout: float = LIMIT,
) -> dict[int, str]:  # fmt: skip
    """Return the results of all ranks but one, and check that no process had to be killed.

    A survivor's exit status is not checked: NCCL's threads may be stuck.
    """
    with ranks_on_gpus(
        program, world, where, *args, where=where, environ=environ, killable=True,
        timeout=timeout,
    ) as ranks:  # fmt: skip
        ends = ranks.wait()
    said = "\n".join(map(str, ends.values()))
    assert not any(end.late for end in ends.values()), said
    others = [rank for rank in range(world) if rank != victim]
    assert all(ends[rank].returned for rank in others), said
    return {rank: ends[rank].value for rank in others}


def told(where: Where, grid: HyperCommGrid, call: Callable[[], object]) -> str:
    """The error of a call, and after how many seconds it came."""
    text, started = "no error", time.monotonic()
    try:
        with named_failures(grid):
            call()
            where.wait()
    except CommGridError as error:
        text = str(error)
    took = time.monotonic() - started
    assert took < grid_timeout(where) + LATE, f"after {took:.0f} s: {text}"
    return f"after {took:.0f} s: {text}"


def grid_timeout(where: Where) -> float:
    return where.of(TIMEOUT, 2.0)


def named(victim: int, found: dict[int, str]) -> str:
    """Check that the errors of all survivors name a rank; return the first one's."""
    for rank, text in found.items():
        wanted = rf"rank {victim}\)? (is|has|did|says|failed|waits for nothing)\b"
        assert re.search(wanted, text), f"rank {rank} was told {text}"
    return next(iter(found.values())).splitlines()[0]


def start(where: Where, **options: Any) -> HyperCommGrid:
    return commgrid.initialize(
        backend=where.backend, watch=True, timeout=grid_timeout(where), **options
    )


def ddp(where: Where, grid: HyperCommGrid) -> object:
    return DistributedDataParallel(
        nn.Linear(4, 4, device=where.device), process_group=grid.get_group("dp_cp"),
        device_ids=None if where.emulated else [torch.cuda.current_device()],
    )  # fmt: skip


def call(where: Where, grid: HyperCommGrid) -> object:
    return all_reduce(where.ones(), "dp_cp")


def never_comes(where: Where, first_use: Callable[..., object], rank: int) -> str:
    grid, text = start(where, dp=2, cp=2), ""
    if rank != 3:
        text = told(where, grid, lambda: first_use(where, grid))
    meet(rank, 4)
    return text


def test_a_rank_that_never_comes_to_the_first_call(where: Where, record_property: Any) -> None:
    record_property("found", named(3, survivors_of(never_comes, 3, 4, where, call)))


def test_a_rank_that_never_comes_to_ddps_constructor(where: Where, record_property: Any) -> None:
    record_property("found", named(3, survivors_of(never_comes, 3, 4, where, ddp)))


def sleeps_before(where: Where, rank: int) -> str:
    grid, text = start(where, dp=4), ""
    if rank != 2:
        text = told(where, grid, lambda: all_reduce(where.ones(), "dp"))
    meet(rank, 4)
    return text


def test_a_rank_that_sleeps_before_the_first_all_reduce(where: Where, record_property: Any) -> None:
    record_property("found", named(2, survivors_of(sleeps_before, 2, 4, where)))


class Sleepy(nn.Module):
    """A stage that sleeps in its third forward, if it is the last of its pipeline."""

    def __init__(self, where: Where, rank: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, device=where.device)
        self.rank, self.calls = rank, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.rank == 2 and self.calls == 3:
            hear("0 was told", "1 was told")
            os._exit(0)
        y: torch.Tensor = self.linear(x)
        return y


def sleeps_in_a_pipeline(where: Where, rank: int) -> str:
    grid, text = start(where, pp=3), ""
    pipeline = Pipeline(
        Sleepy(where, rank), "1f1b", num_microbatches=2, loss=nn.functional.mse_loss
    )
    batch = list(torch.randn(2, 4, 8, device=where.device))
    pipeline.step(batch, targets=batch)
    text = told(where, grid, lambda: pipeline.step(batch, targets=batch))
    tell(f"{rank} was told")
    meet(rank, (0, 1))
    return text


def test_a_rank_that_sleeps_in_a_pipeline(where: Where, record_property: Any) -> None:
    record_property("found", named(2, survivors_of(sleeps_in_a_pipeline, 2, 3, where)))


def dies_while_connecting(where: Where, rank: int) -> str:
    grid = start(where, dp=3, connect="none")
    if rank == 2:
        seconds = where.of(0.2, 0.0)  # NCCL takes longer than that to connect
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if where.emulated:  # gloo connects at once
            time.sleep(60)
    text = told(where, grid, lambda: all_reduce(where.ones(), "dp"))
    meet(rank, (0, 1))
    return text


def test_a_rank_that_is_killed_while_it_connects(where: Where, record_property: Any) -> None:
    record_property("found", named(2, survivors_of(dies_while_connecting, 2, 3, where)))


def ordered(where: Where, rank: int) -> str:
    """Half of the ranks make two calls the other way round."""
    grid = start(where, tp=2, share="all", verify="order")
    all_reduce(where.ones(), "tp")
    text, works = "no error", []
    other = where.ones()[:2].double()  # as many bytes: gloo ends a process that gets more
    try:
        for is_first in (True, False) if grid.get_local_rank("dp") == 0 else (False, True):
            if is_first:
                work = dist.all_reduce(where.ones(), group=grid.get_group("dp"), async_op=True)
            else:
                work = dist.all_reduce(other, group=grid.get_group("pp_dp"), async_op=True)
            works.append(work)
        for work in works:
            assert work is not None
            work.wait()
        where.wait()
    except GridMismatchError as error:
        text = str(error)
    meet(rank, 4)
    grid.abort()
    return text


def test_two_orders_are_named_with_their_line(where: Where, record_property: Any) -> None:
    found = survivors_of(ordered, -1, 4, where)
    for text in found.values():
        assert "test_failures_on_gpus.py" in text, text
    record_property("found", found[0].splitlines()[0])


def sleeps_in_an_all_reduce(where: Where, rank: int) -> str:
    """The others rebuild, and live past the limit of NCCL's heartbeat monitor."""
    grid = start(where)
    all_reduce(where.ones(), "dp")
    if rank == 2:
        hear("0 has lived", "1 has lived")
        return "slept"
    text = told(where, grid, lambda: all_reduce(where.ones(), "dp"))
    assert commgrid.rebuild(ranks=[0, 1]) is not None
    until, goes_on = time.monotonic() + where.of(HEARTBEAT_SECONDS + 25.0, 2.0), True
    while goes_on:
        # Rank 0's clock decides for both.
        goes_on = bool(all_reduce(where.ones(1) * (rank == 0 and time.monotonic() < until), "dp"))
        time.sleep(0.5)
    tell(f"{rank} has lived")
    meet(rank, (0, 1))
    return text


def test_a_rank_that_sleeps_in_an_all_reduce(where: Where, record_property: Any) -> None:
    found = survivors_of(sleeps_in_an_all_reduce, 2, 3, where, timeout=150.0)
    record_property("found", named(2, found))
