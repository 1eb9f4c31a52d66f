"""Checkpoints that releases have written load on any grid, number by number."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import commgrid
from commgrid import checkpoint
from commgrid.testing import run_on_ranks
from tests.checkpoint.made_by_release import (
    EXTRA,
    PARTS,
    RELEASES,
    STEP,
    archive,
    made,
    values,
)

GRIDS: list[tuple[int, dict[str, Any]]] = [
    (1, {"ep": 1, "etp": 1}),
    (2, {"tp": 2, "ep": 1, "etp": 2}),
    (2, {"ep": 2, "etp": 1}),
    (4, {"tp": 2, "pp": 2, "ep": 1, "etp": 1}),
]


def load(folder: str, sizes: dict[str, int]) -> list[str]:
    """Values that differ from the formula, of which every one did before the load."""
    grid = commgrid.initialize(**sizes)
    stages = (PARTS,) if grid.size("pp") == 1 else (PARTS[:2], PARTS[2:])
    model, optimizer = made(stages[grid.get_local_rank("pp")])
    same = [name for name, held, expected in values(model, optimizer) if held.equal(expected)]
    restored = checkpoint.load(folder, model, optimizer, progress=False)
    wrong = [
        f"{name}: {held} instead of {expected}"
        for name, held, expected in values(model, optimizer)
        if held.dtype != expected.dtype or not torch.equal(held, expected)
    ]
    if (restored.step, restored.extra) != (STEP, EXTRA):
        wrong.append(f"{restored}")
    commgrid.shutdown()
    return [*(f"{name} was not changed" for name in same), *wrong]


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize(("ranks", "sizes"), GRIDS, ids=str)
def test_every_number_is_loaded(
    version: str, ranks: int, sizes: dict[str, int], tmp_path: Path
) -> None:
    shutil.unpack_archive(archive(version), tmp_path, filter="data")
    assert run_on_ranks(load, ranks, str(tmp_path), sizes) == [[]] * ranks
