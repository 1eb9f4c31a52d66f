"""Arguments of calls, as listeners get them: one call in any spelling is the same call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import batch_isend_irecv  # by name, before anything listens

import commgrid
from commgrid.testing import run_on_ranks
from commgrid.torch_compat import interposer
from commgrid.torch_compat.interposer import Arguments

c10d = dist.distributed_c10d
Group = dist.ProcessGroup


class Hears:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.made: list[Arguments] = []
        self.told: list[tuple[str, object]] = []
        self.batches: list[int] = []

    def begins(self, its_group: Group, made: Arguments) -> object:
        self.made.append(made)
        self.batches.append(interposer.batch())
        self.told.append(("begins", len(self.made)))
        return len(self.made)

    def issued(self, call: object, work: dist.Work | None) -> None:
        self.told.append(("issued", call))

    def failed(self, call: object) -> None:
        self.told.append(("failed", call))

    def waits(self, work: dist.Work) -> None: ...
    def waited(self, work: dist.Work, failed: bool) -> None: ...


@pytest.fixture
def group() -> Iterator[Group]:
    yield commgrid.initialize().get_group("dp")
    commgrid.shutdown()


@pytest.fixture
def hears() -> Iterator[Hears]:
    listener = Hears()
    interposer.listen(listener)
    yield listener
    interposer.stop(listener)


def options(kind: Any, **values: Any) -> Any:
    made = kind()
    for name, value in values.items():
        setattr(made, name, value)
    return made


MAX = dist.ReduceOp.MAX
Spelling = Callable[[Group, Tensor, Tensor], Any]
SPELLINGS: dict[str, list[Spelling]] = {
    "all_reduce": [
        lambda g, x, y: dist.all_reduce(x, MAX, group=g),
        lambda g, x, y: g.allreduce([x], options(c10d.AllreduceOptions, reduceOp=MAX)).wait(),
        lambda g, x, y: g.allreduce([x], opts=options(c10d.AllreduceOptions, reduceOp=MAX)).wait(),
        lambda g, x, y: g.allreduce(tensors=[x], op=MAX).wait(),
        lambda g, x, y: g.allreduce((x,), MAX).wait(),
        lambda g, x, y: g.allreduce(x, op=MAX).wait(),
    ],
    "sum": [
        lambda g, x, y: dist.all_reduce(x, group=g),
        lambda g, x, y: g.allreduce([x]).wait(),
        lambda g, x, y: g.allreduce(tensor=x).wait(),
    ],
    "broadcast": [
        lambda g, x, y: dist.broadcast(x, 0, g),
        lambda g, x, y: g.broadcast(x, 0).wait(),
        lambda g, x, y: g.broadcast(tensor=x, root=0).wait(),
        lambda g, x, y: g.broadcast([x], options(c10d.BroadcastOptions, rootRank=0)).wait(),
        lambda g, x, y: g.broadcast(tensors=[x], opts=c10d.BroadcastOptions()).wait(),
    ],
    "reduce": [
        lambda g, x, y: dist.reduce(x, 0, MAX, g),
        lambda g, x, y: g.reduce(x, 0, MAX).wait(),
        lambda g, x, y: g.reduce(tensor=x, root=0, op=MAX).wait(),
        lambda g, x, y: g.reduce([x], options(c10d.ReduceOptions, reduceOp=MAX)).wait(),
    ],
    "all_gather": [
        lambda g, x, y: dist.all_gather([y], x, g),
        lambda g, x, y: g._allgather_base(y, x).wait(),
        lambda g, x, y: g.allgather([[y]], [x]).wait(),
        lambda g, x, y: g.allgather([y], x).wait(),
        lambda g, x, y: g.allgather(output_tensors=[y], input_tensor=x).wait(),
        lambda g, x, y: g._allgather_base(output=y, input=x).wait(),
    ],
    "reduce_scatter": [
        lambda g, x, y: dist.reduce_scatter(y, [x], MAX, g),
        lambda g, x, y: g.reduce_scatter(y, [x], MAX).wait(),
        lambda g, x, y: g.reduce_scatter(output=y, input=[x], op=MAX).wait(),
        lambda g, x, y: g._reduce_scatter_base(
            outputTensor=y, inputTensor=x, opts=options(c10d.ReduceScatterOptions, reduceOp=MAX)
        ).wait(),
    ],
    "all_to_all": [
        lambda g, x, y: dist.all_to_all_single(y, x, group=g),
        lambda g, x, y: dist.all_to_all_single(y, x, [4], [4], group=g),
        lambda g, x, y: g.alltoall_base(y, x, [], []).wait(),
        lambda g, x, y: g.alltoall_base(
            input=x, output=y, input_split_sizes=[4], output_split_sizes=[4]
        ).wait(),
    ],
    "gather": [
        lambda g, x, y: dist.gather(x, [y], 0, g),
        lambda g, x, y: g.gather([y], x, 0).wait(),
        lambda g, x, y: g.gather(output_tensors=[y], root=0, input_tensor=x).wait(),
    ],
    "scatter": [
        lambda g, x, y: dist.scatter(y, [x], 0, g),
        lambda g, x, y: g.scatter(y, [x], 0).wait(),
        lambda g, x, y: g.scatter(output_tensor=y, input_tensors=[x], root=0).wait(),
    ],
    "barrier": [
        lambda g, x, y: dist.barrier(g),
        lambda g, x, y: g.barrier().wait(),
        lambda g, x, y: g.monitored_barrier(),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_all_spellings_of_a_call_are_one(name: str, group: Group, hears: Hears) -> None:
    for spelling in SPELLINGS[name]:
        spelling(group, torch.ones(4), torch.ones(4))
    first, *others = (made._replace(tensors=(), output=None) for made in hears.made)
    assert first.operation == ("all_reduce" if name == "sum" else name)
    assert len(others) == len(SPELLINGS[name]) - 1
    for number, each in enumerate(others):
        assert each == first, number
    assert len({made.alike for made in hears.made}) == 1
    assert len({made.size for made in hears.made}) == 1
    assert first.reduction == {"sum": "SUM", "all_reduce": "MAX", "reduce": "MAX"}.get(
        name, "MAX" if name == "reduce_scatter" else ""
    )
    assert first.peer == (0 if name in ("broadcast", "reduce", "gather", "scatter") else None)
    assert first.sizes == ((16, 16) if name == "all_to_all" else ())


def test_what_torch_refuses_is_torchs_to_say_and_listeners_hear_of_it(
    group: Group, hears: Hears
) -> None:
    with pytest.raises(TypeError):
        group.allreduce("no tensor")
    with pytest.raises(TypeError):
        group.broadcast(torch.ones(1), nothing=1)
    with pytest.raises((RuntimeError, ValueError)):
        group.allreduce([torch.ones(2), torch.ones(2, dtype=torch.int32)]).wait()
    dist.all_reduce(torch.ones(1), group=group)
    ends = [what for what, _ in hears.told]
    assert ends == ["begins", "failed"] * 3 + ["begins", "issued"]


def test_listeners_hear_of_a_call_that_a_later_one_refuses(group: Group, hears: Hears) -> None:
    class Refuses(Hears):
        def begins(self, its_group: Group, made: Arguments) -> object:
            raise commgrid.CommGridError("no")

    refuses = Refuses()
    interposer.listen(refuses)
    try:
        with pytest.raises(commgrid.CommGridError, match="no"):
            dist.all_reduce(torch.ones(1), group=group)
    finally:
        interposer.stop(refuses)
    assert hears.told == [("begins", 1), ("failed", 1)]
    assert refuses.told == []


def messages() -> tuple[list[Any], list[int]]:
    """Rank 0 sends three messages, two with tags and as batches; and unequal parts to all."""
    grid = commgrid.initialize()
    group, other = grid.get_group("dp"), 1 - grid.rank
    hears, x = Hears(), torch.ones(3)
    interposer.listen(hears)
    try:
        if grid.rank == 0:
            dist.send(x, other, group, tag=7)
            group.send(tensors=[x], tag=8, dstRank=other).wait()
        else:
            dist.recv(x, other, group, tag=7)
            group.recv(srcRank=other, tensors=[x], tag=8).wait()
        for _ in range(2):
            ops = [
                dist.P2POp(dist.isend, x, other, group, tag=grid.rank),
                dist.P2POp(dist.irecv, torch.ones(3), other, group, tag=other),
            ]
            for work in batch_isend_irecv(ops):
                work.wait()
        dist.send(x, other, group) if grid.rank else dist.recv(x, None, group)
        sizes = [[1, 2], [3, 4]]
        mine, theirs = sizes[grid.rank], [row[grid.rank] for row in sizes]
        dist.all_to_all_single(
            torch.empty(sum(theirs), 2), torch.ones(sum(mine), 2), theirs, mine, group=group
        )
    finally:
        interposer.stop(hears)
    commgrid.shutdown()
    return (
        [(made.operation, made.peer, made.tag, made.sizes) for made in hears.made],
        hears.batches,
    )


def test_messages_have_their_tags_and_batches() -> None:
    (first, ones), (second, others) = run_on_ranks(messages, 2, backend=None, launcher="torchrun")
    assert first == [
        ("send", 1, 7, ()), ("send", 1, 8, ()),
        *[("send", 1, 0, ()), ("recv", 1, 1, ())] * 2,
        ("recv", None, 0, ()), ("all_to_all", None, 0, (8, 16, 8, 24)),
    ]  # fmt: skip
    assert second == [
        ("recv", 0, 7, ()), ("recv", 0, 8, ()),
        *[("send", 0, 1, ()), ("recv", 0, 0, ())] * 2,
        ("send", 0, 0, ()), ("all_to_all", None, 0, (24, 32, 16, 32)),
    ]  # fmt: skip
    for batches in (ones, others):
        assert batches[:2] == batches[6:] == [0, 0]
        assert 0 < batches[2] == batches[3] < batches[4] == batches[5]
