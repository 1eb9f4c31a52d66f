"""One of eight ranks is killed, stopped, raises or leaves, at any moment: all others are told.

`python -m tests.faults` prints every row, and what is seen; tests/faults/MATRIX.md quotes it.
"""

from collections.abc import Sequence

import pytest

from tests.faults.expected import line, wrong
from tests.faults.jobs import FAULTS, ROWS, VICTIMS, Row, run
from tests.faults.moments import MOMENTS

FEW = [
    Row("kill -9", "in an all-reduce", "middle"),
    Row("SIGSTOP", "in an all-to-all", "last"),
    Row("exception", "in an all-to-all", "first"),
    Row("exit 0", "in an all-reduce", "last"),
    Row("kill -9", "in a pipeline step", "last"),
    Row("out of memory", "in a pipeline step", "first"),
    Row("kill -9", "in a transfer", "middle"),
    Row("kill -9", "in a checkpoint save", "first"),
    Row("full disk", "in a checkpoint save", "middle"),
    Row("exception", "while creating groups", "middle"),
]


def check(rows: Sequence[Row]) -> None:
    problems, seen = [], []
    for outcome in run(rows):
        print(line(outcome))
        problems += wrong(outcome)
        seen.append(outcome.row)
    assert sorted(map(str, seen)) == sorted(map(str, rows))
    assert not problems, "\n".join(problems)


@pytest.mark.full
def test_ten_rows() -> None:
    check(FEW)


@pytest.mark.nightly
def test_the_whole_matrix() -> None:
    """All but the ten."""
    check([row for row in ROWS if row not in FEW])


def test_every_fault_is_there_at_every_moment_on_every_victim() -> None:
    assert set(FEW) <= set(ROWS)
    pairs = {(row.fault, row.moment) for row in ROWS}
    assert len(ROWS) == len(pairs) * len(VICTIMS) == len(set(ROWS))
    assert len(pairs) == (len(FAULTS) - 1) * len(MOMENTS) + 1
    assert {moment for fault, moment in pairs if fault == "full disk"} == {"in a checkpoint save"}
