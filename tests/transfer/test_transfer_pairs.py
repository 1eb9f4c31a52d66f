"""From any cut to any other: bit-equal to loading the source's checkpoint, and no byte too many."""

from pathlib import Path
from typing import Any

import pytest
import torch

from commgrid.testing import run_on_ranks
from tests.transfer import pairs as cases
from tests.transfer.pairs import Pair, move, move_state


def mask(shape: Any, places: Any) -> torch.Tensor:
    found = torch.zeros(shape, dtype=torch.bool)
    for offset, size in places:
        found[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))] = True
    return found


def lacking(source: dict[str, Any], target: dict[str, Any], dtypes: dict[str, Any]) -> int:
    """The bytes of a rank's target that its source has not, element by element."""
    total = 0
    for name, (shape, dtype, places) in target.items():
        has = mask(shape, source[name][2] if name in source else ())
        count = int((mask(shape, places) & ~has).sum())
        total += count * min(dtype.itemsize, dtypes[name].itemsize)
    return total


def check(pairs: list[Pair], experts: bool, folder: Path | None) -> None:
    ranks = run_on_ranks(
        move, 8, pairs, experts, str(folder or ""), backend=None, launcher="torchrun", timeout=400
    )
    for number, (source_cut, target_cut) in enumerate(pairs):
        found, what = [rank[number] for rank in ranks], f"{source_cut} → {target_cut}"
        assert [bad for bad, *_ in found if bad] == [], what
        dtypes = {n: d for _, (held, _), *_ in found for n, (_, d, _) in held.items()}
        planned = next(received for _, _, received, _ in found if received is not None)
        for rank, (_, (source, target), received, _) in enumerate(found):
            assert received in (None, planned), what
            assert planned.get(rank, 0) == lacking(source, target, dtypes), (what, rank)


def test_what_a_checkpoint_would_have_loaded(tmp_path: Path) -> None:
    check(cases.SHORT, False, tmp_path)


@pytest.mark.full("*")
@pytest.mark.parametrize("part", range(4))
def test_every_pair_of_cuts(part: int, tmp_path: Path) -> None:
    check(cases.LONG[part::4], False, tmp_path)


@pytest.mark.full
def test_experts_go_from_any_cut_to_any_other(tmp_path: Path) -> None:
    check(cases.EXPERTS_SHORT, True, tmp_path)


@pytest.mark.full
def test_every_pair_of_cuts_of_experts(tmp_path: Path) -> None:
    check(cases.EXPERTS_LONG, True, tmp_path)


def test_optimizer_state_goes_too(tmp_path: Path) -> None:
    for found in run_on_ranks(
        move_state, 8, cases.OPTIMIZERS_SHORT, str(tmp_path), backend=None, launcher="torchrun"
    ):
        assert found == [[]] * len(cases.OPTIMIZERS_SHORT)


@pytest.mark.full
def test_optimizer_state_goes_from_any_cut_to_any_other(tmp_path: Path) -> None:
    for found in run_on_ranks(
        move_state, 8, cases.OPTIMIZERS_LONG, str(tmp_path), backend=None, launcher="torchrun"
    ):
        assert found == [[]] * len(cases.OPTIMIZERS_LONG)


def test_there_are_sixty_pairs() -> None:
    assert (
        sum(len(each) for name, each in vars(cases).items() if name.endswith(("SHORT", "LONG")))
        >= 60
    )
