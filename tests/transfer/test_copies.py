"""Copies of a source's tensors: all ranks compare every bit before the target is touched."""

from __future__ import annotations

import pytest
import torch

import commgrid
from commgrid.equality.digest import condensed
from commgrid.testing import run_on_ranks
from commgrid.transfer import Transfer, shared_boxes

LARGE = 1 << 18  # of fp32 numbers, which is two blocks of a condensed tensor


def numbers() -> torch.Tensor:
    return torch.linspace(-1.0, 1.0, LARGE).view(512, -1)


def told(source: dict[str, torch.Tensor], grid: commgrid.HyperCommGrid) -> str:
    """The error of a run, or "moved"; the target is whole either way."""
    target = {name: torch.full_like(one, 7.0) for name, one in source.items()}
    transfer = Transfer(source, target, source_grid=grid, target_grid=grid)
    try:
        transfer.run()
    except commgrid.CommGridError as error:
        assert all(bool((one == 7.0).all()) for one in target.values()), "half a target"
        return f"{type(error).__name__}: {error}"
    finally:
        transfer.close()
    assert all(torch.equal(one, source[name]) for name, one in target.items())
    return "moved"


def one_bit(grid: commgrid.HyperCommGrid, place: int) -> str:
    source = {"norm": torch.ones(8), "weight": numbers()}
    if grid.rank == 2:
        source["weight"].view(torch.int32).view(-1)[place] ^= 1
    return told(source, grid)


def stories() -> dict[str, str]:
    grid = commgrid.initialize()
    said = {f"bit of {place}": one_bit(grid, place) for place in (0, LARGE // 2 + 5, LARGE - 1)}
    swapped = numbers()
    if grid.rank == 1:
        swapped.view(-1)[[3, 4]] = swapped.view(-1)[[4, 3]]
    said["swapped"] = told({"weight": swapped}, grid)
    zero = torch.zeros(3, 5)
    said["sign of zero"] = told({"weight": -zero if grid.rank == 3 else zero}, grid)
    if grid.rank == 1:
        shared_boxes.condensed = lambda tensor: condensed(tensor) + 1  # type: ignore[assignment]
    said["another processor"] = told({"weight": numbers()}, grid)
    said["another processor's bit"] = one_bit(grid, 9)

    def fails(tensor: torch.Tensor) -> torch.Tensor:
        raise MemoryError(f"no room for {tensor.numel()} numbers")

    shared_boxes.condensed = fails if grid.rank == 1 else condensed  # type: ignore[assignment]
    said["a rank cannot"] = told({"weight": numbers()}, grid)
    shared_boxes.condensed = condensed
    said["equal"] = told({"norm": torch.ones(8), "weight": numbers()}, grid)
    commgrid.shutdown()
    return said


@pytest.fixture(scope="module")
def said() -> list[dict[str, str]]:
    found: list[dict[str, str]] = run_on_ranks(stories, 4, check=False)
    return found


@pytest.mark.parametrize(
    ("story", "ranks"),
    [
        ("bit of 0", "ranks 0-1, 3 and rank 2"),
        (f"bit of {LARGE // 2 + 5}", "ranks 0-1, 3 and rank 2"),
        (f"bit of {LARGE - 1}", "ranks 0-1, 3 and rank 2"),
        ("swapped", "ranks 0, 2-3 and rank 1"),
        ("sign of zero", "ranks 0-2 and rank 3"),
        ("another processor's bit", "ranks 0-1, 3 and rank 2"),
    ],
)
def test_a_difference_of_any_bit_is_named_on_all_ranks(
    said: list[dict[str, str]], story: str, ranks: str
) -> None:
    for one in said:
        assert "weight, of which ranks 0-3 hold" in one[story]
        assert f"differs between {ranks}; these should be copies" in one[story]
        assert one[story].endswith("nothing was moved; make a new Transfer")


def test_equal_copies_are_moved_whatever_the_processors(said: list[dict[str, str]]) -> None:
    assert {(one["another processor"], one["equal"]) for one in said} == {("moved", "moved")}


def test_a_rank_that_cannot_compare_ends_the_run_on_all(said: list[dict[str, str]]) -> None:
    for one in said:
        assert "rank 1: MemoryError: no room for" in one["a rank cannot"]
