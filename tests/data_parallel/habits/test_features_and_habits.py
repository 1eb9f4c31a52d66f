"""Features and habits in pairs: each program equals the unsharded model, or all ranks refuse it."""

from __future__ import annotations

from functools import cache

import pytest

from commgrid.testing import run_on_ranks
from tests.data_parallel.habits import copies, decisions, experts, slices, stages
from tests.data_parallel.habits.sides import Outcome, Table, judged, outcomes

TABLE = Table({**copies.TABLE, **slices.TABLE, **stages.TABLE, **experts.TABLE, **decisions.TABLE})
TOGETHER = 12
"""Programs that one world runs, one after the other."""


def _worlds() -> dict[str, tuple[str, ...]]:
    """For each program all those of its world."""
    found = {}
    for ranks in sorted({program.ranks for program in TABLE.values()}):
        names = [name for name, program in TABLE.items() if program.ranks == ranks]
        for start in range(0, len(names), TOGETHER):
            world = tuple(names[start : start + TOGETHER])
            found |= dict.fromkeys(world, world)
    return found


WORLDS = _worlds()


@cache
def results(names: tuple[str, ...]) -> list[dict[str, Outcome]]:
    """Each rank's results of the programs of one world."""
    return run_on_ranks(outcomes, TABLE[names[0]].ranks, TABLE, names, timeout=200.0)


@pytest.mark.parametrize("name", WORLDS)
def test_it_equals_the_unsharded_model_or_all_ranks_refuse_it(name: str) -> None:
    wrong = judged(TABLE[name], [rank[name] for rank in results(WORLDS[name])])
    assert not wrong, wrong
