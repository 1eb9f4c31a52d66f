"""What the sides of an event have to agree in, and what is said where they do not."""

from __future__ import annotations

from typing import Any

import pytest

from commgrid.call_analysis.diagnosis import diagnose
from commgrid.call_analysis.finding import Finding
from commgrid.call_analysis.mismatch import difference, parties
from commgrid.call_analysis.verification import check
from commgrid.call_records.call import Call, Group
from tests.call_analysis.test_event import done, trace, waits

THREE = Group("dp", (0, 1, 2), "dp", "gloo")
FULL: dict[str, Any] = {"shape": (4,), "bytes": 16, "dtype": "float32", "reduction": "SUM"}


def found_in(*ranks: list[Call]) -> list[Finding]:
    return [*diagnose([trace(rank, *calls) for rank, calls in enumerate(ranks)]).causes]


@pytest.mark.parametrize(
    ("operation", "less"),
    [
        ("all_reduce", {"dtype": ""}),
        ("all_reduce", {"reduction": ""}),
        ("all_reduce", {"shape": (), "bytes": 0}),
        ("all_gather", {"output": None}),
        ("broadcast", {"root": None}),
    ],
)
def test_what_was_not_recorded_agrees_with_everything(operation: str, less: Any) -> None:
    whole = {**FULL, "output": 48, "root": 0 if operation == "broadcast" else None}
    calls = {rank: done(THREE, operation, **{**whole, **(less if rank == 1 else {})})
             for rank in range(3)}  # fmt: skip
    assert len(parties(calls)) == 1
    assert found_in(*[[call] for call in calls.values()]) == []
    programs = {rank: [Call(THREE, operation, **{**whole, **(less if rank == 1 else {})})]
                for rank in range(3)}  # fmt: skip
    assert check(programs).finishes


def test_what_was_not_recorded_hides_no_difference() -> None:
    """Rank 0 recorded no dtype; ranks 1 and 2 differ."""
    calls = [done(THREE, **{**FULL, "dtype": dtype}) for dtype in ("", "float32", "int64")]
    (cause,) = found_in(*[[call] for call in calls])
    assert (cause.kind, cause.ranks) == ("other dtype", (2,))
    assert check({rank: [call] for rank, call in enumerate(calls)}).kind == "differs"


def test_an_empty_tensor_is_a_size() -> None:
    empty = done(THREE, **{**FULL, "shape": (0,), "bytes": 0})
    (cause,) = found_in([done(THREE, **FULL)], [done(THREE, **FULL)], [empty])
    assert (cause.kind, cause.ranks) == ("other shape", (2,))
    assert found_in([empty], [empty], [empty]) == []


def test_an_empty_input_is_no_other_size_where_outputs_are_equal() -> None:
    """Nearest correct program: in an all-gather of several lengths one rank has nothing."""
    gathers = {**FULL, "operation": "all_gather", "output": 48, "reduction": ""}
    empty = done(THREE, **{**gathers, "shape": (0,), "bytes": 0})
    assert found_in([done(THREE, **gathers)], [done(THREE, **gathers)], [empty]) == []


def test_lines_decide_nothing() -> None:
    """A helper with a late group of its own, from one line: nobody issued it alone."""
    own = Group("embedding", (0, 2), "embedding", "gloo")
    helper: dict[str, Any] = {**FULL, "where": "helper.py:3 reduce"}
    found = [
        trace(
            0, done(THREE, **helper), done(THREE, at=2.0, **helper), waits(own, at=3.0, **helper)
        ),
        trace(1, done(THREE, **helper), done(THREE, at=2.0, **helper)),
        trace(2, done(THREE, **helper), done(THREE, at=2.0, **helper)),
    ]
    (cause,) = diagnose(found).causes
    assert (cause.kind, cause.ranks) == ("not entered", (2,))
    assert cause.text.endswith("its last call was dp all_reduce 1 at helper.py:3 reduce")


def test_a_step_in_another_order_is_not_skipped() -> None:
    """Evaluation: rank 2 is about to enter what it entered before another call in training."""
    other = Group("tp", (0, 1, 2), "tp", "gloo")
    train = [done(other, at=1.0), done(THREE, at=2.0), done(other, at=3.0), done(THREE, at=4.0)]
    late = [done(THREE, at=5.0)]
    found = [
        trace(0, *train, *late, waits(other, at=6.0)),
        trace(1, *train, *late, waits(other, at=6.0)),
        trace(2, *train, *late),
    ]
    (cause,) = diagnose(found).causes
    assert (cause.kind, cause.ranks, cause.group) == ("not entered", (2,), "tp")


def test_skipped_and_extra_calls_follow_from_later_calls() -> None:
    a, b, c = (done(THREE, **{**FULL, "bytes": size}) for size in (4, 8, 12))
    assert [(f.kind, f.ranks) for f in found_in([a, b, c], [a, b, c], [b, c])] == [
        ("skipped call", (2,))
    ]
    assert [(f.kind, f.ranks) for f in found_in([b, c], [a, b, c], [b, c])] == [
        ("extra call", (1,))
    ]
    assert [(f.kind, f.ranks) for f in found_in([a, b], [a, b], [b, a])] == [("other order", (2,))]
    assert [(f.kind, f.ranks) for f in found_in([a, b], [a, b], [c, b])] == [("other shape", (2,))]


def test_the_pair_of_an_all_to_all_that_disagrees_is_named() -> None:
    """Bytes to each member, then bytes expected from each."""
    rows = [[4, 8, 12], [16, 20, 24], [28, 32, 36]]
    taken = [list(column) for column in zip(*rows, strict=True)]

    def calls() -> list[list[Call]]:
        return [[done(THREE, "all_to_all", sizes=(*rows[rank], *taken[rank]))] for rank in range(3)]

    assert found_in(*calls()) == []
    taken[2][1] = 20
    (cause,) = found_in(*calls())
    assert (cause.kind, cause.ranks) == ("other size", (1, 2))
    assert cause.text.startswith("rank 1 sends 24 bytes to rank 2 in dp all_to_all 0 at a.py:1 f")
    assert "expects 20 from it" in cause.text


def test_a_difference_is_named_by_what_matters_first() -> None:
    one = Call(THREE, "all_reduce", **FULL).alike
    assert difference(one, one._replace(operation="reduce", dtype="int64")) == "other operation"
    assert difference(one, one._replace(dtype="int64", size=32)) == "other dtype"
