"""Ranks that call attention with other arguments: an error on all of them, at a small cost."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import commgrid
from commgrid import CommGridError, ShapeError, SpecError
from commgrid.context_parallel import WAYS, SequenceSharding, agreement, attention
from commgrid.runtime.grid import HyperCommGrid

LEVELS = {"cp_levels": {"of": "cp", "split": {"cp_ring": -1, "cp_a2a": 2}}}


def same(length: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of 4 heads and as many positions."""
    q, k, v = torch.randn(3, 1, 4, length, 4, dtype=torch.float64)
    return q, k, v


@pytest.mark.ranks(4)
def test_a_rank_that_takes_another_known_sharding_is_named_on_all_ranks(rank: int) -> None:
    """All have agreed on both before, and what travels has the sizes that all expect."""
    commgrid.initialize(cp=4, groups=LEVELS)
    first, other = SequenceSharding.contiguous(16, 4), SequenceSharding.zigzag(16, 4)
    for way in WAYS:
        for sharding in (first, other):
            attention(*same(4), sharding=sharding, way=way)
        with pytest.raises(
            SpecError,
            match=r"attention over group 'cp' of 4 ranks: ranks 0 and 1 of the group have other "
            r"shardings: 16 positions .*rank 0 holds \(\(0, 4\),\).* and 16 positions .*rank 0 "
            r"holds \(\(0, 2\), \(14, 16\)\).*all must be given the same; make each batch's "
            "sharding from",
        ):
            attention(*same(4), sharding=other if rank == 1 else first, way=way)
        attention(*same(4), sharding=other, way=way)  # and the group still works
    fewer = SequenceSharding.contiguous(16, 2)
    with pytest.raises(ShapeError, match="rank 2 of the group: the sharding is over 2 ranks; exp"):
        attention(*same(4), sharding=fewer if rank == 2 else first)
    commgrid.shutdown()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrong", [{"way": "rings"}, {"window": 0}, {"way": "2d"}])
def test_an_option_that_one_rank_alone_cannot_take_is_named_on_both(
    rank: int, wrong: dict[str, Any]
) -> None:
    commgrid.initialize(cp=2)
    sharding = SequenceSharding.contiguous(8, 2)
    given: dict[str, Any] = {"way": "ring"} | (wrong if rank else {})
    told = "rings|window|2d" if rank else "attention over group 'cp' .*: rank 1 of the group: "
    with pytest.raises(CommGridError, match=told):
        attention(*same(4), sharding=sharding, **given)
    attention(*same(4), sharding=sharding)  # and the group still works
    commgrid.shutdown()


@pytest.mark.ranks(2)
def test_shards_of_other_shardings_are_not_joined(rank: int) -> None:
    commgrid.initialize(cp=2)
    first, other = SequenceSharding.contiguous(8, 2), SequenceSharding.zigzag(8, 2)
    taken = other if rank else first
    shard = taken.shard(torch.arange(8.0))
    with pytest.raises(
        SpecError,
        match="unshard over group 'cp' of 2 ranks: ranks 0 and 1 of the group have other sh",
    ):
        taken.unshard(shard)
    with pytest.raises(ShapeError, match=r"rank 1 of the group: rank 1's shard of shape .3,.*is 4"):
        first.unshard(shard[rank:])
    assert first.unshard(first.shard(torch.arange(8.0))).tolist() == list(range(8))
    commgrid.shutdown()


class Calls(TorchDispatchMode):
    """Counts gathered rows of agreement, and numbers read by Python."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_gathered: list[int] = []
        self.numbers_read = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(function)
        if "allgather" in name and args[1].dtype == torch.uint8:
            self.bytes_gathered.append(args[1].numel())
        self.numbers_read += "_local_scalar_dense" in name
        return function(*args, **(kwargs or {}))


@pytest.mark.ranks(2)
def test_a_new_packing_costs_one_small_all_gather_without_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a device the host goes on, and compares the rows in a later call."""
    commgrid.initialize(cp=2)
    waiting: list[bool] = []
    monkeypatch.setattr(agreement, "_started", as_on_a_device(waiting))
    for lengths in ([9, 5], [3, 11], [3, 11], [1, 1, 1, 1, 10]):
        with Calls() as calls:
            attention(*same(7), sharding=SequenceSharding.packed(lengths, 2))
        assert calls.bytes_gathered == [1024]
        assert calls.numbers_read == 0
    commgrid.shutdown()


def as_on_a_device(arrived: list[bool]) -> Callable[..., Any]:
    """`agreement._started` whose rows arrive when `arrived` holds True."""
    started = agreement._started

    def later(*args: Any) -> Any:
        return started(*args)._replace(here=lambda: bool(arrived))

    return later


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("seen", "way"), [("later", "ulysses"), ("backward", "ulysses"), ("backward", "ring")]
)
def test_a_difference_that_a_device_reports_late_is_an_error_of_the_next_call(
    rank: int, seen: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commgrid.initialize(cp=2)
    arrived: list[bool] = []
    monkeypatch.setattr(agreement, "_started", as_on_a_device(arrived))
    first, other = SequenceSharding.contiguous(8, 2), SequenceSharding.zigzag(8, 2)
    q, k, v = (x.requires_grad_() for x in same(4))
    out = attention(q, k, v, sharding=other if rank else first, way=way, causal=False)
    arrived.append(True)
    again = partial(attention, q, k, v, sharding=first)
    with pytest.raises(SpecError, match="ranks 0 and 1 of the group have other shardings"):
        (out.sum().backward if seen == "backward" else again)()
    # A rank raises its own complaint at once.
    arrived.clear()
    if rank == 1:
        with pytest.raises(ShapeError, match="its share of the sharding"):
            attention(q[:, :, 1:], k, v, sharding=first)
    else:
        agreement.agree(commgrid.get_group("cp"), "about", (("what", "it is"),), None)
    commgrid.shutdown()


@pytest.mark.ranks(2, cp=2)
def test_a_dim_that_a_shard_lacks_is_an_error_on_every_rank(grid: HyperCommGrid) -> None:
    sharding = SequenceSharding.contiguous(8, 2)
    with pytest.raises(ShapeError, match=r"rank 1's shard of shape \(4,\) has no dim 3"):
        sharding.unshard(torch.zeros(4), dim=3 if grid.rank else 0)
