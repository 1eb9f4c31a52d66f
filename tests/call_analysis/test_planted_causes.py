"""Forty ways to go wrong on four ranks, each named with rank, group and line.

A cause is a function that all ranks run; the line at fault ends in `# <-`, and a second one in
`# <=`. Its traces are made in one process (tests/call_analysis/simulated.py); a few, and in the
nightly run all, are also recorded from real ranks.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid.call_analysis import diagnosis
from commgrid.call_analysis.finding import Diagnosis
from commgrid.call_analysis.program import from_traces
from commgrid.call_analysis.verification import check as check_programs
from commgrid.call_records import files as trace_files
from commgrid.call_records import operations
from commgrid.call_records.trace import Trace
from commgrid.recording import recorder
from commgrid.testing import run_on_ranks
from tests.call_analysis import simulated
from tests.flags import meet

TIMEOUT = 1.0  # of collectives


@dataclass
class Here:
    """The arguments of a cause on one rank.

    Args:
        dist: `torch.distributed`, or what lists calls in its place; with a `sleep`.
        tp, dp, all: groups (0, 1), (2, 3); (0, 2), (1, 3); and of all ranks.
    """

    dist: Any
    rank: int
    tp: Any
    dp: Any
    all: Any

    @property
    def groups(self) -> list[Any]:
        return [self.tp, self.dp, self.all]


@dataclass
class Cause:
    """A planted cause, and the finding that names it.

    Args:
        ranks: that the finding is about.
        group: "" where two are concerned.
        culprit: the rank at fault, where a finding about others names it too; None: one of `ranks`.
        ends: whether gloo would end the process, as where a message has more bytes than are
            expected. Then nothing is sent.
    """

    function: Callable[[Here], None]
    kind: str
    ranks: tuple[int, ...]
    group: str
    culprit: int | None
    ends: bool


CAUSES: dict[str, Cause] = {}


def cause(
    kind: str, ranks: tuple[int, ...], group: str, culprit: int | None = None, ends: bool = False
) -> Callable[..., Any]:
    def register(function: Callable[[Here], None]) -> Callable[[Here], None]:
        CAUSES[function.__name__] = Cause(function, kind, ranks, group, culprit, ends)
        return function

    return register


# -- a call that is missing ------------------------------------------------------------


@cause("deadlock", (3,), "tp")
def skipped_in_a_loop(here: Here) -> None:
    for step in range(3):
        here.dist.all_reduce(torch.ones(2), group=here.dp)
        if here.rank != 3 or step != 2:
            here.dist.all_reduce(torch.ones(2), group=here.tp)  # <=
        here.dist.all_reduce(torch.ones(2), group=here.all)  # <-


@cause("skipped call", (1,), "dp_tp", ends=True)
def skipped_before_another_of_the_group(here: Here) -> None:
    for step in range(3):
        if here.rank != 1 or step < 2:
            here.dist.all_reduce(torch.ones(3), group=here.all)  # <=
        here.dist.all_reduce(torch.ones(2), group=here.all)  # <-


@cause("skipped call", (2,), "dp_tp", ends=True)
def skipped_where_the_rest_goes_on(here: Here) -> None:
    x = torch.ones(2)
    works = []
    if here.rank != 2:
        works.append(here.dist.all_reduce(torch.ones(2), group=here.all, async_op=True))  # <=
    works.append(
        here.dist.all_gather([x.clone() for _ in range(4)], x, here.all, async_op=True)  # <-
    )
    here.dist.barrier(here.all)
    [work.wait() for work in works]


@cause("not entered", (3,), "dp_tp")
def returned_too_early(here: Here) -> None:
    here.dist.all_reduce(torch.ones(2), group=here.all)  # <-
    if here.rank == 3:
        here.dist.sleep(2 * TIMEOUT)
        return
    here.dist.all_reduce(torch.ones(4), group=here.all)  # <=


@cause("not entered", (0,), "dp")
def a_loop_that_is_one_shorter(here: Here) -> None:
    for _ in range(3 if here.rank == 0 else 4):
        here.dist.all_reduce(torch.ones(2), group=here.dp)  # <-
    here.dist.sleep(2 * TIMEOUT if here.rank == 0 else 0)


@cause("extra call", (2,), "dp_tp", ends=True)
def one_call_too_many(here: Here) -> None:
    x = torch.ones(2)
    works = []
    if here.rank == 2:
        works.append(here.dist.all_reduce(torch.ones(7), group=here.all, async_op=True))  # <-
    works.append(
        here.dist.all_gather([x.clone() for _ in range(4)], x, here.all, async_op=True)  # <=
    )
    works.append(here.dist.all_reduce(torch.ones(9), group=here.all, async_op=True))
    [work.wait() for work in works]


@cause("deadlock", (0, 1, 2, 3), "dp")
def skipped_where_the_data_says_so(here: Here) -> None:
    """Two ranks whose loss is larger go past a sum that the others wait in."""
    for step in range(4):
        loss = torch.tensor(float(here.rank >= 2) * step)
        here.dist.all_reduce(torch.ones(2), group=here.tp)
        if loss < 2.5:
            here.dist.all_reduce(torch.ones(2), group=here.dp)  # <=
        here.dist.all_reduce(torch.ones(2), group=here.all)  # <-


@cause("deadlock", (1,), "dp")
def skipped_by_an_exception_that_is_caught(here: Here) -> None:
    for step in range(3):
        here.dist.all_reduce(torch.ones(2), group=here.tp)
        try:
            if here.rank == 1 and step == 2:
                raise ValueError("a broken sample")
            here.dist.all_reduce(torch.ones(2), group=here.dp)  # <=
        except ValueError:
            pass
        here.dist.all_reduce(torch.ones(2), group=here.all)  # <-


@cause("not entered", (1, 3), "tp")
def one_batch_fewer(here: Here) -> None:
    """As where a dp rank's data ends earlier; it goes on without communication."""
    for _ in range(2 if here.rank in (1, 3) else 3):
        here.dist.all_reduce(torch.ones(2), group=here.tp)  # <-
    here.dist.sleep(2 * TIMEOUT if here.rank in (1, 3) else 0)


# -- a call that is another ------------------------------------------------------------


@cause("other operation", (2,), "dp_tp", ends=True)
def another_operation(here: Here) -> None:
    x = torch.ones(2)
    if here.rank == 2:
        here.dist.broadcast(x, 2, group=here.all)  # <-
    else:
        here.dist.all_reduce(x, group=here.all)  # <=


@cause("other operation", (1,), "tp", ends=True)
def a_barrier_instead(here: Here) -> None:
    if here.rank == 1:
        here.dist.barrier(here.tp)  # <-
    else:
        here.dist.all_reduce(torch.ones(2), group=here.tp)  # <=


@cause("other operation", (3,), "dp_tp", ends=True)
def reduced_instead_of_all_reduced(here: Here) -> None:
    if here.rank == 3:
        here.dist.reduce(torch.ones(2), 0, group=here.all)  # <-
    else:
        here.dist.all_reduce(torch.ones(2), group=here.all)  # <=


@cause("other shape", (1,), "dp_tp", ends=True)
def a_batch_of_another_size(here: Here) -> None:
    here.dist.all_reduce(torch.ones(7 if here.rank == 1 else 8), group=here.all)  # <-


@cause("other shape", (2,), "dp_tp", ends=True)
def a_last_bucket_of_another_size(here: Here) -> None:
    for size in (100, 100, 60 if here.rank == 2 else 50):
        here.dist.all_reduce(torch.ones(size), group=here.all)  # <-


@cause("other shape", (3,), "dp_tp", ends=True)
def another_slice_scattered(here: Here) -> None:
    size = 12 if here.rank == 3 else 8
    here.dist.reduce_scatter_tensor(torch.ones(size // 4), torch.ones(size), group=here.all)  # <-


@cause("other dtype", (2,), "dp_tp", ends=True)
def half_precision_on_one(here: Here) -> None:
    dtype = torch.bfloat16 if here.rank == 2 else torch.float32
    here.dist.all_reduce(torch.ones(8, dtype=dtype), group=here.all)  # <-


@cause("other dtype", (3,), "dp_tp", ends=True)
def double_instead_of_single(here: Here) -> None:
    dtype = torch.float64 if here.rank == 3 else torch.float32
    here.dist.broadcast(torch.ones(4, dtype=dtype), 0, group=here.all)  # <-


@cause("other root", (1,), "dp_tp", ends=True)
def another_root(here: Here) -> None:
    here.dist.broadcast(torch.ones(4), 1 if here.rank == 1 else 0, group=here.all)  # <-


@cause("other root", (2,), "dp_tp", ends=True)
def gathered_at_another(here: Here) -> None:
    x, at = torch.ones(2), 2 if here.rank == 2 else 0
    parts = [x.clone() for _ in range(4)] if here.rank == at else None
    here.dist.gather(x, parts, at, here.all)  # <-


@cause("other root", (3,), "dp_tp", ends=True)
def scattered_from_another(here: Here) -> None:
    x, at = torch.ones(2), 3 if here.rank == 3 else 1
    parts = [x.clone() for _ in range(4)] if here.rank == at else None
    here.dist.scatter(x, parts, at, here.all)  # <-


@cause("other shape", (3,), "dp_tp", ends=True)
def gathered_with_another_first_dimension(here: Here) -> None:
    x = torch.ones(4 if here.rank == 3 else 3, 8)
    here.dist.all_gather([torch.empty_like(x) for _ in range(4)], x, here.all)  # <-


@cause("other reduction", (2,), "dp_tp", ends=True)
def the_largest_instead_of_the_sum(here: Here) -> None:
    op = dist.ReduceOp.MAX if here.rank == 2 else dist.ReduceOp.SUM
    here.dist.all_reduce(torch.ones(2), op, group=here.all)  # <-


@cause("other dtype", (1,), "dp_tp", ends=True)
def tokens_of_another_type(here: Here) -> None:
    x = torch.ones(4, dtype=torch.float16 if here.rank == 1 else torch.float32)
    here.dist.all_to_all_single(torch.empty_like(x), x, group=here.all)  # <-


# -- another order ---------------------------------------------------------------------


@cause("other order", (1,), "dp_tp", ends=True)
def two_asynchronous_in_another_order(here: Here) -> None:
    works = []
    for turn in (0, 1) if here.rank != 1 else (1, 0):
        if turn == 0:
            works.append(here.dist.all_reduce(torch.ones(2), group=here.all, async_op=True))  # <=
        else:
            works.append(here.dist.all_reduce(torch.ones(5), group=here.all, async_op=True))  # <-
    [work.wait() for work in works]


@cause("deadlock", (0, 1, 3, 2), "")
def two_groups_in_another_order(here: Here) -> None:
    """Rank 0 waits for 1 on tp, 1 for 3 on dp, 3 for 2 on tp, 2 for 0 on dp."""
    if here.rank in (0, 3):
        here.dist.all_reduce(torch.ones(2), group=here.tp)  # <-
        here.dist.all_reduce(torch.ones(2), group=here.dp)
    else:
        here.dist.all_reduce(torch.ones(2), group=here.dp)  # <=
        here.dist.all_reduce(torch.ones(2), group=here.tp)


@cause("deadlock", (0, 1), "")
def a_group_and_the_one_around_it(here: Here) -> None:
    if here.rank == 0:
        here.dist.all_reduce(torch.ones(2), group=here.tp)  # <-
        here.dist.all_reduce(torch.ones(2), group=here.all)
    elif here.rank == 1:
        here.dist.all_reduce(torch.ones(2), group=here.all)  # <=
        here.dist.all_reduce(torch.ones(2), group=here.tp)
    else:
        here.dist.all_reduce(torch.ones(2), group=here.all)


@cause("not entered", (1,), "dp", culprit=3)
def dp_instead_of_tp(here: Here) -> None:
    group = here.dp if here.rank == 3 else here.tp
    here.dist.all_reduce(torch.ones(2), group=group)  # <-
    here.dist.sleep(2 * TIMEOUT if here.rank == 1 else 0)


@cause("deadlock", (2, 3), "dp_tp", culprit=2)
def tp_instead_of_all(here: Here) -> None:
    for step in range(2):
        group = here.tp if here.rank == 2 and step else here.all
        here.dist.all_reduce(torch.ones(3), group=group)  # <-


# -- transfers -------------------------------------------------------------------------


@cause("crossed transfers", (0, 1), "tp")
def both_receive_first(here: Here) -> None:
    x, peer = torch.ones(2), here.rank ^ 1
    if here.rank < 2:
        here.dist.recv(x, peer, here.tp)  # <-
        here.dist.send(x, peer, here.tp)


@cause("crossed transfers", (0, 1), "tp")
def both_send_first(here: Here) -> None:
    x, peer = torch.ones(1 << 20), here.rank ^ 1
    if here.rank < 2:
        here.dist.send(x, peer, here.tp)  # <-
        here.dist.recv(x, peer, here.tp)


@cause("crossed transfers", (0, 1, 2, 3), "dp_tp")
def a_ring_that_all_receive_in(here: Here) -> None:
    x = torch.ones(2)
    here.dist.recv(x, (here.rank + 1) % 4, here.all)  # <-
    here.dist.send(x, (here.rank - 1) % 4, here.all)


@cause("not entered", (2,), "dp_tp", culprit=0)
def sent_to_another(here: Here) -> None:
    x = torch.ones(1 << 20)
    if here.rank == 0:
        here.dist.send(x, 2, here.all)  # <-
    elif here.rank == 1:
        here.dist.recv(x, 0, here.all)  # <=
    else:
        here.dist.sleep(2 * TIMEOUT)


@cause("not entered", (3,), "dp_tp", culprit=1)
def a_stage_that_is_left_out(here: Here) -> None:
    """Rank 1 sends past rank 2, as a wrong step to the next stage does."""
    x = torch.ones(1 << 20)
    if here.rank == 1:
        here.dist.send(x, 3, here.all)  # <-
    elif here.rank == 2:
        here.dist.recv(x, 1, here.all)  # <=
    else:
        here.dist.sleep(2 * TIMEOUT)


@cause("not entered", (1,), "dp_tp")
def one_microbatch_fewer(here: Here) -> None:
    x = torch.ones(1 << 20)
    if here.rank == 1:
        here.dist.recv(x, 0, here.all)
        here.dist.recv(x, 0, here.all)  # <-
        here.dist.sleep(2 * TIMEOUT)
    elif here.rank == 0:
        for _ in range(3):
            here.dist.send(x, 1, here.all)  # <=


@cause("other size", (0, 1), "dp_tp", ends=True)
def received_as_less(here: Here) -> None:
    if here.rank == 0:
        here.dist.send(torch.ones(8), 1, here.all)  # <-
    elif here.rank == 1:
        here.dist.recv(torch.ones(6), 0, here.all)  # <=


@cause("other dtype", (2, 3), "dp_tp", ends=True)
def received_as_another_type(here: Here) -> None:
    if here.rank == 2:
        here.dist.send(torch.ones(8), 3, here.all)  # <-
    elif here.rank == 3:
        here.dist.recv(torch.ones(8, dtype=torch.int32), 2, here.all)  # <=


@cause("not entered", (1,), "dp_tp")
def nobody_sends(here: Here) -> None:
    if here.rank == 2:
        here.dist.recv(torch.ones(8), 1, here.all)  # <=
    else:
        here.dist.all_reduce(torch.ones(1), group=here.tp) if here.rank < 2 else None  # <-
        here.dist.sleep(2 * TIMEOUT)


# -- ranks -----------------------------------------------------------------------------


@cause("not entered", (2,), "dp_tp")
def one_that_computes_for_long(here: Here) -> None:
    here.dist.all_reduce(torch.ones(1), group=here.tp)  # <-
    if here.rank == 2:
        here.dist.sleep(3 * TIMEOUT)
    else:
        here.dist.all_reduce(torch.ones(1), group=here.all)  # <=


@cause("slow rank", (1,), "dp_tp")
def one_that_is_always_late(here: Here) -> None:
    for _ in range(4):
        here.dist.sleep(0.3 if here.rank == 1 else 0.0)
        here.dist.all_reduce(torch.ones(1), group=here.all)  # <-


@cause("not entered", (0,), "tp")
def the_end_of_a_chain(here: Here) -> None:
    """3 waits for 2, which waits for 0, which does not wait; 1 waits for 0 as well."""
    if here.rank == 0:
        here.dist.all_reduce(torch.ones(1), group=here.tp)  # <-
        here.dist.sleep(2 * TIMEOUT)
        return
    if here.rank == 1:
        here.dist.all_reduce(torch.ones(1), group=here.tp)
        here.dist.all_reduce(torch.ones(1), group=here.tp)  # <=
    elif here.rank == 2:
        here.dist.sleep(0.2)
        here.dist.all_reduce(torch.ones(1), group=here.dp)
    else:
        here.dist.sleep(0.2)
        here.dist.all_reduce(torch.ones(1), group=here.tp)


class Never(dist.Work):
    """A call for which nothing was sent."""


@contextlib.contextmanager
def nothing_is_sent() -> Iterator[None]:
    def call(group: Any, *args: Any, **options: Any) -> Never:
        return Never()

    def wait(work: Any, *args: Any) -> bool:
        return True

    kept = [(dist.Work, "wait", vars(dist.Work)["wait"])]
    kept += [(dist.ProcessGroup, n, vars(dist.ProcessGroup)[n]) for n, _ in operations.methods()
             if n in vars(dist.ProcessGroup)]  # fmt: skip
    try:
        for kind, name, _ in kept:
            setattr(kind, name, wait if name == "wait" else call)
        yield
    finally:
        for kind, name, method in kept:
            setattr(kind, name, method)


class Sleeping:
    """torch.distributed, and the sleep that makes a rank of a cause late."""

    sleep = staticmethod(time.sleep)  # the lateness that is planted

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


def run_causes(names: list[str], rank: int) -> list[bytes]:
    """The records of one rank; a call that hangs in the last cause ends with the process."""
    warnings.simplefilter("ignore", FutureWarning)  # torch renames some of its functions
    grid = commgrid.initialize(tp=2, timeout=TIMEOUT)
    here = Here(Sleeping(), rank, *(grid.get_group(each) for each in ("tp", "dp", "dp_tp")))
    found = []
    for name in names:
        with nothing_is_sent() if CAUSES[name].ends else contextlib.nullcontext():
            commgrid.trace.start()
            with contextlib.suppress(RuntimeError):
                CAUSES[name].function(here)
            found.append(recorder.current().contents())  # type: ignore[union-attr]
            commgrid.trace.stop()
    meet(rank, 4)  # a rank that ended now would close connections that others wait on
    return found


def check_recorded(names: list[str]) -> None:
    """Causes on real ranks."""
    per_rank = [(rank,) for rank in range(4)]
    ranks = run_on_ranks(run_causes, 4, names, per_rank=per_rank, backend=None, launcher="torchrun")
    for name, *rings in zip(names, *ranks, strict=True):
        check(name, trace_files.parse(rings))


def listed(function: Callable[[Here], None], timeout: float = TIMEOUT) -> list[Trace]:
    """Traces of ranks that never ran."""
    groups = {
        "tp": [simulated.Group("tp", ranks) for ranks in ((0, 1), (2, 3))],
        "dp": [simulated.Group("dp", ranks) for ranks in ((0, 2), (1, 3))],
        "all": [simulated.Group("dp_tp", (0, 1, 2, 3))],
    }
    ranks = [simulated.Calls(rank) for rank in range(4)]
    for rank, calls in enumerate(ranks):
        own = {name: next(g for g in made if rank in g.ranks) for name, made in groups.items()}
        function(Here(calls, rank, **own))
    return simulated.traces(ranks, [each for made in groups.values() for each in made], timeout)


def lines_of(function: Callable[..., Any], mark: str) -> list[str]:
    lines, first = inspect.getsourcelines(function)
    return [
        f"test_planted_causes.py:{first + i} {function.__name__}"
        for i, line in enumerate(lines) if line.rstrip().endswith(mark)
    ]  # fmt: skip


def check(name: str, traces: list[Trace]) -> None:
    """The first cause that is found is the planted one, with its lines."""
    planted = CAUSES[name]
    found = diagnosed(traces, 0.0 if planted.ends else TIMEOUT / 2)
    assert found, name
    first = found.causes[0]
    named = first.group.split(",")[0] if planted.group else ""
    # Two that do the same on two groups are two causes.
    ranks = {rank for each in found.causes if each.kind == first.kind for rank in each.ranks}
    assert (first.kind, named) == (planted.kind, planted.group), f"{name}\n{found}"
    assert ranks == set(planted.ranks), f"{name}\n{found}"
    assert planted.culprit is None or f"rank {planted.culprit} " in first.text, f"{name}\n{found}"
    for place in [*lines_of(planted.function, "# <-"), *lines_of(planted.function, "# <=")]:
        assert place in first.text, f"{name}\n{found}"


def diagnosed(traces: list[Trace], patience: float) -> Diagnosis:
    return diagnosis.diagnose(traces, patience)


def test_there_are_forty() -> None:
    assert len(CAUSES) >= 40


@pytest.mark.parametrize("name", CAUSES)
def test_a_planted_cause_is_named(name: str) -> None:
    planted = CAUSES[name]
    check(name, listed(planted.function, 0.0 if planted.ends else TIMEOUT))


@pytest.mark.parametrize("name", CAUSES)
@pytest.mark.parametrize("rules", ["gloo", "nccl"])
def test_it_is_seen_before_it_runs(name: str, rules: str) -> None:
    """Where ranks would issue all of it: which of them do is no matter of time."""
    planted = CAUSES[name]
    programs = from_traces(listed(planted.function, timeout=0.0))
    verdict = check_programs(programs, rules)
    assert verdict.finishes == (planted.kind == "slow rank"), str(verdict)
    if not verdict.finishes:
        said = str(verdict)
        at_fault = planted.ranks if planted.culprit is None else (planted.culprit,)
        assert f" {name}" in said, said  # a line of the program
        assert any(re.search(rf"\b{rank}\b", said) for rank in at_fault), said


SENT = [name for name, planted in CAUSES.items() if not planted.ends]
REAL = ("skipped_in_a_loop", "two_groups_in_another_order")
"""A call that never comes, and a deadlock."""


@pytest.mark.full
@pytest.mark.parametrize("name", REAL)
def test_a_recorded_cause_is_named(name: str) -> None:
    check_recorded([name])


@pytest.mark.full
def test_recorded_causes_of_which_nothing_is_sent_are_named() -> None:
    check_recorded([name for name in CAUSES if name not in SENT])


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in SENT if name not in REAL])
def test_every_recorded_cause_is_named(name: str) -> None:
    check_recorded([name])


def sane(dist: Any, rank: int, groups: list[Any]) -> None:
    for _ in range(20):
        for group in groups:
            dist.all_reduce(torch.ones(3), group=group)
        works = [dist.all_reduce(torch.ones(3), group=group, async_op=True) for group in groups]
        for work in reversed(works) if rank % 2 else works:
            work.wait()


def run_sane() -> bytes:
    grid = commgrid.initialize(tp=2, trace=True)
    sane(dist, grid.rank, [grid.get_group(each) for each in ("tp", "dp", "dp_tp")])
    found: bytes = recorder.current().contents()  # type: ignore[union-attr]
    commgrid.shutdown()
    return found


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    found = diagnosed(listed(lambda here: sane(here.dist, here.rank, here.groups)), patience=0.5)
    assert str(found).startswith("no fault found")
    assert not found
    assert found.missing == ()
    # The ranks still record.
    ranks = run_on_ranks(run_sane, 4, backend=None, launcher="torchrun", check=False)
    found = diagnosed(trace_files.parse(ranks), patience=60.0)
    # A machine with other work may keep a rank back, which is late then, and no more.
    assert {each.kind for each in found.causes} <= {"slow rank"}, found
    assert found.missing == ()
