"""`initialize(verify="order")`: what members issue is compared while they issue it.

Every case is a function of a grid's groups that four ranks run. A line that an error has to name
ends in `# <-`.
"""

from __future__ import annotations

import inspect
import os
import re
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid import CommGridError, GridMismatchError, SpecError, Timeouts
from commgrid.recording.order_check import MOMENT
from commgrid.testing import run_on_ranks
from commgrid.torch_compat import interposer as torch_calls
from tests.waiting import until

FOREVER = 1000.0
"""Seconds that a collective may take: no test lasts so long, and an error did not wait."""
LONG = 1.6 * MOMENT
"""Seconds after which ranks that wait have looked at what others have found."""


def two_names(grid: Any, swapped: bool, blocking: bool) -> list[float]:
    """3 and 300 are summed on dp and on pp_dp, which are the same ranks here; in another order on
    ranks that are `swapped`."""
    first, second = torch.full((1,), 1.0 + grid.rank), torch.full((1,), 100.0 * (1 + grid.rank))
    one, other = grid.get_group("dp"), grid.get_group("pp_dp")
    works: list[Any] = []
    for turn in (1, 0) if swapped else (0, 1):
        if turn == 0:
            work = dist.all_reduce(first, group=one, async_op=not blocking)  # <-
        else:
            work = dist.all_reduce(second, group=other, async_op=not blocking)  # <-
        works.append(work)
    for work in works:
        if work is not None:
            work.wait()
    return [float(first), float(second)]


def reproduction(share: str, blocking: bool, swap: bool) -> Any:
    """Two ranks of a dp group; the other two do the same."""
    grid = commgrid.initialize(tp=2, share=share, verify="order", timeout=FOREVER)
    shared = grid.get_group("dp") is grid.get_group("pp_dp")
    assert shared == (share != "aliases")
    try:
        found: Any = two_names(grid, swap and grid.get_local_rank("dp") == 1, blocking)
    except GridMismatchError as error:
        found = str(error)
    ended(grid)
    return found


def ended(grid: Any) -> None:
    """Once all have come here, so that an error is not that of a rank which has left."""
    store = dist.distributed_c10d._get_default_store()
    store.add("ended", 1)
    until(lambda: store.add("ended", 0) == grid.world_size, "all have come")
    grid.abort()


LINES = [
    f"test_order_check.py:{inspect.getsourcelines(two_names)[1] + i} two_names"
    for i, line in enumerate(inspect.getsourcelines(two_names)[0]) if line.endswith("# <-\n")
]  # fmt: skip


@pytest.mark.parametrize("blocking", [False, True], ids=["async", "blocking"])
@pytest.mark.parametrize("share", ["aliases", "all"])
def test_two_names_in_opposite_order(share: str, blocking: bool) -> None:
    """Right on communicators of their own if calls are asynchronous, else an error.

    On one communicator the calls go together as they are, whose sums are then of one another's
    numbers: only their lines differ, as they may in a correct program.
    """
    found = run_on_ranks(reproduction, 4, share, blocking, True, backend=None, launcher="torchrun")
    if share == "all":
        assert found == [[301.0, 103.0], [402.0, 204.0], [103.0, 301.0], [204.0, 402.0]]
        return
    if not blocking:
        assert found == [[4.0, 400.0], [6.0, 600.0]] * 2
        return
    for text in found:
        assert isinstance(text, str), found
        assert all(line in text for line in LINES), text
        assert "rank 0" in text or "rank 1" in text


@pytest.mark.full("*")
@pytest.mark.parametrize("share", ["aliases", "all"])
def test_two_names_in_one_order(share: str) -> None:
    found = run_on_ranks(reproduction, 4, share, True, False, backend=None, launcher="torchrun")
    assert found == [[4.0, 400.0], [6.0, 600.0]] * 2


def shapes(group: Any, rank: int) -> None:
    dist.all_reduce(torch.ones(3 if rank == 1 else 2), group=group)


def dtypes(group: Any, rank: int) -> None:
    dist.all_reduce(torch.ones(2, dtype=torch.float64 if rank == 1 else None), group=group)


def bytes_alike(group: Any, rank: int) -> None:
    """As many bytes, which gloo cuts at elements, so that its messages differ."""
    x = torch.ones(2, dtype=torch.float64) if rank == 1 else torch.ones(4)
    dist.all_reduce(x, group=group)


def sizes_under_another_reduction(group: Any, rank: int) -> None:
    odd = rank == 1
    most = dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM
    dist.all_reduce(torch.ones(300 if odd else 2), most, group=group)


def operations(group: Any, rank: int) -> None:
    (dist.barrier if rank == 1 else lambda g: dist.all_reduce(torch.ones(2), group=g))(group)


def roots(group: Any, rank: int) -> None:
    dist.broadcast(torch.ones(2), 1 if rank == 1 else 0, group=group)
    dist.barrier(group)  # the root's broadcast may have ended


def transfers(group: Any, rank: int) -> None:
    if rank == 1:
        dist.send(torch.ones(4), 2, group)
    elif rank == 2:
        dist.recv(torch.ones(3), 1, group)
    else:
        raise GridMismatchError("rank 1, rank 2: not of mine")


DIFFERENT = [
    shapes, dtypes, bytes_alike, sizes_under_another_reduction, operations, roots, transfers
]  # fmt: skip


def different(index: int) -> str:
    grid = commgrid.initialize(tp=2, verify="order", timeout=FOREVER)
    text = ""
    try:
        DIFFERENT[index](grid.get_group("dp_tp"), grid.rank)
    except CommGridError as error:
        text = str(error)
    ended(grid)
    return text


@pytest.mark.full("dtypes", "sizes*", "roots", "operations")
@pytest.mark.parametrize("index", range(len(DIFFERENT)), ids=[each.__name__ for each in DIFFERENT])
def test_every_member_is_told_at_the_first_difference(index: int) -> None:
    for text in run_on_ranks(different, 4, index, backend=None, launcher="torchrun"):
        assert "rank 1" in text
        assert "of mine" in text or f"{DIFFERENT[index].__name__}" in text
    # Rank 3 is no neighbour of rank 1.
    assert "of mine" in text or re.search(r" \(found on rank [0-2]\)$", text)


def continued() -> list[float]:
    """Ranks 0 and 1 catch the error of a call of theirs, and all then make correct ones."""
    grid = commgrid.initialize(tp=2, verify="order", timeout=FOREVER)
    if grid.get_local_rank("dp") == 0:
        with pytest.raises(GridMismatchError):
            dist.all_reduce(torch.ones(2 + grid.rank), group=grid.get_group("tp"))
    x = torch.ones(1)
    for late in (0, 3):
        if grid.rank == late:
            time.sleep(LONG)
        dist.all_reduce(x, group=grid.get_group("dp_tp"))
    ended(grid)
    return x.tolist()


def test_an_error_that_was_caught_is_not_raised_by_later_calls() -> None:
    assert run_on_ranks(continued, 4, backend=None, launcher="torchrun") == [[16.0]] * 4


class Interrupts:
    """Raises at a rank's first call of float64, while another thread issues one on the group."""

    is_over = False

    def begins(self, group: dist.ProcessGroup, made: Any) -> None:
        if made.dtype == "float64" and not self.is_over:
            self.is_over = True
            thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(2),),
                                      kwargs={"group": group})  # fmt: skip
            thread.start()
            thread.join()
            raise ValueError("refused")

    def issued(self, *_: Any) -> None: ...
    def failed(self, *_: Any) -> None: ...
    def waits(self, *_: Any) -> None: ...
    def waited(self, *_: Any) -> None: ...


def refused_amid_another() -> list[float]:
    # Rank 1 waits for `answer` seconds whether rank 0 issues the call that is refused.
    seconds = Timeouts(answer=MOMENT)
    grid = commgrid.initialize(verify="order", timeout=FOREVER, timeouts=seconds)
    group, x, interrupts = grid.get_group("dp"), torch.ones(2), Interrupts()
    if grid.rank == 0:
        torch_calls.listen(interrupts)
        with pytest.raises(ValueError, match="refused"):
            dist.all_reduce(x.double(), group=group)
        torch_calls.stop(interrupts)
    else:
        time.sleep(LONG)
        dist.all_reduce(x, group=group)
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    commgrid.shutdown()
    return x.tolist()


def test_a_refused_call_is_taken_back_where_another_thread_has_issued_one() -> None:
    found = run_on_ranks(refused_amid_another, 2, backend=None, launcher="torchrun")
    assert found == [[2.0, 2.0]] * 2


def allowed() -> list[float]:
    """Calls that may differ, and calls from different lines."""
    grid = commgrid.initialize(tp=2, verify="order")
    group, rank = grid.get_group("dp_tp"), grid.rank
    counts = [[(i + j) % 3 + 1 for j in range(4)] for i in range(4)]
    mine, theirs = counts[rank], [row[rank] for row in counts]
    out = torch.empty(sum(theirs))
    dist.all_to_all_single(out, torch.ones(sum(mine)), theirs, mine, group=group)
    if rank % 2:
        dist.all_reduce(torch.ones(2), group=group)
    else:
        dist.all_reduce(torch.ones(2), group=group)
    x = torch.full((2,), float(rank))
    works = [
        dist.isend(x, (rank + 1) % 4, group=group),
        dist.irecv(torch.empty(2), (rank - 1) % 4, group=group),
    ]
    for work in works:
        assert work is not None
        work.wait()
    lists = [torch.empty(2) for _ in range(4)]
    dist.all_gather(lists, x, group=group)
    for _ in range(30):
        dist.all_reduce(x, group=grid.get_group("tp"))
        x /= 2
    if rank == 0:
        time.sleep(2.5)  # longer than the others wait before they look, and find it computing
    dist.all_reduce(x, group=group)
    commgrid.shutdown()
    return [float(each[0]) for each in lists]


def test_what_need_not_be_alike_is_not_compared() -> None:
    assert run_on_ranks(allowed, 4, backend=None, launcher="torchrun") == [[0.0, 1.0, 2.0, 3.0]] * 4


def half_asked() -> str:
    """Rank 0 alone compares, and rank 1 gets no message."""
    verify = "order" if int(os.environ["RANK"]) == 0 else None
    grid = commgrid.initialize(verify=verify)
    text = ""
    if grid.rank == 0:
        with pytest.raises(GridMismatchError) as caught:
            dist.all_reduce(torch.ones(2), group=grid.get_group("dp"))
        text = str(caught.value)
    ended(grid)
    return text


@pytest.mark.full
def test_a_rank_that_does_not_compare_is_named() -> None:
    first, _ = run_on_ranks(half_asked, 2, backend=None, launcher="torchrun")
    assert first == (
        "rank 1 runs without verify='order'; pass initialize(verify='order') on every rank"
    )


def restarted() -> int:
    import threading

    for _ in range(3):
        grid = commgrid.initialize(tp=2, verify="order")
        dist.all_reduce(torch.ones(2), group=grid.get_group("dp_tp"))
        grid.suspend("tp")
        grid.resume("tp")
        dist.all_reduce(torch.ones(2), group=grid.get_group("tp"))
        commgrid.destroy()
    return sum("mailbox" in thread.name for thread in threading.enumerate())


def test_it_ends_with_the_grid_and_knows_groups_that_were_resumed() -> None:
    assert run_on_ranks(restarted, 4, backend=None, launcher="torchrun") == [0] * 4


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(SpecError, match="verify='sums': expected None, or 'order'"):
        commgrid.initialize(verify="sums")
