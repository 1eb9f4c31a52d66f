"""One call in several spellings and from several lines, and calls that raised before they began."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import commgrid
from commgrid.collectives import all_gather, all_reduce
from tests.call_analysis.stories.job import Here, correct


def reduce(x: Tensor, group: Any) -> Tensor:
    """A project's own helper: every sum of the program comes from this line."""
    dist.all_reduce(x, group=group)
    return x


@correct()
def test_a_helper_with_a_late_embedding_group(here: Here) -> None:
    """The ends of the pipeline sum tied weights, when the middle is done with its step already."""
    grid = here.grid(pp=4)
    ends = dist.new_group([0, 3])
    for step in range(3):
        assert float(reduce(torch.ones(1), grid.get_group("pp"))) == 4
        if here.rank in (1, 2):
            here.mark(f"ahead.{step}")
        else:
            for rank in (1, 2):
                here.hear(f"ahead.{step}", rank)
            assert float(reduce(torch.ones(1), ends)) == 2
    here.now()


@correct(short=True)
def test_a_helper_that_is_late_on_one_rank(here: Here) -> None:
    """Rank 3 is not yet in the embedding group's sum, from the line of all other sums."""
    grid = here.grid(pp=4)
    ends = dist.new_group([0, 3])
    reduce(torch.ones(1), grid.get_group("pp"))
    work = dist.all_reduce(torch.ones(1), group=ends, async_op=True) if here.rank == 0 else None
    if here.rank in (1, 2):
        reduce(torch.ones(1), grid.get_group("tp"))
    here.now()
    if work is not None:
        work.wait()
    elif here.rank == 3:
        reduce(torch.ones(1), ends)
    here.now()


@correct()
def test_an_evaluation_step_in_another_order(here: Here) -> None:
    """Groups are used in another order than in training, the same on all ranks of each."""
    grid = here.grid(tp=2)
    for step in range(6):
        names = ("tp", "dp", "dp_tp") if step % 3 else ("dp", "dp_tp", "dp", "tp")
        for name in names:
            reduce(torch.ones(step + 1), grid.get_group(name))
    here.now()


@correct(untraced=True)
def test_a_step_that_only_some_groups_have(here: Here) -> None:
    """One tp group has a batch more, and logs twice; then all go on together."""
    grid = here.grid(tp=2)
    for step in range(4):
        if here.rank < 2 and step == 2:
            for _ in range(3):
                reduce(torch.ones(2), grid.get_group("tp"))
        reduce(torch.ones(2), grid.get_group("dp"))
        reduce(torch.ones(2), grid.get_group("tp"))
    here.now()


@correct(short=True)
def test_functions_and_methods_of_a_group(here: Here) -> None:
    """`dist.all_reduce` on one rank, `group.allreduce` with options or without on another."""
    group = here.grid(dp=4).get_group("dp")
    for step in range(3):
        x = torch.ones(4)
        if here.rank == 0:
            dist.all_reduce(x, group=group)
        elif here.rank == 1:
            group.allreduce([x], dist.AllreduceOptions()).wait()
        elif here.rank == 2:
            group.allreduce([x]).wait()
        else:
            group.allreduce(x, dist.ReduceOp.SUM).wait()
        assert float(x[0]) == 4, step
    here.now()


@correct(short=True)
def test_roots_in_several_spellings(here: Here) -> None:
    group = here.grid(dp=4).get_group("dp")
    for root in (1, 3):
        x = torch.full((2,), float(here.rank))
        options = dist.BroadcastOptions()
        options.rootRank = root
        if here.rank == 0:
            dist.broadcast(x, root, group=group)
        elif here.rank == 1:
            dist.broadcast(x, group=group, group_src=root)
        elif here.rank == 2:
            group.broadcast([x], options).wait()
        else:
            group.broadcast(x, root).wait()
        assert float(x[0]) == root
        x = torch.ones(2)
        options = dist.ReduceOptions()
        options.rootRank = root
        if here.rank == 2:
            group.reduce([x], options).wait()
        elif here.rank == 1:
            group.reduce(x, root).wait()
        else:
            dist.reduce(x, group=group, group_dst=root)
        assert here.rank != root or float(x[0]) == 4
    here.now()


@correct()
def test_gathers_in_several_spellings(here: Here) -> None:
    """Into one tensor, into a list, by commgrid."""
    group = here.grid(dp=4).get_group("dp")
    mine = torch.full((2,), float(here.rank))
    if here.rank == 0:
        dist.all_gather_into_tensor(found := torch.empty(8), mine, group=group)
    elif here.rank == 1:
        parts = [torch.empty(2) for _ in range(4)]
        dist.all_gather(parts, mine, group=group)
        found = torch.cat(parts)
    else:
        found = all_gather(mine, "dp", dim=0)
    assert found.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    here.now()


@correct()
def test_barriers_in_several_spellings(here: Here) -> None:
    """A monitored barrier is its own: all ranks take it."""
    grid = here.grid(dp=4)
    group = grid.get_group("dp")
    for _ in range(2):
        if here.rank % 2:
            dist.barrier(group=group)
        else:
            group.barrier().wait()
    dist.monitored_barrier(group=group)
    dist.all_reduce(torch.ones(1), group=group)
    here.now()


@correct(untraced=True, short=True)
def test_a_call_that_raised_and_was_made_again(here: Here) -> None:
    """torch refuses what rank 1 gives before anything is sent; it mends that, and calls again."""
    group = here.grid(dp=4).get_group("dp")
    for _ in range(2):
        if here.rank == 1:
            with pytest.raises((RuntimeError, ValueError, TypeError)):
                dist.all_reduce(torch.ones(4).to_sparse(), group=group, op=dist.ReduceOp.BAND)
            with pytest.raises((RuntimeError, ValueError, TypeError)):
                dist.all_gather_into_tensor(torch.empty(7), torch.ones(2), group=group)
        x = torch.ones(4)
        dist.all_reduce(x, group=group)
        assert float(x[0]) == 4
        dist.all_gather_into_tensor(torch.empty(8), torch.ones(2), group=group)
    here.now(ask=2)
    for _ in range(3):
        all_reduce(torch.ones(2), "dp")
    here.now()


@correct(short=True)
def test_a_message_that_raised_and_was_sent_again(here: Here) -> None:
    """A tensor that is not contiguous, of one rank."""
    group = here.grid(dp=4).get_group("dp")
    x = torch.arange(8.0).view(2, 4)
    for _ in range(2):
        if here.rank == 0:
            with pytest.raises((RuntimeError, ValueError)):
                dist.send(x.t(), 1, group)
            dist.send(x, 1, group)
        elif here.rank == 1:
            dist.recv(x, 0, group)
    here.now(ask=0)
    dist.barrier(group=group)
    here.now()


@correct()
def test_uneven_sizes(here: Here) -> None:
    """All-to-alls of which each rank gives and gets other parts, some of them empty."""
    group = here.grid(dp=4).get_group("dp")
    for turn in range(3):
        sent = [[(2 * i + j + turn) % 4 for j in range(4)] for i in range(4)]
        mine, theirs = sent[here.rank], [row[here.rank] for row in sent]
        out = torch.empty(sum(theirs), 3)
        dist.all_to_all_single(out, torch.ones(sum(mine), 3), theirs, mine, group=group)
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(4)]
        dist.all_gather(sizes, torch.tensor([len(out)]), group=group)
        for root, size in enumerate(map(int, sizes)):  # as an all-gather of uneven parts
            dist.broadcast(out if root == here.rank else torch.empty(size, 3), root, group=group)
    here.now()


@correct()
def test_objects_of_any_size(here: Here) -> None:
    group = here.grid(dp=4).get_group("dp")
    for step in range(2):
        found: list[Any] = [None] * 4
        dist.all_gather_object(found, list(range(here.rank * 50)), group=group)
        assert [len(each) for each in found] == [0, 50, 100, 150]
        given: list[Any] = [{step: "x" * 300}, None] if here.rank == step else [None, None]
        dist.broadcast_object_list(given, step, group=group)
        mine: list[Any] = [None]
        dist.scatter_object_list(
            mine, [["y"] * i for i in range(4)] if here.rank == 3 else None, 3, group=group
        )
        assert len(mine[0]) == here.rank
        at: list[Any] | None = [None] * 4 if here.rank == step else None
        dist.gather_object("z" * here.rank, at, step, group=group)
    here.now()


@correct()
def test_calls_in_a_loop_over_subgroups(here: Here) -> None:
    """Every rank has its groups in an order of its own; all calls are asynchronous."""
    grid = here.grid(dp=4)
    pairs = {(i, j): dist.new_group([i, j]) for i in range(4) for j in range(i + 1, 4)}
    own = [pair for pair in pairs if here.rank in pair]
    works = []
    for pair in own if here.rank % 2 else own[::-1]:
        x = torch.full((1,), float(sum(pair)))
        works.append(dist.all_reduce(x, group=pairs[pair], async_op=True))
    for work in works:
        work.wait()
    dist.barrier(group=grid.get_group("dp"))
    here.now()


@correct(untraced=True)
def test_dtensors_and_functional_collectives_beside_others(here: Here) -> None:
    """What C++ issues is not seen, and leaves no gap."""
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    grid = here.grid(dp=4)
    group = grid.get_group("dp")
    for _ in range(2):
        whole = torch.arange(16.0).view(4, 4)
        cut = distribute_tensor(whole, grid.device_mesh("dp"), [Shard(0)])
        assert torch.equal(cut.redistribute(placements=[Replicate()]).to_local(), whole)
        dist.all_reduce(torch.ones(3), group=group)
        assert float((functional.all_reduce(torch.ones(1), "sum", group) + 0)[0]) == 4
        reduce(torch.ones(2), group)
    here.now()


@correct()
def test_a_rank_that_is_busy_elsewhere(here: Here) -> None:
    """Rank 2 writes a file meanwhile; others do what does not need it."""
    grid = here.grid(tp=2)
    reduce(torch.ones(2), grid.get_group("dp"))
    if here.rank < 2:
        for _ in range(20):
            reduce(torch.ones(2), grid.get_group("tp"))
    here.now(ask=2)
    assert commgrid.is_initialized()
    reduce(torch.ones(2), grid.get_group("dp"))
    here.now()
