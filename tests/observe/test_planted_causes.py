"""Thirty and more ways to go wrong, each run on four ranks, each named with rank, group and line.

A cause is a function that all ranks run; the line that is at fault ends in `# <-`, and where there
is a second one, that in `# <=`.
"""

from __future__ import annotations

import contextlib
import inspect
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid.observe import diagnosis, trace_files
from commgrid.observe.findings import Diagnosis
from commgrid.runtime import recorder, torch_calls
from commgrid.testing import run_on_ranks

TIMEOUT = 1.0  # of collectives: what hangs, hangs so long


@dataclass
class Here:
    """What a rank of a cause has at hand: groups tp (0, 1), (2, 3), dp (0, 2), (1, 3), and all."""

    rank: int
    tp: Any
    dp: Any
    all: Any

    def sum(self, group: Any, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        dist.all_reduce(torch.ones(shape or (2,), dtype=dtype), group=group)


@dataclass
class Cause:
    """One: what it is called, whose doing it is, and on which group.

    `ends` is whether gloo ends the process where it is run, as it does where a message has more
    bytes than are expected. Then nothing is sent.
    """

    function: Callable[[Here], None]
    kind: str
    ranks: tuple[int, ...]
    group: str  # "": of two
    ends: bool


CAUSES: dict[str, Cause] = {}


def cause(kind: str, ranks: tuple[int, ...], group: str, ends: bool = False) -> Callable[..., Any]:
    def register(function: Callable[[Here], None]) -> Callable[[Here], None]:
        CAUSES[function.__name__] = Cause(function, kind, ranks, group, ends)
        return function

    return register


# -- a call that is missing ------------------------------------------------------------


@cause("skipped call", (3,), "tp")
def skipped_in_a_loop(here: Here) -> None:
    for step in range(3):
        dist.all_reduce(torch.ones(2), group=here.dp)
        if here.rank != 3 or step != 2:
            dist.all_reduce(torch.ones(2), group=here.tp)  # <=
        dist.all_reduce(torch.ones(2), group=here.all)  # <-


@cause("skipped call", (1,), "dp_tp", ends=True)
def skipped_before_another_of_the_group(here: Here) -> None:
    for step in range(3):
        if here.rank != 1 or step < 2:
            dist.all_reduce(torch.ones(3), group=here.all)  # <=
        dist.all_reduce(torch.ones(2), group=here.all)  # <-


@cause("skipped call", (2,), "dp_tp", ends=True)
def skipped_where_the_rest_goes_on(here: Here) -> None:
    x = torch.ones(2)
    works = []
    if here.rank != 2:
        works.append(dist.all_reduce(torch.ones(2), group=here.all, async_op=True))  # <=
    works.append(dist.all_gather([x.clone() for _ in range(4)], x, here.all, async_op=True))  # <-
    dist.barrier(here.all)
    [work.wait() for work in works]


@cause("not entered", (3,), "dp_tp")
def returned_too_early(here: Here) -> None:
    dist.all_reduce(torch.ones(2), group=here.all)  # <-
    if here.rank == 3:
        time.sleep(2 * TIMEOUT)
        return
    dist.all_reduce(torch.ones(4), group=here.all)  # <=


@cause("not entered", (0,), "dp")
def a_loop_that_is_one_shorter(here: Here) -> None:
    for _ in range(3 if here.rank == 0 else 4):
        dist.all_reduce(torch.ones(2), group=here.dp)  # <-
    time.sleep(2 * TIMEOUT if here.rank == 0 else 0)


@cause("extra call", (2,), "dp_tp", ends=True)
def one_call_too_many(here: Here) -> None:
    x = torch.ones(2)
    works = []
    if here.rank == 2:
        works.append(dist.all_reduce(torch.ones(7), group=here.all, async_op=True))  # <-
    works.append(dist.all_gather([x.clone() for _ in range(4)], x, here.all, async_op=True))  # <=
    works.append(dist.all_reduce(torch.ones(9), group=here.all, async_op=True))
    [work.wait() for work in works]


# -- a call that is another ------------------------------------------------------------


@cause("other operation", (2,), "dp_tp", ends=True)
def another_operation(here: Here) -> None:
    x = torch.ones(2)
    if here.rank == 2:
        dist.broadcast(x, 2, group=here.all)  # <-
    else:
        dist.all_reduce(x, group=here.all)  # <=


@cause("other operation", (1,), "tp", ends=True)
def a_barrier_instead(here: Here) -> None:
    if here.rank == 1:
        dist.barrier(here.tp)  # <-
    else:
        dist.all_reduce(torch.ones(2), group=here.tp)  # <=


@cause("other operation", (3,), "dp_tp", ends=True)
def reduced_instead_of_all_reduced(here: Here) -> None:
    if here.rank == 3:
        dist.reduce(torch.ones(2), 0, group=here.all)  # <-
    else:
        dist.all_reduce(torch.ones(2), group=here.all)  # <=


@cause("other shape", (1,), "dp_tp", ends=True)
def a_batch_of_another_size(here: Here) -> None:
    dist.all_reduce(torch.ones(7 if here.rank == 1 else 8), group=here.all)  # <-


@cause("other shape", (2,), "dp_tp", ends=True)
def a_last_bucket_of_another_size(here: Here) -> None:
    for size in (100, 100, 60 if here.rank == 2 else 50):
        dist.all_reduce(torch.ones(size), group=here.all)  # <-


@cause("other shape", (3,), "dp_tp", ends=True)
def another_slice_scattered(here: Here) -> None:
    size = 12 if here.rank == 3 else 8
    dist.reduce_scatter_tensor(torch.ones(size // 4), torch.ones(size), group=here.all)  # <-


@cause("other dtype", (2,), "dp_tp", ends=True)
def half_precision_on_one(here: Here) -> None:
    dtype = torch.bfloat16 if here.rank == 2 else torch.float32
    dist.all_reduce(torch.ones(8, dtype=dtype), group=here.all)  # <-


@cause("other dtype", (3,), "dp_tp", ends=True)
def double_instead_of_single(here: Here) -> None:
    dtype = torch.float64 if here.rank == 3 else torch.float32
    dist.broadcast(torch.ones(4, dtype=dtype), 0, group=here.all)  # <-


@cause("other root", (1,), "dp_tp", ends=True)
def another_root(here: Here) -> None:
    dist.broadcast(torch.ones(4), 1 if here.rank == 1 else 0, group=here.all)  # <-


# -- another order ---------------------------------------------------------------------


@cause("other order", (1,), "dp_tp", ends=True)
def two_asynchronous_in_another_order(here: Here) -> None:
    works = []
    for turn in (0, 1) if here.rank != 1 else (1, 0):
        if turn == 0:
            works.append(dist.all_reduce(torch.ones(2), group=here.all, async_op=True))  # <=
        else:
            works.append(dist.all_reduce(torch.ones(5), group=here.all, async_op=True))  # <-
    [work.wait() for work in works]


@cause("other order", (0, 2), "dp")
def two_that_look_alike_in_another_order(here: Here) -> None:
    """They end, and the sums are mixed up."""
    works = []
    for turn in (0, 1) if here.rank != 2 else (1, 0):
        if turn == 0:
            works.append(dist.all_reduce(torch.ones(2), group=here.dp, async_op=True))  # <-
        else:
            works.append(dist.all_reduce(torch.full((2,), 9.0), group=here.dp, async_op=True))  # <=
    [work.wait() for work in works]


@cause("deadlock", (0, 1, 3, 2), "")
def two_groups_in_another_order(here: Here) -> None:
    """Rank 0 waits for 1 on tp, 1 for 3 on dp, 3 for 2 on tp, 2 for 0 on dp."""
    if here.rank in (0, 3):
        dist.all_reduce(torch.ones(2), group=here.tp)  # <-
        dist.all_reduce(torch.ones(2), group=here.dp)
    else:
        dist.all_reduce(torch.ones(2), group=here.dp)  # <=
        dist.all_reduce(torch.ones(2), group=here.tp)


@cause("deadlock", (0, 1), "")
def a_group_and_the_one_around_it(here: Here) -> None:
    if here.rank == 0:
        dist.all_reduce(torch.ones(2), group=here.tp)  # <-
        dist.all_reduce(torch.ones(2), group=here.all)
    elif here.rank == 1:
        dist.all_reduce(torch.ones(2), group=here.all)  # <=
        dist.all_reduce(torch.ones(2), group=here.tp)
    else:
        dist.all_reduce(torch.ones(2), group=here.all)


@cause("other group", (3,), "tp")
def dp_instead_of_tp(here: Here) -> None:
    group = here.dp if here.rank == 3 else here.tp
    dist.all_reduce(torch.ones(2), group=group)  # <-
    time.sleep(2 * TIMEOUT if here.rank == 1 else 0)


@cause("other group", (2,), "dp_tp")
def tp_instead_of_all(here: Here) -> None:
    for step in range(2):
        group = here.tp if here.rank == 2 and step else here.all
        dist.all_reduce(torch.ones(3), group=group)  # <-


# -- transfers -------------------------------------------------------------------------


@cause("crossed transfers", (0, 1), "tp")
def both_receive_first(here: Here) -> None:
    x, peer = torch.ones(2), here.rank ^ 1
    if here.rank < 2:
        dist.recv(x, peer, here.tp)  # <-
        dist.send(x, peer, here.tp)


@cause("crossed transfers", (0, 1), "tp")
def both_send_first(here: Here) -> None:
    x, peer = torch.ones(1 << 20), here.rank ^ 1
    if here.rank < 2:
        dist.send(x, peer, here.tp)  # <-
        dist.recv(x, peer, here.tp)


@cause("crossed transfers", (0, 1, 2, 3), "dp_tp")
def a_ring_that_all_receive_in(here: Here) -> None:
    x = torch.ones(2)
    dist.recv(x, (here.rank + 1) % 4, here.all)  # <-
    dist.send(x, (here.rank - 1) % 4, here.all)


@cause("other peer", (0,), "dp_tp")
def sent_to_another(here: Here) -> None:
    x = torch.ones(1 << 20)
    if here.rank == 0:
        dist.send(x, 2, here.all)  # <-
    elif here.rank == 1:
        dist.recv(x, 0, here.all)  # <=
    else:
        time.sleep(2 * TIMEOUT)


@cause("other size", (0, 1), "dp_tp", ends=True)
def received_as_less(here: Here) -> None:
    if here.rank == 0:
        dist.send(torch.ones(8), 1, here.all)  # <-
    elif here.rank == 1:
        dist.recv(torch.ones(6), 0, here.all)  # <=


@cause("other dtype", (2, 3), "dp_tp", ends=True)
def received_as_another_type(here: Here) -> None:
    if here.rank == 2:
        dist.send(torch.ones(8), 3, here.all)  # <-
    elif here.rank == 3:
        dist.recv(torch.ones(8, dtype=torch.int32), 2, here.all)  # <=


@cause("not entered", (1,), "dp_tp")
def nobody_sends(here: Here) -> None:
    if here.rank == 2:
        dist.recv(torch.ones(8), 1, here.all)  # <=
    else:
        dist.all_reduce(torch.ones(1), group=here.tp) if here.rank < 2 else None  # <-
        time.sleep(2 * TIMEOUT)


# -- ranks -----------------------------------------------------------------------------


@cause("not entered", (2,), "dp_tp")
def one_that_computes_for_long(here: Here) -> None:
    dist.all_reduce(torch.ones(1), group=here.tp)  # <-
    if here.rank == 2:
        time.sleep(3 * TIMEOUT)
    else:
        dist.all_reduce(torch.ones(1), group=here.all)  # <=


@cause("slow rank", (1,), "dp_tp")
def one_that_is_always_late(here: Here) -> None:
    for _ in range(4):
        time.sleep(0.3 if here.rank == 1 else 0.0)
        dist.all_reduce(torch.ones(1), group=here.all)  # <-


@cause("not entered", (0,), "tp")
def the_end_of_a_chain(here: Here) -> None:
    """3 waits for 2, which waits for 0, which waits for nobody; 1 waits for 0 as well."""
    if here.rank == 0:
        dist.all_reduce(torch.ones(1), group=here.tp)  # <-
        time.sleep(2 * TIMEOUT)
        return
    if here.rank == 1:
        dist.all_reduce(torch.ones(1), group=here.tp)
        dist.all_reduce(torch.ones(1), group=here.tp)  # <=
    elif here.rank == 2:
        time.sleep(0.2)
        dist.all_reduce(torch.ones(1), group=here.dp)
    else:
        time.sleep(0.2)
        dist.all_reduce(torch.ones(1), group=here.tp)


QUICK = ("skipped_in_a_loop", "two_groups_in_another_order", "dp_instead_of_tp")


class Never(dist.Work):
    """What nothing was sent for."""


@contextlib.contextmanager
def nothing_is_sent() -> Iterator[None]:
    def call(group: Any, *args: Any, **options: Any) -> Never:
        return Never()

    def wait(work: Any, *args: Any) -> bool:
        return True

    kept = [(dist.Work, "wait", vars(dist.Work)["wait"])]
    kept += [(dist.ProcessGroup, n, vars(dist.ProcessGroup)[n]) for n in torch_calls._CALLS
             if n in vars(dist.ProcessGroup)]  # fmt: skip
    try:
        for kind, name, _ in kept:
            setattr(kind, name, wait if name == "wait" else call)
        yield
    finally:
        for kind, name, method in kept:
            setattr(kind, name, method)


def run_cause(name: str) -> dict[str, Any]:
    """What a rank has recorded of a cause; what hangs in it ends with the process."""
    warnings.simplefilter("ignore", FutureWarning)  # torch renames some of its functions
    grid = commgrid.initialize(tp=2, timeout=TIMEOUT)
    here = Here(grid.rank, *(grid.get_group(each) for each in ("tp", "dp", "dp_tp")))
    with nothing_is_sent() if CAUSES[name].ends else contextlib.nullcontext():
        commgrid.trace.start()
        with contextlib.suppress(RuntimeError):
            CAUSES[name].function(here)
        found = recorder.current().as_dict()  # type: ignore[union-attr]
        commgrid.trace.stop()
    time.sleep(0.2)  # for those that wait for nobody yet
    return found


def diagnosed(names: list[str]) -> dict[str, Diagnosis]:
    """Of each cause, in processes of its own."""
    found = {}
    for name in names:
        ranks = run_on_ranks(run_cause, 4, name, backend=None, launcher="torchrun")
        patience = 0.0 if CAUSES[name].ends else 0.5
        found[name] = diagnosis.diagnose([trace_files.parse(held) for held in ranks], patience)
    return found


def lines_of(function: Callable[..., Any], mark: str) -> list[str]:
    lines, first = inspect.getsourcelines(function)
    return [
        f"test_planted_causes.py:{first + i} {function.__name__}"
        for i, line in enumerate(lines) if line.rstrip().endswith(mark)
    ]  # fmt: skip


def check(found: dict[str, Diagnosis]) -> None:
    wrong = []
    for name, diagnosed in found.items():
        planted = CAUSES[name]
        function, kind, ranks, group = (
            planted.function, planted.kind, planted.ranks, planted.group
        )  # fmt: skip
        first = diagnosed.causes[0] if diagnosed else None
        said = None
        if first is not None:
            named = first.group.split(",")[0] if group else ""
            said = (first.kind, sorted(first.ranks), named)
        if first is None or said != (kind, sorted(ranks), group):
            wrong.append(
                f"{name}: wanted {(kind, sorted(ranks), group)}, found {said}\n{diagnosed}"
            )
            continue
        places = [*lines_of(function, "# <-"), *lines_of(function, "# <=")]
        missing = [place for place in places if place not in first.text]
        if missing:
            wrong.append(f"{name}: {missing} not in\n{diagnosed}")
    assert not wrong, "\n\n".join(wrong)


def test_a_few_planted_causes_are_named() -> None:
    check(diagnosed([*QUICK]))


@pytest.mark.full
def test_every_planted_cause_is_named() -> None:
    assert len(CAUSES) >= 30
    check(diagnosed([*CAUSES]))


def sane(steps: int) -> dict[str, Any]:
    grid = commgrid.initialize(tp=2, trace=True)
    groups = [grid.get_group(each) for each in ("tp", "dp", "dp_tp")]
    for _ in range(steps):
        for group in groups:
            dist.all_reduce(torch.ones(3), group=group)
        works = [dist.all_reduce(torch.ones(3), group=group, async_op=True) for group in groups]
        for work in reversed(works) if grid.rank % 2 else works:
            work.wait()
    found = recorder.current().as_dict()  # type: ignore[union-attr]
    commgrid.shutdown()
    return found


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    ranks = run_on_ranks(sane, 4, 20, backend=None, launcher="torchrun")
    found = diagnosis.diagnose([trace_files.parse(each) for each in ranks], patience=0.5)
    assert str(found).startswith("nothing is wrong")
    assert not found
    assert found.missing == ()
