"""What a failing test of several ranks prints: the cause first, and no more than is needed."""

import time

import pytest

from tests.ranks import RanksFailed, run_on_ranks


def waits_for_the_other(rank: int) -> None:
    if rank == 1:
        raise ValueError("the cause")
    time.sleep(60)


def test_the_rank_that_failed_first_is_printed_first() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_on_ranks(waits_for_the_other, 3, per_rank=[(0,), (1,), (2,)], init=None, timeout=1)
    said = str(failed.value)
    ranks = [line.split()[2] for line in said.splitlines() if line.startswith("--- rank")]
    assert ranks == ["1", "0", "2"]
    assert "ValueError: the cause" in said
    assert said.count("in waits_for_the_other\n") == 3  # where the killed ones were
    assert said.count("in _child\n") == 3
    assert "pytest" not in said  # nor where their parent was when it forked them
