"""Drawn grids, user axes, dtypes and optimizer state: a load, a recovery and a transfer bring all.

Each draw has two sides of any ranks. The source is saved, kept in memory and recovered; the target
loads the checkpoint, and another one gets a transfer. The oracle is an unsharded formula.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

import commgrid
from commgrid import checkpoint
from commgrid.testing import run_on_ranks
from commgrid.transfer import Transfer
from tests.transfer.own_states import (
    Draw,
    built,
    drawn,
    grid_of,
    optimizer_of,
    set_state,
    wrong_numbers,
    wrong_state,
)

RANKS, PART, PARTS = 4, 10, 4


def brought(draw: Draw, folder: str, step: int) -> list[str]:
    """Return the tensors and entries of this rank that are wrong, after each way."""
    found: list[str] = []
    source_grid, target_grid = grid_of(draw.source, "s"), grid_of(draw.target, "t")
    via = draw.source.dtype
    source = mine = None
    if source_grid is not None:
        with commgrid.use_grid(source_grid):
            source = built(draw, draw.source, source_grid, 0.5)
            mine = optimizer_of(draw.source, source, 0.25)
            set_state(draw, mine, source)
            checkpoint.save(folder, step, source, mine, progress=False, grid=source_grid)
            checkpoint.keep(step, source, mine, grid=source_grid)
            other = built(draw, draw.source, source_grid, 0.1)
            fresh = optimizer_of(draw.source, other, 0.75)
            commgrid.recover(None, other, fresh, grid=source_grid)
            found += wrong_numbers(other, draw.source, source_grid, 0.5, via)
            found += wrong_state(draw, fresh, other, 0.25)
    dist.barrier()
    target = theirs = None
    if target_grid is not None:
        with commgrid.use_grid(target_grid):
            loaded = built(draw, draw.target, target_grid, 0.1)
            again = optimizer_of(draw.target, loaded, 0.75)
            checkpoint.load(folder, loaded, again, progress=False, grid=target_grid)
            found += wrong_numbers(loaded, draw.target, target_grid, 0.5, via)
            found += wrong_state(draw, again, loaded, 0.25)
            target = built(draw, draw.target, target_grid, 0.3)
            theirs = optimizer_of(draw.target, target, 0.75)
    if source is not None or target is not None:
        Transfer(
            source, target, source_grid=source_grid, target_grid=target_grid, timeout=60,
            optimizer=(mine, theirs),
        ).run()  # fmt: skip
    if target is not None and target_grid is not None:
        found += wrong_numbers(target, draw.target, target_grid, 0.5, via)
        found += wrong_state(draw, theirs, target, 0.25)
    commgrid.destroy()
    dist.barrier()  # rank 0, which serves the store, may be on neither grid
    return found


def every(draws: list[Draw], folder: str) -> list[list[str]]:
    commgrid.join()
    found = [brought(draw, f"{folder}/{number}", number) for number, draw in enumerate(draws)]
    commgrid.shutdown()
    return found


def check(draws: list[Draw], folder: Path) -> None:
    how = {"backend": None, "launcher": "torchrun", "timeout": 300}
    for rank, found in enumerate(run_on_ranks(every, RANKS, draws, str(folder), **how)):
        for draw, bad in zip(draws, found, strict=True):
            assert bad == [], f"rank {rank}, {draw}"


def draws_of(part: int) -> list[Draw]:
    return [drawn(f"states {number}", RANKS) for number in range(part * PART, (part + 1) * PART)]


def test_a_draw(tmp_path: Path) -> None:
    check([draws_of(0)[5]], tmp_path)  # a sharded optimizer, then slices along a user's axis


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_draws(part: int, tmp_path: Path) -> None:
    check(draws_of(part), tmp_path)


def test_draws_are_of_many_kinds() -> None:
    draws = [draw for part in range(PARTS) for draw in draws_of(part)]
    places = [place for draw in draws for place in (draw.source, draw.target)]
    assert {place.way for place in places} == {"plain", "fsdp", "zero"}
    assert {place.cut for place in places} == {"tp", "width"}
    assert {place.data for place in places} == {"dp", "batch"}
    assert len({repr(key) for draw in draws for key in draw.entries}) >= 14
    assert len({entry for draw in draws for entry in draw.entries.values()}) == 12
    assert len({dtype for draw in draws for dtype in draw.buffers}) == 12
    assert sum(draw.source.dtype != draw.target.dtype for draw in draws) > 10
