"""Each gradient reaches the tensor of its own call, or an error says which call's does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid.bridge import Bridge
from commgrid.errors import CommGridError
from commgrid.testing import run_on_ranks


def bridge_of_two(**how: Any) -> tuple[int, Bridge]:
    me = dist.get_rank()
    grids = [commgrid.initialize(name=f"{r}", ranks=[r], timeout=30.0) if r == me else None
             for r in (0, 1)]  # fmt: skip
    return me, Bridge(*grids, startup_timeout=60.0, **how)


def backwards(source: list[int], target: list[int], dynamic: bool) -> list[float]:
    """The gradient of each call's tensor, of shape call + 1 if shapes may change."""
    me, bridge = bridge_of_two(dynamic=dynamic)
    given = [torch.ones(call + 1 if dynamic else 2, requires_grad=True) for call in range(4)]
    got = [bridge(given[call] if me == 0 else None) for call in range(4)]
    for call in source if me == 0 else target:
        loss = got[call] if me == 0 else (got[call] * 10**call).sum()
        loss.backward()
    commgrid.shutdown()
    return [float(x.grad[0]) for x in given if x.grad is not None]


ORDERS = {
    "the same": ([0, 1, 2, 3], [0, 1, 2, 3]),
    "reversed": ([3, 2, 1, 0], [3, 2, 1, 0]),
    "mixed": ([1, 3, 0, 2], [1, 3, 0, 2]),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["one shape", "other shapes"])
@pytest.mark.parametrize("orders", ORDERS.values(), ids=ORDERS)
def test_both_sides_run_backwards_in_any_one_order(
    orders: tuple[list[int], list[int]], dynamic: bool
) -> None:
    source, _ = run_on_ranks(backwards, 2, *orders, dynamic)
    assert source == [1.0, 10.0, 100.0, 1000.0]


def one_loss() -> list[float]:
    """Each side adds its results up, so that autograd runs the last call's backward first."""
    me, bridge = bridge_of_two()
    given = [torch.ones(2, requires_grad=True) for _ in range(3)]
    if me == 0:
        sum(bridge(x) for x in given).backward()
    else:
        sum((bridge(None) * 10**call).sum() for call in range(3)).backward()
    commgrid.shutdown()
    return [float(x.grad[0]) for x in given if x.grad is not None]


def test_results_may_be_one_loss_on_both_sides() -> None:
    assert run_on_ranks(one_loss, 2)[0] == [1.0, 10.0, 100.0]


def tells(source: list[int], target: list[int], dynamic: bool) -> str:
    """The error of backwards in these orders; what is not in them is dropped."""
    try:
        backwards(source, target, dynamic)
    except CommGridError as error:
        commgrid.get_grid(f"{dist.get_rank()}").abort()
        commgrid.shutdown()
        return str(error)
    return "nothing"


@pytest.mark.parametrize("dynamic", [False, True], ids=["one shape", "other shapes"])
@pytest.mark.parametrize(
    ("source", "first"),
    [([3, 2, 1, 0], (0, 3)), ([0, 2, 3], (1, 2)), ([3], (0, 3))],
    ids=["another order", "one dropped", "many dropped"],
)
def test_another_calls_gradient_is_an_error(
    source: list[int], first: tuple[int, int], dynamic: bool
) -> None:
    """It would have been the gradient of another call's tensor."""
    told, _ = run_on_ranks(tells, 2, source, [0, 1, 2, 3], dynamic, check=False)
    sent, runs = first
    assert f"rank 1 sent the gradient of call {sent}, and this rank runs the backward" in told
    assert f"of call {runs}; " in told
    assert f"if it was dropped, the tensor of call {sent} gets no gradient" in told


def evaluates() -> int:
    """Neither side runs a backward of calls 1 and 2, though autograd records them."""
    me, bridge = bridge_of_two()
    x = torch.ones(2, requires_grad=True)
    for call in range(5):
        result = bridge(x if me == 0 else None)
        if call not in (1, 2):
            result.sum().backward()
        del result
    commgrid.shutdown()
    return 0 if x.grad is None else int(x.grad[0])


def test_calls_without_a_backward_on_either_side_are_no_error() -> None:
    assert run_on_ranks(evaluates, 2)[0] == 3


def copies(differ: bool, compare: bool) -> str:
    source = commgrid.initialize(name="source", ranks=[0, 1], tp=2) if dist.get_rank() < 2 else None
    target = commgrid.initialize(name="target", ranks=[2]) if dist.get_rank() == 2 else None
    bridge = Bridge(source, target, compare=compare, startup_timeout=60.0)
    x = torch.ones(2) + (differ and dist.get_rank()) if source else None
    try:
        bridge(x)
        told = "crossed"
    except CommGridError as error:
        told = str(error)
    commgrid.shutdown()
    return told


def test_copies_that_differ_do_not_cross() -> None:
    assert run_on_ranks(copies, 3, False, True) == ["crossed"] * 3
    assert run_on_ranks(copies, 3, True, False) == ["crossed"] * 3
    for told in run_on_ranks(copies, 3, True, True, check=False):
        assert "bridge 'bridge': ranks 0-1 gave tensors that should be copies and differ" in told
        assert "compare=False" in told
