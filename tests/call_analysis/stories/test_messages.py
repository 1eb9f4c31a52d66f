"""Messages: with tags, from any source, received late, with partners that are long past."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from tests.call_analysis.stories.job import Here, correct


def full_of(value: float, count: int = 2) -> torch.Tensor:
    return torch.full((count,), float(value))


def received(source: int | None, group: Any, count: int = 2, tag: int = 0) -> float:
    x = torch.empty(count)
    dist.recv(x, source, group, tag)
    return float(x[0])


@correct(size=2, nccl=False, untraced=True, short=True)
def test_tags_received_in_another_order(here: Here) -> None:
    """Of other sizes: gloo matches by tag."""
    group = here.grid(dp=2).get_group("dp")
    for _ in range(2):
        if here.rank == 0:
            works = [dist.isend(full_of(tag, tag), 1, group, tag) for tag in (1, 2, 3)]
            here.mark("sent")
            for work in works:
                work.wait()
        else:
            assert [received(0, group, tag, tag) for tag in (3, 1, 2)] == [3, 1, 2]
        here.now()


@correct(size=2, nccl=False)
def test_a_tag_that_is_received_much_later(here: Here) -> None:
    """A late answer with a tag of its own is open while others with tag 0 come and go."""
    group = here.grid(dp=2).get_group("dp")
    other = 1 - here.rank
    late = dist.isend(full_of(7, 5), 1, group, 9) if here.rank == 0 else None
    for step in range(70):
        if here.rank == 0:
            dist.send(full_of(step), other, group)
        else:
            assert received(other, group) == step
    here.now()
    if late is not None:
        late.wait()
    else:
        assert received(0, group, 5, 9) == 7
    here.now()


@correct(size=2, untraced=True, short=True)
def test_a_send_that_is_received_later(here: Here) -> None:
    """The sender computes, and asks for the end of its send when all is over."""
    group = here.grid(dp=2).get_group("dp")
    work = dist.isend(full_of(1), 1, group) if here.rank == 0 else None
    for _ in range(3):
        dist.all_reduce(torch.ones(2), group=group)
    time.sleep(1.2)  # longer than the patience of a command
    here.now(ask=0)
    if work is not None:
        work.wait()
    else:
        assert received(0, group) == 1
    dist.all_reduce(torch.ones(2), group=group)
    here.now()


@correct(size=2, nccl=False)
def test_receives_posted_long_before(here: Here) -> None:
    group = here.grid(dp=2).get_group("dp")
    x = torch.empty(2)
    work = dist.irecv(x, 1 - here.rank, group)
    for _ in range(3):
        dist.all_reduce(torch.ones(2), group=group)
    here.now()
    sent = dist.isend(full_of(here.rank), 1 - here.rank, group)
    for each in (work, sent):
        each.wait()
    assert float(x[0]) == 1 - here.rank
    here.now()


@correct(short=True)
def test_a_partner_beyond_the_last_calls(here: Here) -> None:
    """Rank 0 sends to rank 1 once, and then a hundred times to others, on one communicator."""
    group = here.grid(dp=4).get_group("dp")
    if here.rank == 0:
        dist.send(full_of(1), 1, group)
        for step in range(100):
            for other in (2, 3):
                dist.send(full_of(step), other, group)
    elif here.rank == 1:
        assert received(0, group) == 1
    else:
        for step in range(100):
            assert received(0, group) == step
    here.now()
    dist.barrier(group)
    here.now()


@correct()
def test_many_calls_between_two_messages(here: Here) -> None:
    """Messages of two ranks, and between them more calls of the group than an answer has."""
    group = here.grid(dp=4).get_group("dp")
    for turn in range(2):
        if here.rank == 0:
            dist.send(full_of(turn), 3, group)
        elif here.rank == 3:
            assert received(0, group) == turn
        for _ in range(80):
            dist.all_reduce(torch.ones(1), group=group)
    here.now(ask=0)


@correct(nccl=False, open=True)
def test_a_server_that_takes_from_any_source(here: Here) -> None:
    """Workers ask in any order and number, and rank 0 answers each."""
    group = here.grid(dp=4).get_group("dp")
    if here.rank == 0:
        for _ in range(1 + 2 + 3):
            x = torch.empty(1)
            source = dist.recv(x, None, group)
            dist.send(x * 2, source, group, tag=1)
    else:
        for turn in range(here.rank):
            dist.send(full_of(turn, 1), 0, group)
            assert received(0, group, 1, 1) == 2 * turn
    here.now()
    dist.barrier(group)
    here.now()


@correct(nccl=False, open=True, short=True)
def test_any_source_beside_a_known_one(here: Here) -> None:
    group = here.grid(dp=4).get_group("dp")
    if here.rank == 0:
        assert received(1, group, tag=5) == 1
        assert {received(None, group), received(None, group)} == {2.0, 3.0}
    else:
        dist.send(full_of(here.rank), 0, group, tag=5 if here.rank == 1 else 0)
    here.now()


@correct(size=2)
def test_messages_of_other_sizes_with_one_tag(here: Here) -> None:
    group = here.grid(dp=2).get_group("dp")
    for count in (1, 1000, 3):
        if here.rank == 0:
            dist.send(full_of(count, count), 1, group)
        else:
            assert received(0, group, count) == count
    here.now()


@correct()
def test_a_pipeline_that_is_one_microbatch_ahead(here: Here) -> None:
    """Sends are asynchronous; the last stage has all when the job is looked at."""
    grid = here.grid(pp=4)
    group, sent = grid.get_group("pp"), []
    for micro in range(6):
        if here.rank:
            assert received(here.rank - 1, group) == micro
        if here.rank < 3:
            sent.append(dist.isend(full_of(micro), here.rank + 1, group))
    here.now()
    for work in sent:
        work.wait()
    here.now()


@correct(nccl=False)
def test_batches_in_any_order(here: Here) -> None:
    group = here.grid(dp=4).get_group("dp")
    left, right = (here.rank - 1) % 4, (here.rank + 1) % 4
    for step in range(3):
        gets = [torch.empty(2), torch.empty(3)]
        ops = [
            dist.P2POp(dist.isend, full_of(step), right, group, 1),
            dist.P2POp(dist.isend, full_of(-step, 3), left, group, 2),
            dist.P2POp(dist.irecv, gets[0], left, group, 1),
            dist.P2POp(dist.irecv, gets[1], right, group, 2),
        ]
        for work in dist.batch_isend_irecv(ops[:: 1 if here.rank % 2 else -1]):
            work.wait()
        assert [float(each[0]) for each in gets] == [step, -step]
    here.now()


@correct(size=2)
def test_a_message_of_another_dtype_each_time(here: Here) -> None:
    group = here.grid(dp=2).get_group("dp")
    for dtype in (torch.float64, torch.int32, torch.bfloat16, torch.bool):
        x = torch.ones(4, dtype=dtype)
        if here.rank == 0:
            dist.send(x, 1, group)
        else:
            dist.recv(x.zero_(), 0, group)
            assert x.all()
    here.now()


@correct(size=2)
def test_a_batch_function_imported_before_the_recorder(here: Here) -> None:
    """On one rank; the other looks it up when it calls."""
    early = dist.batch_isend_irecv
    group = here.grid(dp=2).get_group("dp")
    other = 1 - here.rank
    for step in range(3):
        x = torch.empty(2)
        ops = [
            dist.P2POp(dist.isend, full_of(step), other, group),
            dist.P2POp(dist.irecv, x, other, group),
        ]
        for work in early(ops) if here.rank == 0 else dist.batch_isend_irecv(ops):
            work.wait()
        assert float(x[0]) == step
    here.now()
