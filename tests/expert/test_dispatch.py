"""Permutation and dispatch: what arrives where, and that the way back is the exact inverse."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import commgrid
from commgrid import ShapeError, SpecError, UnknownGroupError
from commgrid.collectives.group_ref import GroupRef
from commgrid.expert import Dispatcher, GroupedExperts, MoELayer, Router, Routing
from commgrid.expert.permutation import (
    arrange,
    permute,
    permute_weights,
    reorder,
    sort_by_expert,
    undo,
    unpermute,
)
from commgrid.testing import run_on_ranks
from tests.sizes import some


def routing_of(
    experts: Tensor, num_experts: int, kept: Tensor | None = None, capacity: int | None = None
) -> Routing:
    """Every choice of a token with the same weight, of 1 in all; a power of 2 for top_k 1, 2, 4."""
    weights = torch.full(experts.shape, 1 / max(experts.shape[1], 1), dtype=torch.float64)
    return Routing(experts, weights, kept, num_experts, capacity, {}, torch.tensor(True))


# -- permutation -------------------------------------------------------------------------


@st.composite
def choices(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    """Choices of distinct experts, which of them are kept, and how many experts there are."""
    num_experts = draw(st.integers(1, 6))
    top_k = draw(st.integers(1, num_experts))
    tokens = draw(st.integers(0, 7))
    one = st.permutations(range(num_experts)).map(lambda order: order[:top_k])
    experts = [draw(one) for _ in range(tokens)]
    kept = [draw(st.booleans()) for _ in range(tokens * top_k)]
    shape = (tokens, top_k)
    return (
        torch.tensor(experts, dtype=torch.int64).view(shape),
        torch.tensor(kept).bool().view(shape),
        num_experts,
    )


@settings(max_examples=200, deadline=None)
@given(choices(), st.sampled_from(["all", "kept", "padded"]))
def test_rows_are_the_choices_by_expert(made: tuple[Tensor, Tensor, int], how: str) -> None:
    experts, kept, num_experts = made
    kept = torch.ones_like(kept) if how == "all" else kept
    tokens, top_k = experts.shape
    x = torch.arange(1.0, 2 * tokens + 1).view(tokens, 2)
    weights = torch.arange(1.0, tokens * top_k + 1).view(tokens, top_k)
    by_expert = [
        [(t, k) for t in range(tokens) for k in range(top_k) if experts[t, k] == e and kept[t, k]]
        for e in range(num_experts)
    ]
    capacity = 1 + max(map(len, by_expert)) if how == "padded" else None
    wanted = [pair for one in by_expert for pair in one]
    given_kept = None if how == "all" else kept
    found = arrange(experts, num_experts, given_kept, num_rows=len(wanted), capacity=capacity)
    rows, row_weights = permute(x, found), permute_weights(weights, found)
    if capacity is not None:
        assert len(rows) == capacity * num_experts
        filled = [e * capacity + i for e, one in enumerate(by_expert) for i in range(len(one))]
        rest = [i for i in range(len(rows)) if i not in filled]
        assert not rows[rest].any()
        assert not row_weights[rest].any()
        rows[rest] = 7.0  # what is not asked for does not matter
        assert torch.equal(unpermute(rows, found), x * kept.sum(1)[:, None])
        rows, row_weights = rows[filled], row_weights[filled]
    else:
        assert torch.equal(unpermute(rows, found), x * kept.sum(1)[:, None])
    assert rows.tolist() == [x[t].tolist() for t, _ in wanted]
    assert row_weights.tolist() == [weights[t, k].item() for t, k in wanted]


def test_a_row_that_is_not_finite_reaches_its_own_token_only() -> None:
    experts = torch.tensor([[0], [0], [1]])
    made = arrange(experts, 2, torch.tensor([[True], [False], [True]]), num_rows=2)
    found = unpermute(torch.tensor([[math.inf], [2.0]]), made)
    assert found.flatten().tolist() == [math.inf, 0.0, 2.0]


@pytest.mark.parametrize("capacity", [None, 3])
def test_permute_and_unpermute_are_adjoint(capacity: int | None) -> None:
    experts = torch.tensor([[0, 2], [2, 1], [2, 0]])
    kept = torch.tensor([[True, True], [False, True], [True, True]])
    made = arrange(experts, 4, kept, num_rows=5, capacity=capacity)
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(len(made.choices), 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: permute(x, made), (x,))
    assert torch.autograd.gradcheck(lambda rows: unpermute(rows, made), (rows,))
    product = (permute(x, made) * rows).sum()
    torch.testing.assert_close(product, (x * unpermute(rows, made)).sum())


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_rows_by_sender_are_sorted_by_expert(n: int, m: int, data: st.DataObject) -> None:
    sizes = [[data.draw(st.integers(0, 3)) for _ in range(m)] for _ in range(n)]
    rows = [(s, e, i) for s in range(n) for e in range(m) for i in range(sizes[s][e])]
    order = sort_by_expert(torch.tensor(sizes), len(rows))
    given_rows = torch.tensor(rows, dtype=torch.float64).view(-1, 3)
    found = reorder(given_rows, order)
    assert [tuple(row) for row in found.tolist()] == sorted(rows, key=lambda r: (r[1], r[0], r[2]))
    assert torch.equal(undo(found, order), given_rows)


def test_reorder_and_undo_are_adjoint() -> None:
    order = sort_by_expert(torch.tensor([[1, 2], [1, 0]]), 4)
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: reorder(x, order), (x,))
    assert torch.autograd.gradcheck(lambda x: undo(x, order), (x,))


# -- dispatch ----------------------------------------------------------------------------


def random_choices(draw: random.Random, num_experts: int, top_k: int, ranks: int) -> list[Tensor]:
    """Each rank's choices; some to a few experts only, some ranks without any token."""
    crowded = draw.random() < 0.5
    wanted = draw.sample(range(num_experts), max(top_k, 1 if crowded else num_experts))
    found = []
    for _ in range(ranks):
        tokens = draw.choice([0, 1, draw.randrange(9)])
        rows = [draw.sample(wanted, top_k) for _ in range(tokens)]
        found.append(torch.tensor(rows, dtype=torch.int64).view(tokens, top_k))
    return found


def every_routing(ep: int, etp: int, kind: str) -> None:
    grid = commgrid.initialize(ep=ep, etp=etp)
    groups = GroupRef("ep"), GroupRef("etp")
    draw = random.Random(ep * 10 + etp)
    for index in range(40):
        top_k = (1, 2, 4)[index % 3]
        num_experts = ep * draw.choice([1, 2, 4])
        num_experts = num_experts if num_experts >= top_k else ep * 4
        everyone = random_choices(draw, num_experts, top_k, grid.world_size)
        dropped = draw.random() < 0.5
        kept = [torch.rand(e.shape, generator=torch.Generator().manual_seed(index)) < 0.6
                for e in everyone]  # fmt: skip
        capacity = max(1, *(len(e) for e in everyone)) if kind == "padded" else None
        experts = everyone[grid.rank]
        routing = routing_of(experts, num_experts, kept[grid.rank] if dropped else None, capacity)
        x = torch.randn(len(experts), 3, dtype=torch.float64)
        x += grid.rank  # other numbers on each rank
        made = Dispatcher(num_experts, *groups, pad=kind == "padded")
        dispatched = made.dispatch(x, routing)
        if kind != "padded":
            check_counts(grid, everyone, kept if dropped else None, num_experts, dispatched.counts)
        # Identity experts; each rank of etp computes its share of the outputs.
        outputs = dispatched.rows * dispatched.weights[:, None] / etp
        share = routing.weights if routing.kept is None else routing.weights * routing.kept
        wanted = x * share.sum(1, keepdim=True)
        assert torch.equal(made.combine(outputs, dispatched), wanted), (index, kind)
    commgrid.destroy()


def check_counts(
    grid: commgrid.HyperCommGrid, everyone: list[Tensor], kept: list[Tensor] | None,
    num_experts: int, counts: tuple[int, ...],
) -> None:  # fmt: skip
    """Each expert of this rank has as many rows as its block of ranks has chosen it."""
    senders = grid.get_ranks("ep", "etp")
    local = num_experts // grid.size("ep")
    for place, found in enumerate(counts):
        expert = grid.get_local_rank("ep") * local + place
        hits = [everyone[rank] == expert for rank in senders]
        if kept is not None:
            hits = [hit & kept[rank] for hit, rank in zip(hits, senders, strict=True)]
        assert found == sum(int(hit.sum()) for hit in hits)


def all_sizes(kind: str) -> None:
    for ep, etp in some(((1, 1), (4, 1), (2, 2), (1, 4), (2, 1)), 3):
        every_routing(ep, etp, kind)


@pytest.mark.parametrize("kind", ["dropless", "padded"])
def test_combine_is_the_exact_inverse_of_dispatch(kind: str) -> None:
    """Bit for bit: weights are 1, 1/2 or 1/4, and so are the shares of etp."""
    run_on_ranks(all_sizes, 4, kind)


class Waits(TorchDispatchMode):
    """Counts operations that make the host wait for the device, or would on one."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "unique", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(name in str(function) for name in self.NAMES):
            self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def one_wait() -> None:
    commgrid.initialize(ep=2, etp=1)
    lists = []
    tolist = Tensor.tolist

    def counted(tensor: Tensor) -> Any:
        lists.append(tensor.shape)
        return tolist(tensor)

    Tensor.tolist = counted  # type: ignore[method-assign]
    for options, allowed in (
        ({}, 1),
        ({"capacity_factor": 1.0, "aux_loss": 0.1, "bias_rate": 0.1}, 1),
    ):
        layer = MoELayer(8, 16, num_experts=4, top_k=2, **options)  # type: ignore[arg-type]
        x = torch.randn(6, 8, requires_grad=True)
        lists.clear()
        with Waits() as waits:
            layer(x).sum().backward()
        assert len(lists) + len(waits.seen) == allowed, (options, lists, waits.seen)
    layer = MoELayer(8, 16, num_experts=4, top_k=2, capacity_factor=1.0, pad=True)
    lists.clear()
    with Waits() as waits:
        layer(torch.randn(6, 8)).sum().backward()
    # On the CPU the check for NaN looks; a device asserts by itself.
    assert not lists
    assert waits.seen == ["aten._local_scalar_dense.default"]


class Operations(TorchDispatchMode):
    """The operations between two points, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def one_gather() -> None:
    """The same operations for 2 experts a rank as for 16."""
    commgrid.initialize(ep=2, etp=2)
    torch.manual_seed(0)
    found, exchanges = [], []
    exchange = dist.all_to_all_single

    def counted(*args: Any, group: Any, **options: Any) -> Any:
        exchanges[-1] += group.group_desc.endswith("ep")
        return exchange(*args, group=group, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counted)
        for num_experts in (4, 32):
            layer = MoELayer(8, 16, num_experts=num_experts, top_k=2)
            x = torch.randn(6, 8, requires_grad=True)
            with torch.no_grad():
                routing = layer.router(x)
            with Operations() as seen:
                exchanges.append(0)
                sent = layer.dispatcher.dispatch(x, routing)
                exchanges.append(0)
                y = layer.dispatcher.combine(sent.rows, sent)
                exchanges.append(0)
                y.sum().backward()
            found.append(seen.seen)
    few, many = found
    assert few == many
    # Over ep: counts, rows and weights there; rows back; in backward a gradient for each of these.
    assert exchanges == [3, 1, 3] * 2


def test_rows_are_sorted_by_one_gather_however_many_experts() -> None:
    run_on_ranks(one_gather, 4)


def test_the_host_waits_once_a_layer() -> None:
    run_on_ranks(one_wait, 2)


# -- bad input ---------------------------------------------------------------------------


def one_rank_with_nan() -> list[str]:
    grid = commgrid.initialize(ep=2, etp=2)
    said = []
    for capacity in (None, 1.0):
        layer = MoELayer(4, 8, num_experts=2, top_k=1, capacity_factor=capacity)
        x = torch.randn(3, 4)
        if grid.rank in (1, 2):
            x[1, 2] = math.nan
        with pytest.raises(ShapeError) as caught:
            layer(x)
        said.append(str(caught.value))
    return said


def test_logits_that_are_not_finite_are_told_to_every_rank() -> None:
    for said in run_on_ranks(one_rank_with_nan, 4):
        for one in said:
            assert one.startswith(
                "MoELayer(4, 8, 2, 1): the router's logits are NaN or infinite on ranks [1, 2]"
            )


def wrong_numbers() -> None:
    commgrid.initialize(ep=2, etp=1)
    for error, said, make in (
        (SpecError, "MoELayer(4, 8, 3, 1): num_experts=3 cannot be shared equally among the 2 "
                    "ranks of group 'ep'", lambda: MoELayer(4, 8, 3, 1)),
        (SpecError, "top_k=5 of num_experts=4: expected 1 to 4", lambda: MoELayer(4, 8, 4, 5)),
        (SpecError, "capacity_factor=0: expected above 0",
         lambda: MoELayer(4, 8, 4, 1, capacity_factor=0)),
        (SpecError, "num_experts=3 cannot be shared equally among the 2 ranks of group 'ep'",
         lambda: Dispatcher(3, GroupRef("ep"), GroupRef("etp"))),
        (SpecError, "pad=True: the router has no capacity",
         lambda: MoELayer(4, 8, 4, 1, pad=True)(torch.zeros(2, 4))),
        (ShapeError, "MoELayer(4, 8, 4, 1): tokens of shape (2, 5); expected (*, 4)",
         lambda: MoELayer(4, 8, 4, 1)(torch.zeros(2, 5))),
        (ShapeError, "GroupedExperts(4, 8, 3): num_experts=3 cannot be shared",
         lambda: GroupedExperts(4, 8, 3)),
        (ShapeError, "GroupedExperts(4, 8, 4): rows of shape (3, 4) and counts=[1, 1]",
         lambda: GroupedExperts(4, 8, 4)(torch.zeros(3, 4), torch.zeros(3), [1, 1])),
        (ShapeError, "tokens of shape (3, 4) and a routing of 2 tokens to 4 experts",
         lambda: MoELayer(4, 8, 4, 1).dispatcher.dispatch(
             torch.zeros(3, 4), Router(4, 4, 1)(torch.zeros(2, 4)))),
    ):  # fmt: skip
        with pytest.raises(error) as caught:
            make()
        assert said in str(caught.value)
    commgrid.destroy()
    commgrid.initialize()
    with pytest.raises(UnknownGroupError) as missing:
        MoELayer(4, 8, 4, 1)
    assert "MoELayer(4, 8, 4, 1): no group is named 'ep'" in str(missing.value)
    assert "commgrid.initialize(ep=…) makes them" in str(missing.value)


def test_wrong_numbers() -> None:
    run_on_ranks(wrong_numbers, 2)
