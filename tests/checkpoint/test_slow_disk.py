"""A disk slower than the grid's timeout: the other ranks wait for one that writes or reads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import commgrid
from commgrid import checkpoint
from commgrid.checkpoint import background, loading, saving
from commgrid.testing import run_on_ranks
from tests.killing import KILLED, kill_me, run_killable

TIMEOUT = 2.0
SLOW: dict[str, tuple[Any, str, int]] = {
    "write": (saving, "write", 1),
    "complete": (saving, "write_metadata", 0),
    "begin": (saving.folders, "begin", 0),
    "write in the background": (background, "write", 1),
    "find": (loading.folders, "find", 0),
    "open": (loading, "Stored", 1),
    "read": (loading.Loading, "read", 1),
}
"""A function, and the rank on which its first call takes longer than the timeout."""


def slow(where: Any, name: str, then: Callable[[], object] = lambda: None) -> None:
    fast = getattr(where, name)

    def slowed(*given: Any, **options: Any) -> Any:
        setattr(where, name, fast)
        threading.Event().wait(1.25 * TIMEOUT)  # the disk
        then()
        return fast(*given, **options)

    setattr(where, name, slowed)


def stories(folder: str, what: str, options: dict[str, Any]) -> tuple[list[int], float]:
    """Save, save again, and load, with one of their parts slow on one rank."""
    where, name, rank = SLOW[what]
    grid = commgrid.initialize(timeout=TIMEOUT, **options)
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(7.0), model.bias.fill_(7.0)
    if grid.rank == rank:
        slow(where, name)
    for step in (2, 3):
        checkpoint.save(folder, step, model, progress=False, background="background" in what)
    checkpoint.wait()
    with torch.no_grad():
        model.weight.fill_(0.0)
    assert checkpoint.load(folder, model, progress=False).step == 3
    found = checkpoint.steps(folder), float(model.weight.detach().mean())
    commgrid.trace.stop()
    commgrid.shutdown()
    return found


@pytest.mark.parametrize("what", SLOW)
@pytest.mark.full("complete", "begin", "find", "open", "read", "*background")
def test_the_others_wait_for_a_slow_disk(what: str, tmp_path: Path) -> None:
    for found in run_on_ranks(stories, 2, str(tmp_path), what, {}):
        assert found == ([2, 3], 7.0)


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [{"watch": True}, {"trace": True}, {"verify": "order"}],
    ids=str,
)
def test_signs_of_life_are_calls_like_others(options: dict[str, Any], tmp_path: Path) -> None:
    for found in run_on_ranks(stories, 3, str(tmp_path), "write", options):
        assert found == ([2, 3], 7.0)


def dies_on_a_slow_disk(folder: str) -> str:
    grid = commgrid.initialize(timeout=TIMEOUT)
    if grid.rank == 1:
        slow(saving, "write", kill_me)
    try:
        checkpoint.save(folder, 1, nn.Linear(2, 2, bias=False), copies="first", progress=False)
    except commgrid.PeerFailedError as error:
        return str(error)
    return "saved"


@pytest.mark.full
def test_a_rank_that_dies_on_a_slow_disk_is_named(tmp_path: Path) -> None:
    first, gone, last = run_killable(dies_on_a_slow_disk, 3, str(tmp_path))
    assert gone == KILLED
    for told in (first, last):
        assert str(told).startswith("rank 1 is gone"), told
