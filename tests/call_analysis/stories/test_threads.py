"""Several threads a rank: each waits for itself, and none of them for another rank's other one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.call_analysis.stories.job import Here, correct


class Thread:
    """A thread whose error is its rank's."""

    def __init__(self, function: Callable[..., object], *args: Any) -> None:
        self.error: BaseException | None = None
        self._function, self._args = function, args
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._function(*self._args)
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        self._thread.join()
        if self.error is not None:
            raise self.error


def sums(group: Any, count: int = 1) -> None:
    for _ in range(count):
        x = torch.ones(2)
        dist.all_reduce(x, group=group)
        assert float(x[0]) == dist.get_world_size(group)


@correct(size=2, short=True)
def test_a_thread_waits_long_on_a_group_of_its_own(here: Here) -> None:
    """Each rank waits for the other in a thread: no circle, since both can still come."""
    grid = here.grid(dp=2)
    mine = [dist.new_group([0, 1]) for _ in range(2)]
    waiting = Thread(sums, mine[here.rank])
    sums(grid.get_group("dp"), 3)
    here.now(open=True)
    sums(mine[1 - here.rank])
    waiting.join()
    here.now()


@correct(size=2, nccl=False, short=True)
def test_a_receiver_thread(here: Here) -> None:
    """It takes requests while the main thread trains; the last request ends it."""
    grid = here.grid(dp=2)
    control = dist.new_group([0, 1])
    other = 1 - here.rank

    def takes() -> None:
        x = torch.zeros(1)
        while float(x) != 9:
            dist.recv(x, other, control)

    taking = Thread(takes)
    for step in range(4):
        sums(grid.get_group("dp"))
        if step == here.rank:
            dist.send(torch.ones(1), other, control)
    here.now(open=True)
    dist.send(torch.full((1,), 9.0), other, control)
    taking.join()
    here.now()


@correct()
def test_a_checkpoint_thread_with_barriers(here: Here) -> None:
    """A background save meets the others' on a group of its own, at other times than the steps."""
    grid = here.grid(tp=2)
    saving = dist.new_group()
    thread = Thread(lambda: [dist.barrier(saving) for _ in range(2)]) if here.rank else None
    for _ in range(5):
        sums(grid.get_group("tp"))
        sums(grid.get_group("dp"))
    here.now(open=True)
    if thread is None:
        for _ in range(2):
            dist.barrier(saving)
    else:
        thread.join()
    here.now()


@correct(short=True)
def test_two_threads_wait_for_two_ranks(here: Here) -> None:
    """Rank 0's threads wait for ranks 1 and 2, which wait for rank 0's main thread."""
    grid = here.grid(dp=4)
    pairs = {other: dist.new_group([0, other]) for other in (1, 2)}
    threads = [Thread(sums, pairs[other], 2) for other in (1, 2)] if here.rank == 0 else []
    sums(grid.get_group("dp"))
    here.now(open=True)
    if here.rank in pairs:
        sums(pairs[here.rank], 2)
    for each in threads:
        each.join()
    here.now()


@correct(untraced=True)
def test_ddp_beside_a_grid(here: Here) -> None:
    """Its collectives come from C++, on autograd's thread; the grid's are in between."""
    grid = here.grid(tp=2)
    model = nn.parallel.DistributedDataParallel(
        nn.Linear(8, 8), process_group=grid.get_group("dp"), bucket_cap_mb=1
    )
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        sums(grid.get_group("tp"))
        sums(grid.get_group("dp"))
    here.now(ask=2)


@correct()
def test_asynchronous_calls_waited_for_by_a_pool(here: Here) -> None:
    grid = here.grid(tp=2)
    works = []
    for name in ("tp", "dp", "dp_tp") * 2:
        x = torch.ones(3)
        works.append(dist.all_reduce(x, group=grid.get_group(name), async_op=True))
    threads = [Thread(work.wait) for work in (works if here.rank % 2 else works[::-1])]
    for each in threads:
        each.join()
    here.now()
