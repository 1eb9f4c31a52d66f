"""Walk of a plan: functions of ours that `commgrid plan` enters. `pytest -s` prints it."""

from collections import Counter

import pytest

from commgrid.cli import main
from tests.walked import report, walked

PLAN = "plan --tp 2 --model llama3-8b --cluster h100 --world-size 8"
MOST = 309


def test_a_plan_walks_through_few_functions(capsys: pytest.CaptureFixture[str]) -> None:
    seen: Counter[str] = Counter()
    with walked(seen):
        assert main(PLAN.split()) == 0
    assert "step" in capsys.readouterr().out
    assert any("step_cost" in name for name in seen)
    assert report(f"commgrid {PLAN}", seen) <= MOST
