"""Over NCCL a rank that is gone, stopped or late is named by all, and they go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.watched import CASES, check, what_survivors_see


@pytest.mark.parametrize(
    ("how", "place"), [case for case in CASES if not case[1].startswith("while")]
)
def test_a_rank_that_fails_is_named_over_nccl(how: str, place: str, tmp_path: Path) -> None:
    check(how, place, tmp_path, cuda=True)


def test_a_rank_that_does_not_come_is_named_with_its_line(tmp_path: Path) -> None:
    for each in what_survivors_see("slept", "in a step", tmp_path, cuda=True):
        assert (each["kind"], each["again"]) == ("PeerTimeoutError", [3.0] * 3), each
        assert "rank 2 has not come to call" in each["told"]
        assert "it is at watched.py:" in each["told"]
        assert "in misbehave" in each["told"]
