"""Ranks that others wait for, from synthetic traces of calls that all have ended."""

from __future__ import annotations

import pytest

from commgrid.call_analysis.standing import Standings
from commgrid.call_analysis.straggler import slow_ranks
from commgrid.call_records.call import Call, Group
from commgrid.call_records.trace import Trace

RANKS = (0, 1, 2)


def standings(*calls: tuple[float, float, float]) -> Standings:
    """Of all-reduces, when each rank came to them; they end when the last rank has come."""
    held = {
        rank: tuple(
            Call(Group("dp", RANKS), "all_reduce", shape=(1,), bytes=4, where="a.py:1 step",
                 began=began[rank], issued=began[rank], ended=max(began), number=turn, turn=turn)
            for turn, began in enumerate(calls)
        )
        for rank in RANKS
    }  # fmt: skip
    return Standings(Trace(rank, own, host="one") for rank, own in held.items())


def test_a_slow_rank_is_charged_with_what_the_next_to_last_waits() -> None:
    """Rank 2 is 0.6 s behind rank 1, and rank 1 is 0.3 s behind rank 0."""
    (found,) = slow_ranks(standings((0.0, 0.3, 0.9), (1.0, 1.3, 1.9)))
    assert (found.ranks, found.waiting, found.kind) == ((2,), (0, 1), "slow rank")
    assert found.seconds == pytest.approx(1.2)
    assert "have waited 1.2 s of 1.9 s for it in 2 calls, 0.6 s of it" in found.text


def test_two_ranks_that_come_late_together_are_not_slow() -> None:
    """The last rank keeps the others waiting for no more than 0.1 s."""
    assert not [*slow_ranks(standings((0.0, 0.8, 0.9), (1.0, 1.8, 1.9)))]
