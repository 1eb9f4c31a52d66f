"""Values that cannot be pickled: an error on every rank, and no rank that waits."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from commgrid import CommGridError
from commgrid.collectives.objects import at_first, gathered
from commgrid.runtime.grid import HyperCommGrid


class Unloadable:
    """Can be pickled, and raises where the pickle is read."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return _refuse, ("no such class here",)


def _refuse(text: str) -> None:
    raise pickle.UnpicklingError(text)


@pytest.mark.ranks(2, dp=2)
def test_a_value_that_cannot_be_pickled_is_an_error_on_every_rank(grid: HyperCommGrid) -> None:
    group = grid.get_group("dp")
    with pytest.raises(CommGridError, match=r"for all ranks cannot be pickled: rank 1: .*pickle"):
        gathered((lambda: 1) if grid.rank else 1, group)
    assert gathered(grid.rank, group) == [0, 1]


@pytest.mark.ranks(2, dp=2)
def test_the_first_ranks_failures_are_every_ranks_errors(grid: HyperCommGrid) -> None:
    """Its answer cannot be pickled, it raises, or a value cannot be read there."""
    group = grid.get_group("dp")
    for mine, whole, said in (
        (lambda: 1, lambda found: lambda: found, "rank 0: .*local object"),
        (lambda: 1, lambda found: found[2], "rank 0: IndexError"),
        (Unloadable, len, "rank 0: UnpicklingError: no such class here"),
        (lambda: 1 // grid.rank, sum, "rank 0: ZeroDivisionError"),
    ):
        with pytest.raises(ValueError, match=said):
            at_first(group, mine, whole, ValueError)
    assert at_first(group, lambda: grid.rank, sum, ValueError) == 1
