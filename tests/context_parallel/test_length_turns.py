"""A batch's documents attended turn by turn, each on its plan's group, against plain attention."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

import commgrid
from commgrid.context_parallel import (
    Costs,
    LengthGroups,
    LengthPlan,
    SequenceSharding,
    attention,
    plan_lengths,
)
from commgrid.testing import run_on_ranks
from tests.context_parallel.plain import Case, inputs, plain

LENGTHS = [70, 9, 24, 1, 33, 5, 48, 2, 17, 12]
RANKS, ROOM = 4, 30


def make_plan() -> LengthPlan:
    return plan_lengths(LENGTHS, RANKS, tokens_per_rank=ROOM, costs=Costs(exchange=50.0))


def batch() -> Case:
    """All documents packed in the batch's order, as one rank would attend them."""
    return Case(SequenceSharding.packed(LENGTHS, 1))


def turn_by_turn() -> list[tuple[list[int], list[Tensor]]]:
    """For each turn of this rank the batch's positions that it held, and output and gradients."""
    groups = LengthGroups(RANKS)
    grid = commgrid.initialize(cp=RANKS, groups=groups.rows())
    begins = [0, *accumulate(LENGTHS)]
    whole, plan, found = inputs(batch(), torch.float64), make_plan(), []
    for turn in plan.turns:
        if grid.get_local_rank("cp") not in turn.part.members:
            continue
        sharding = SequenceSharding(turn.tokens, plan.ranges(turn), [0, *accumulate(turn.lengths)])
        packed = [p for i in turn.documents for p in range(begins[i], begins[i + 1])]
        rank = grid.get_local_rank(turn.group)
        own = [packed[p] for p in sharding.positions(rank).tolist()]
        q, k, v, gradient = (x[:, :, own].clone() for x in whole)
        for x in (q, k, v):
            x.requires_grad_()
        out = attention(q, k, v, sharding=sharding, group=turn.group)
        out.backward(gradient)
        assert q.grad is not None
        assert k.grad is not None
        assert v.grad is not None
        found.append((own, [out.detach(), q.grad, k.grad, v.grad]))
    return found


def test_turns_attend_like_the_whole_batch() -> None:
    plan = make_plan()
    assert len({turn.group for turn in plan.turns}) == 3
    expected = plain(batch(), inputs(batch(), torch.float64))
    seen = []
    for done in run_on_ranks(turn_by_turn, RANKS):
        for own, tensors in done:
            assert len(own) <= ROOM
            seen += own
            for ours, whole in zip(tensors, expected, strict=True):
                torch.testing.assert_close(ours, whole[:, :, own], rtol=1e-12, atol=1e-12)
    assert sorted(seen) == list(range(sum(LENGTHS)))
