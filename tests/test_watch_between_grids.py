"""A rank that fails in a transfer's or a bridge's group is named there as in a grid's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.watched_between import CASES, check, what_survivors_see


@pytest.mark.full("stopped-in a transfer")
@pytest.mark.parametrize(("how", "where"), CASES)
def test_who_fails_between_two_grids_is_named_on_both(how: str, where: str, tmp_path: Path) -> None:
    timeout = 4.0 if how == "stopped" else 100.0
    check(how, where, what_survivors_see(how, where, timeout, tmp_path, cuda=False))
