"""Command lines and files as nobody would write them: a plan or a message, soon, in little memory.

`python -m tests.faults --fuzz 20000` runs so many; here are fewer of them.
"""

from pathlib import Path
from typing import Any

import pytest

from commgrid import GridSpec, SpecError
from commgrid.cli.parser import parsers
from commgrid.testing import run_on_ranks
from tests.faults.fuzz import fuzz
from tests.faults.mutations import Mutator
from tests.sizes import full

CASES = 1500 if full() else 250


def test_nothing_but_plans_and_messages() -> None:
    (found,) = run_on_ranks(fuzz, 1, 0, CASES, backend=None, timeout=600)
    assert not found, "\n\n".join(found)


def test_cases_are_of_all_commands_and_the_same_each_time(tmp_path: Path) -> None:
    found = parsers()[1]
    once, again = (Mutator(found, tmp_path, 7) for _ in range(2))
    cases = [once.case() for _ in range(250)]
    assert cases == [again.case() for _ in range(250)]
    assert {case[0] for case in cases} >= set(found)
    assert len(list(tmp_path.glob("*.yaml"))) >= 15


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("axes: " + "[" * 3000, "nested more than 50 deep"),
        ("- " * 2000 + "x", "nested more than 50 deep"),
        ("axes: {tp: !!timestamp x}", "an invalid value"),
        ("axes: {tp: 2026-13-01}", "an invalid value: month must be in 1..12"),
        (f"axes: {{tp: {'9' * 5000}}}", "an invalid value"),
        ("axes: {tp: 10000000000, dp: 10000000000}", "more ranks than there can be"),
        (
            "axes: {dp: -1}\nregions: {expert: {axes: {1: 2}, order: ep}}",
            "unknown axis 'ep', the axes are 1",
        ),
        ("axes: {dp: -1}\nranks: 0-99999999999", "is no rank; they go up to 2147483647"),
        ("axes: {dp: -1}\nranks: 0-2000000000,5", "several spans of more than 16777216 ranks"),
        ("axes: {dp: -1}\nranks: [0, 1, 2000000000000]", "is no rank"),
        ("axes: {dp: -1}\nranks: {start: 2000000000, stop: 0, step: -1}", "listed one by one"),
    ],
    ids=range(11),
)
def test_what_was_a_traceback_or_took_all_memory(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match=said):
        GridSpec.from_yaml(path)


def test_a_list_with_a_far_rank_is_no_range_of_all_between() -> None:
    """It was compared with one, which took the memory of two billion ranks."""
    spec: Any = GridSpec.from_dict({"axes": {"dp": -1}, "ranks": [0, 1, 2_000_000_000]})
    assert spec.ranks == (0, 1, 2_000_000_000)
