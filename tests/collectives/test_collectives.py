"""Collectives against the same arithmetic in one process; pairs against the adjoint identity."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import commgrid
from commgrid import ShapeError
from commgrid.collectives import (
    all_gather,
    all_gather_from_group,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    reduce_scatter,
    reduce_scatter_to_group,
    scatter_to_group,
)
from commgrid.runtime.grid import HyperCommGrid
from commgrid.testing import run_on_ranks


def of(rank: int, *shape: int) -> Tensor:
    """The tensor that a rank holds, which any rank can draw."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def plain() -> None:
    grid = commgrid.initialize(tp=4)
    peers, me = grid.get_ranks("tp"), grid.get_local_rank("tp")
    mine, every = of(grid.rank, 8, 4), [of(rank, 8, 4) for rank in peers]
    before = mine.clone()
    stacked = torch.stack(every)
    for op, expected in {
        "sum": stacked.sum(0), "avg": stacked.mean(0), "max": stacked.amax(0),
        "min": stacked.amin(0), "prod": stacked.prod(0),
    }.items():  # fmt: skip
        torch.testing.assert_close(all_reduce(mine, "tp", op=op), expected)
    for dim in (0, 1, -1):
        torch.testing.assert_close(all_gather(mine, "tp", dim=dim), torch.cat(every, dim))
        share = stacked.sum(0).chunk(4, dim)[me]
        torch.testing.assert_close(reduce_scatter(mine, "tp", dim=dim), share)
    received = torch.cat([theirs.chunk(4)[me] for theirs in every])
    torch.testing.assert_close(all_to_all(mine, "tp"), received)
    send = [[3, 0, 4, 1], [0, 8, 0, 0], [2, 2, 2, 2], [1, 1, 1, 5]]
    parts = [theirs.split(send[i])[me] for i, theirs in enumerate(every)]
    uneven = all_to_all(mine, "tp", send=send[me], receive=[row[me] for row in send])
    torch.testing.assert_close(uneven, torch.cat(parts))
    for source in range(4):
        assert torch.equal(broadcast(mine, "tp", source=source), every[source])
    barrier("tp")
    scalars = all_gather(torch.tensor(float(me)), "tp")
    assert torch.equal(scalars, torch.arange(4.0))
    assert all_gather(torch.tensor(1.0), "pp").shape == (1,)
    # A transposed view is no contiguous memory; a group of one communicates nothing.
    torch.testing.assert_close(all_reduce(mine.t(), grid.get_group("tp")), stacked.sum(0).t())
    for alone in (all_reduce, all_gather, reduce_scatter, all_to_all, broadcast):
        copy = alone(mine, "pp")
        assert torch.equal(copy, mine)
        assert copy.data_ptr() != mine.data_ptr()
    barrier("pp")
    assert torch.equal(mine, before)


def test_collectives_equal_one_process() -> None:
    run_on_ranks(plain, 8)


Pair = tuple[Callable[..., Tensor], dict[str, int]]
PAIRS: list[Pair] = [
    (copy_to_group, {}),
    (reduce_from_group, {}),
    *[(pair, {"dim": dim}) for dim in (0, -1, 1)
      for pair in (scatter_to_group, gather_from_group,
                   reduce_scatter_to_group, all_gather_from_group)],
]  # fmt: skip

# Which tensors are equal on all ranks of the group: (input, output) of each pair. Where a tensor
# is one, it counts once in an inner product; where ranks hold parts of it, their sum counts.
REPLICATED = {
    copy_to_group: (True, False), reduce_from_group: (False, True),
    scatter_to_group: (True, False), gather_from_group: (False, True),
    reduce_scatter_to_group: (False, False), all_gather_from_group: (False, False),
}  # fmt: skip


def adjoint() -> None:
    """⟨A x, y⟩ = ⟨x, Aᵀ y⟩ over the group, exactly what a forward/backward pair must satisfy."""
    grid = commgrid.initialize(tp=4)
    group = grid.get_group("tp")
    for pair, options in PAIRS:
        replicated_in, replicated_out = REPLICATED[pair]
        seed = grid.get_all_ranks("tp").index(grid.get_ranks("tp")) * 100
        x = of(seed if replicated_in else seed + grid.rank, 8, 4, 4).requires_grad_()
        out = pair(x, "tp", **options)
        y = of(7 + (seed if replicated_out else seed + grid.rank), *out.shape)
        out.backward(y)
        assert x.grad is not None
        left, right = (out.detach() * y).sum(), (x.detach() * x.grad).sum()
        if not replicated_out:
            dist.all_reduce(left, group=group)
        if not replicated_in:
            dist.all_reduce(right, group=group)
        # Rounding of sums of 512 terms in fp64.
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def test_pairs_are_adjoint() -> None:
    run_on_ranks(adjoint, 8)


def uneven() -> None:
    """Slices of other sizes on each rank, one of them empty: forward, and the gradient."""
    grid = commgrid.initialize(tp=4)
    me, sizes = grid.get_local_rank("tp"), [3, 0, 1, 4]
    whole = [of(rank, 2, 8) for rank in range(4)]
    slices = [one.split(sizes, 1) for one in whole]
    total = torch.stack(whole).sum(0)
    for pair, given, made, upstream, gradient in (
        (scatter_to_group, whole[0], slices[0][me], slices[1][me], whole[1]),
        (gather_from_group, slices[0][me], whole[0], whole[1], slices[1][me]),
        (reduce_scatter_to_group, whole[me], total.split(sizes, 1)[me], slices[0][me], whole[0]),
        (all_gather_from_group, slices[0][me], whole[0], whole[me], total.split(sizes, 1)[me]),
    ):
        x = given.clone().requires_grad_()
        out = pair(x, "tp", dim=1, sizes=sizes)
        # Sums of four terms in another order.
        torch.testing.assert_close(out, made, rtol=1e-14, atol=1e-14)
        out.backward(upstream)
        torch.testing.assert_close(x.grad, gradient, rtol=1e-14, atol=1e-14)


def test_uneven_slices_lie_where_their_sizes_say() -> None:
    run_on_ranks(uneven, 4)


def finite_differences() -> None:
    """Each pair's gradient against central differences of a whole-group objective in fp64."""
    grid = commgrid.initialize(tp=2)
    group = grid.get_group("tp")
    for pair, options in PAIRS:
        replicated_in, replicated_out = REPLICATED[pair]
        x = of(0 if replicated_in else grid.rank, 2, 4, 2).requires_grad_()

        def objective(x: Tensor, pair: Any = pair, options: Any = options) -> Tensor:
            value = pair(x, "tp", **options).sin().sum()
            return value / 2 if REPLICATED[pair][1] else value

        value = objective(x) * (2 if replicated_out else 1)
        value.backward()
        assert x.grad is not None
        for rank in range(1 if replicated_in else 2):
            for index in ((0, 1, 1), (1, 2, 0)):
                moved = []
                for step in (1e-6, -1e-6):
                    y = x.detach().clone()
                    if replicated_in or grid.rank == rank:
                        y[index] += step
                    whole = objective(y)
                    dist.all_reduce(whole, group=group)
                    moved.append(whole)
                slope = (moved[0] - moved[1]) / 2e-6
                if replicated_in or grid.rank == rank:
                    # Central differences of step 1e-6 are right to about 1e-9 here.
                    torch.testing.assert_close(slope, x.grad[index], rtol=1e-7, atol=1e-7)


def test_pairs_agree_with_finite_differences() -> None:
    run_on_ranks(finite_differences, 2)


def layer_error() -> list[str]:
    commgrid.initialize(tp=4)
    said = []
    for call in (
        lambda: scatter_to_group(torch.ones(3, 6), "tp"),
        lambda: reduce_scatter(torch.ones(6, 4), "tp"),
        lambda: all_to_all(torch.ones(6), "tp"),
        lambda: all_to_all(torch.ones(6), "tp", send=[1, 2, 3]),
        lambda: broadcast(torch.ones(1), "tp", source=4),
        lambda: all_reduce(torch.ones(1), "tp", op="mean"),
        lambda: scatter_to_group(torch.ones(4, 4), "tp", dim=2),
    ):
        with pytest.raises(ShapeError) as caught:
            call()
        said.append(str(caught.value))
    return said


def test_misfits_name_shape_and_group() -> None:
    said = run_on_ranks(layer_error, 4)[0]
    assert said[0].startswith(
        "dim -1 of a tensor of shape (3, 6) cannot be shared equally among the"
    )
    assert "4 ranks of group 'tp" in said[0]
    assert "send=[1, 2, 3] does not share the 6 rows" in said[3]
    assert "source=4 is outside group 'tp" in said[4]
    assert said[5] == "op='mean': expected one of sum, avg, max, min, prod"


def test_a_group_of_one_returns_its_input() -> None:
    def alone() -> None:
        commgrid.initialize()
        x = torch.ones(3, requires_grad=True)
        for pair in REPLICATED:
            assert pair(x, "tp") is x

    run_on_ranks(alone, 1, backend=None)


def test_half_precision_travels() -> None:
    def half() -> None:
        commgrid.initialize(tp=2)
        for dtype in (torch.bfloat16, torch.float16):
            ones = torch.ones(3, dtype=dtype)
            assert torch.equal(all_reduce(ones, "tp"), ones * 2)
            assert torch.equal(all_gather(ones, "tp"), torch.ones(6, dtype=dtype))

    run_on_ranks(half, 2)


@pytest.mark.ranks([1, 2])
def test_collectives_without_a_gradient_have_no_graph(grid: HyperCommGrid) -> None:
    """A loss that is averaged before backward cannot train on this rank's share alone."""
    x = torch.ones(2, 3, requires_grad=True)
    made = [all_reduce(x, "dp", op="avg"), all_gather(x, "dp"), reduce_scatter(x, "dp"),
            broadcast(x, "dp"), all_to_all(x, "dp")]  # fmt: skip
    assert not any(each.requires_grad for each in made)
