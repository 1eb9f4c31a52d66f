"""Published bugs, each as the smallest program that has it, and mended.

Each is of four ranks or fewer, and says where it was reported. `docs/debugging.md` says how
many are found. NVIDIA/Megatron-LM#7546 and pytorch/pytorch#137006 could not be read, and are not
judged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import commgrid
from commgrid.collectives import all_reduce, reduce_from_group

FLOAT = torch.float64
STEPS = 2


@dataclass(frozen=True)
class Published:
    """One bug.

    Args:
        source: repository and number of the report.
        what: goes wrong, in a line.
        command: that finds it; "": none does.
        grids: which the program is run on, for `audit`; the one of `verify` alone.
        said: texts of its message.
        program: takes whether it is mended.
    """

    source: str
    what: str
    command: str
    grids: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    program: Callable[[bool], Any] | None = None


class Norm(nn.Module):
    """A weight that every rank has, of which each sees a part of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 4, dtype=FLOAT))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.weight * x)


def batches() -> list[Tensor]:
    """The same on every rank: 4 sequences of 8 tokens with 4 features."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(4, 8, 4, generator=draw, dtype=FLOAT) for _ in range(STEPS)]


def reduced_over_a_group_of_another_grid(mended: bool) -> None:
    """The gradient of a norm in a sequence-parallel region is summed over tp, and averaged over dp.

    A global accessor returns the tp group of another grid, whose ranks are those of dp here.
    """
    grid = commgrid.initialize(tp=2, dp=2)
    model = Norm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches():
        own = batch.chunk(grid.size("dp"))[grid.get_local_rank("dp")]
        part = own.chunk(grid.size("tp"), dim=1)[grid.get_local_rank("tp")]
        reduce_from_group(model(part).square().sum(), "tp").backward()
        gradient = model.weight.grad
        assert gradient is not None
        dist.all_reduce(gradient, group=grid.get_group("dp"))
        dist.all_reduce(gradient, group=grid.get_group("tp" if mended else "dp"))  # here
        optimizer.step()
        optimizer.zero_grad()


def a_norm_that_is_not_summed(mended: bool) -> None:
    """Each rank of tp has heads of its own, and all share the weight of their norm."""
    grid = commgrid.initialize(tp=2)
    model = Norm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches():
        heads = batch.chunk(grid.size("tp"), dim=1)[grid.get_local_rank("tp")]
        reduce_from_group(model(heads).square().sum(), "tp").backward()
        if mended:
            assert model.weight.grad is not None
            dist.all_reduce(model.weight.grad, group=grid.get_group("tp"))
        optimizer.step()
        optimizer.zero_grad()


def dispatch_and_reduction_in_another_order(mended: bool) -> None:
    """One rank reduces dense gradients before it dispatches tokens to experts, the others after."""
    grid = commgrid.initialize(ep=2, dp=4)
    ep, dp = grid.get_group("ep"), grid.get_group("dp")

    def dispatch() -> None:
        dist.all_to_all_single(torch.empty(4), torch.ones(4), group=ep)

    def reduce() -> None:
        dist.all_reduce(torch.ones(8), group=dp)

    first = [reduce, dispatch] if grid.rank == 3 and not mended else [dispatch, reduce]
    for call in first:
        call()


def groups_made_by_their_own_ranks_alone(mended: bool) -> None:
    """Each rank makes the embedding groups of its own pipeline, and not those of the others."""
    grid = commgrid.initialize(pp=2, dp=2)
    every = [[0, 2], [1, 3]] if mended else [list(grid.get_ranks("pp"))]
    embedding = None
    for ranks in every:
        dist.new_group(ranks[:1])
        made = dist.new_group(ranks)
        embedding = made if grid.rank in ranks else embedding
    dist.all_reduce(torch.ones(1), group=embedding)  # here


def receives_behind_sends(mended: bool) -> None:
    """Two stages send first and post their receives when the activation is needed."""
    grid = commgrid.initialize(pp=2)
    pp, peer = grid.get_group("pp"), 1 - grid.rank
    sent, got = torch.ones(4), torch.empty(4)
    if mended:
        ops = [dist.P2POp(dist.isend, sent, peer, pp), dist.P2POp(dist.irecv, got, peer, pp)]
        works = dist.batch_isend_irecv(ops)
    else:
        works = [dist.isend(sent, peer, pp), dist.irecv(got, peer, pp)]  # here
    for work in works:
        assert work is not None
        work.wait()


def every_step_has_its_loss_over_local_tokens(mended: bool) -> None:
    """The mean of a loss is over the tokens of one cp rank, and each has another count."""
    grid = commgrid.initialize(cp=2)
    model = Norm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mask = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0], dtype=FLOAT)
    for batch in batches():
        cp, size = grid.get_local_rank("cp"), grid.size("cp")
        own, its = batch.chunk(size, dim=1)[cp], mask.chunk(size)[cp]
        count = its.sum() * 4
        if mended:
            count = all_reduce(count, "cp")
        loss = (model(own).square().sum(-1) * its).sum() / count
        loss.backward()
        assert model.weight.grad is not None
        dist.all_reduce(model.weight.grad, group=grid.get_group("cp"))
        if not mended:
            model.weight.grad /= size
        optimizer.step()
        optimizer.zero_grad()


PUBLISHED = (
    Published(
        "NVIDIA/Megatron-LM#6307", "a gradient is reduced over the group of another grid", "audit",
        ("dp=1", "tp=2 dp=2"), ("tp=2 dp=2 differs from dp=1 at step 1", "gradient weight"),
        reduced_over_a_group_of_another_grid,
    ),
    Published(
        "NVIDIA/Megatron-LM#7452, 11", "the gradient of a shared norm is not summed over tp",
        "audit", ("tp=1", "tp=2"),
        ("tp=2 differs from tp=1 at step 1", "gradient weight along tp", "not reduced"),
        a_norm_that_is_not_summed,
    ),
    Published(
        "NVIDIA/Megatron-LM#7452, 9", "the mean of a loss is over one cp rank's tokens", "audit",
        ("cp=1", "cp=2"), ("cp=2 differs from cp=1 at step 1", "gradient weight"),
        every_step_has_its_loss_over_local_tokens,
    ),
    Published(
        "NVIDIA/Megatron-LM#5749",
        "experts' all-to-all and the gradients' reduction wait for each other (the report has no "
        "confirmed cause; this is one)",
        "verify", ("ep=2 dp=4",), ("wait in a circle", "all_to_all", "all_reduce"),
        dispatch_and_reduction_in_another_order,
    ),
    Published(
        "NVIDIA-NeMo/Megatron-Bridge#4985", "ranks make only their own embedding groups", "verify",
        ("pp=2 dp=2",), ("call torch.distributed.new_group in different orders",),
        groups_made_by_their_own_ranks_alone,
    ),
    Published(
        "pytorch/pytorch#172668", "receives are posted behind sends", "verify", ("pp=2",),
        ("wait in a circle", "pp send 0 to rank 1"), receives_behind_sends,
    ),
    Published(
        "NVIDIA-NeMo/Automodel#2768",
        "a two-dimensional mesh replicates what should be sharded: more memory, the same numbers",
        "",
    ),
    Published(
        "pytorch/pytorch#189902", "documents of different lengths load cp ranks unevenly", ""
    ),
    Published(
        "pytorch/pytorch#196082",
        "a counter per process in keys of the store: ranks wait in the store, in no collective", "",
    ),
)  # fmt: skip
