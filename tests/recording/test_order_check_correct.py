"""Correct programs that `initialize(verify="order")` neither accuses nor holds.

Every case is a function of a grid of four ranks, tp 2 and dp 2, that they all run; it returns what
it computes, which is compared with what it has to be.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import batch_isend_irecv  # by name, before anything listens

import commgrid
from commgrid import GridMismatchError
from commgrid.recording import order_check
from commgrid.testing import run_on_ranks
from tests.waiting import until

LONG = 2.6 * order_check.MOMENT
"""Seconds after which ranks that wait have looked at what others do, and have asked them."""


def peer(grid: Any) -> int:
    """The other rank of tp."""
    ranks = dist.get_process_group_ranks(grid.get_group("tp"))
    return ranks[1 - grid.get_local_rank("tp")]


def tags(grid: Any) -> list[float]:
    """Messages of different sizes are received in another order than sent, by their tags."""
    group, x, y = grid.get_group("tp"), torch.full((2,), 2.0), torch.full((3,), 3.0)
    other = 1 - grid.get_local_rank("tp")
    if other:
        works = [group.send([x], other, 5), group.send([y], other, 6)]
    else:
        x, y = torch.zeros(2), torch.zeros(3)
        works = [group.recv([y], other, 6), group.recv([x], other, 5)]
    for work in works:
        work.wait()
    return [float(x.sum()), float(y.sum())]


def threads(grid: Any) -> list[float]:
    """Each rank waits long on two threads: 0 for the peer of one group, 1 for that of the other."""
    found = [0.0, 0.0]

    def run(place: int, name: str, late: bool) -> None:
        x = torch.ones(1)
        if late:
            time.sleep(LONG)
        dist.all_reduce(x, group=grid.get_group(name))
        found[place] = float(x)

    first = grid.get_local_rank("tp") == 0
    rows = [(0, "tp", first), (1, "dp_tp", not first)]
    running = [threading.Thread(target=run, args=row) for row in rows]
    for each in running:
        each.start()
    for each in running:
        each.join()
    return found


def made_again(grid: Any) -> list[float]:
    """A call raises on one rank before it is issued, is caught and made again."""
    x = torch.ones(2)
    for turn in range(3):
        if grid.rank == turn:
            with pytest.raises((RuntimeError, ValueError)):
                grid.get_group("dp_tp").allreduce([x, torch.ones(1, dtype=torch.int32)]).wait()
        dist.all_reduce(x, group=grid.get_group("dp_tp"))
    return x.tolist()


def fallback(grid: Any) -> list[float]:
    """Ranks try what the backend refuses, one after the other, and then do it another way."""
    x = torch.full((2,), float(grid.rank))
    for _ in range(2):
        time.sleep(0.1 * grid.rank)
        try:
            dist.all_reduce(x, dist.ReduceOp.AVG, group=grid.get_group("dp_tp"))
        except (RuntimeError, ValueError):
            dist.all_reduce(x, group=grid.get_group("dp_tp"))
            x /= 4
    return x.tolist()


def spellings(grid: Any) -> list[float]:
    """Ranks make one call in the forms that torch has for it."""
    group, x = grid.get_group("dp_tp"), torch.full((2,), float(grid.rank))
    most = dist.ReduceOp.MAX
    given = dist.AllreduceOptions()
    given.reduceOp = most
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(x, most, group=group),
        lambda: group.allreduce([x], given).wait(),
        lambda: group.allreduce(tensors=[x], op=most).wait(),
        lambda: group.allreduce(x, op=most).wait(),
    ]
    calls[grid.rank]()
    root = 3
    if grid.rank % 2:
        dist.broadcast(x, root, group)
    else:
        group.broadcast(tensor=x, root=root).wait()
    return x.tolist()


def batches(grid: Any) -> list[float]:
    group, other = grid.get_group("tp"), peer(grid)
    x = torch.zeros(2)
    for _ in range(3):
        ops = [
            dist.P2POp(dist.irecv, x, other, group),
            dist.P2POp(dist.isend, torch.full((2,), float(grid.rank)), other, group),
        ]
        for work in batch_isend_irecv(ops):
            work.wait()
    return [float(x[0]) - other]


def waited_late(grid: Any) -> list[float]:
    """Some ranks wait at once for what others have issued, and wait for later."""
    x, y = torch.ones(2), torch.ones(3)
    works = [
        dist.all_reduce(x, group=grid.get_group("tp"), async_op=True),
        dist.all_reduce(y, group=grid.get_group("dp"), async_op=True),
    ]
    if grid.rank in (0, 3):
        time.sleep(LONG)
    for work in works if grid.rank % 2 else works[::-1]:
        assert work is not None
        work.wait()
    return [float(x[0]), float(y[0])]


def any_source(grid: Any) -> list[float]:
    """Rank 0 takes messages from any rank, more than once, before and after others are late."""
    group, x = grid.get_group("dp_tp"), torch.full((1,), 1.0 + grid.rank)
    total = 0.0
    for turn in range(2):
        if grid.rank == 0:
            for _ in range(3):
                dist.recv(x, None, group)
                total += float(x)
        else:
            if grid.rank == 2 and turn:
                time.sleep(LONG)
            dist.send(x, 0, group)
    return [total] if grid.rank == 0 else [18.0]


def late_sides(grid: Any) -> list[float]:
    """A sender, a receiver and a member of a collective in turn are late."""
    group, x = grid.get_group("tp"), torch.full((1 << 16,), 1.0)
    other = peer(grid)
    for late in (0, 1):
        if grid.get_local_rank("tp") == late:
            time.sleep(LONG)
        dist.send(x, other, group) if grid.get_local_rank("tp") == 0 else dist.recv(x, other, group)
        dist.barrier(grid.get_group("dp_tp"))
    return [float(x.sum()) / (1 << 16)]


PROGRAMS: dict[Callable[[Any], list[float]], list[float]] = {
    tags: [4.0, 9.0], threads: [2.0, 4.0], made_again: [64.0, 64.0],
    fallback: [1.5, 1.5], spellings: [3.0, 3.0],
    batches: [0.0], waited_late: [2.0, 2.0], any_source: [18.0], late_sides: [1.0],
}  # fmt: skip


def runs(index: int) -> list[float]:
    grid = commgrid.initialize(tp=2, verify="order", timeout=100.0)
    found = list(PROGRAMS)[index](grid)
    commgrid.shutdown()
    return found


@pytest.mark.parametrize("index", range(len(PROGRAMS)), ids=[each.__name__ for each in PROGRAMS])
def test_a_correct_program_is_not_accused(index: int) -> None:
    found = run_on_ranks(runs, 4, index, backend=None, launcher="torchrun", timeout=100)
    assert found == [list(PROGRAMS.values())[index]] * 4


def two_grids() -> list[float]:
    """Training, then an evaluation whose groups have the same names and other members."""
    found = []
    for tp in (2, 1, 4, 2):
        grid = commgrid.initialize(tp=tp, verify="order", timeout=100.0)
        x = torch.ones(tp)
        for _ in range(tp):
            dist.all_reduce(x, group=grid.get_group("tp"))
        dist.all_reduce(x, group=grid.get_group("dp_tp"))
        found.append(float(x[0]))
        commgrid.destroy()
    commgrid.shutdown()
    return found


def test_grids_in_turn_whose_groups_have_equal_names() -> None:
    found = run_on_ranks(two_grids, 4, backend=None, launcher="torchrun", timeout=100)
    assert found == [[16.0, 4.0, 1024.0, 16.0]] * 4


def unknown_groups() -> list[float]:
    """Groups that torch's registry does not know: made without it, and destroyed."""
    grid = commgrid.initialize(trace=True, verify="order", timeout=100.0)
    store = dist.PrefixStore("mine", dist.distributed_c10d._get_default_store())
    bare = dist.ProcessGroup(store, grid.rank, 2)
    made = dist.distributed_c10d.ProcessGroupGloo(store, grid.rank, 2)
    bare._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, made)
    x = torch.ones(2)
    bare.allreduce([x]).wait()
    known = dist.new_group([0, 1])
    dist.all_reduce(x, group=known)
    dist.destroy_process_group(known)
    dist.all_reduce(x, group=grid.get_group("dp"))
    commgrid.trace.stop()
    dist.all_reduce(x, group=grid.get_group("dp"))
    commgrid.shutdown()
    return x.tolist()


def test_groups_that_torch_does_not_know_do_not_raise() -> None:
    found = run_on_ranks(unknown_groups, 2, backend=None, launcher="torchrun", timeout=100)
    assert found == [[16.0, 16.0]] * 2


def circle() -> str:
    """Three ranks, each in the group of two that the next one comes to later."""
    pairs = {"a": [0, 1], "b": [1, 2], "c": [0, 2]}
    groups = {name: {"ranks": [pair]} for name, pair in pairs.items()}
    grid = commgrid.initialize(verify="order", timeout=100.0, groups=groups)
    x, text = torch.ones(1), ""
    try:
        for name in (("a", "c"), ("b", "a"), ("c", "b"))[grid.rank]:
            dist.all_reduce(x, group=grid.get_group(name))
    except GridMismatchError as error:
        text = str(error)
    store = dist.distributed_c10d._get_default_store()
    store.add("ended", 1)
    until(lambda: store.add("ended", 0) == 3, "all have come")
    if grid.rank == 1:
        time.sleep(LONG)
    dist.all_reduce(x, group=grid.get_group("dp"))  # of a program that has caught it
    store.add("left", 1)
    until(lambda: store.add("left", 0) == 3, "all have come again")
    grid.abort()
    return text


def test_ranks_that_wait_in_a_circle_are_told_on_each_once() -> None:
    for text in run_on_ranks(circle, 3, backend=None, launcher="torchrun", timeout=60):
        assert text.startswith("deadlock: ranks 0-2 wait for each other: "), text
        for rank, name in enumerate("abc"):
            assert (
                f"rank {rank} waits in {name} all_reduce 0 at test_order_check_correct.py" in text
            )
