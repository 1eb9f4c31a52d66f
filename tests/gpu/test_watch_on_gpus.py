"""Over NCCL a rank that is gone, stopped or late is named by all, and they go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import watched_between
from tests.watched import EXPECTED, check, what_survivors_see


@pytest.mark.parametrize("how", EXPECTED)
def test_a_rank_that_fails_is_named_over_nccl(how: str, tmp_path: Path) -> None:
    timeout = 4.0 if how == "stopped" else 100.0
    check(how, what_survivors_see(how, timeout, tmp_path, cuda=True))


def test_a_rank_that_does_not_come_is_named_with_its_line(tmp_path: Path) -> None:
    for each in what_survivors_see("slept", 10.0, tmp_path, cuda=True):
        assert (each["kind"], each["again"]) == ("PeerTimeoutError", [3.0] * 3), each
        assert "rank 2 has not come to call" in each["told"]
        assert "it is at watched.py:" in each["told"]
        assert "in misbehave" in each["told"]
        assert 10 <= each["seconds"] < 70


@pytest.mark.parametrize(("how", "where"), watched_between.CASES)
def test_a_rank_that_fails_between_two_grids_is_named_on_both(
    how: str, where: str, tmp_path: Path
) -> None:
    timeout = 4.0 if how == "stopped" else 100.0
    seen = watched_between.what_survivors_see(how, where, timeout, tmp_path, cuda=True)
    watched_between.check(how, where, seen)
