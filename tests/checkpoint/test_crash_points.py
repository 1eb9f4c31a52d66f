"""Killed at any system call of a save, a job finds its last complete checkpoint.

The points are the calls of Python's builtins that change files, counted while a rank saves, on its
main thread and on the one that writes in the background.
"""

from __future__ import annotations

import io
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from torch import nn

import commgrid
from commgrid import checkpoint
from commgrid.errors import CommGridError
from tests.killing import KILLED, kill_me, run_killable

CALLS = {
    "close", "flush", "fsync", "mkdir", "open", "remove", "rename", "replace", "rmdir", "unlink",
    "write", "writelines",
}  # fmt: skip
RANKS = 3


def _is_of_files(called: Any) -> bool:
    of = getattr(called, "__self__", None)
    if isinstance(of, io.IOBase):
        return not isinstance(of, io.BytesIO | io.StringIO)
    return called is io.open or getattr(of, "__name__", "") == "posix"


class Points:
    """Counts calls that change files, and kills this process in one of them.

    Args:
        last: which call; None: none.
    """

    def __init__(self, last: int | None) -> None:
        self.names: list[str] = []
        self._last = last

    def __call__(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and called.__name__ in CALLS and _is_of_files(called):
            self.names.append(called.__name__)
            if len(self.names) == self._last:
                kill_me()

    def __enter__(self) -> Points:
        threading.setprofile(self)
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)


def model_of(step: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    for parameter in model.parameters():
        nn.init.constant_(parameter, float(step))
    return model


def saves(folder: str, victim: int, point: int | None, in_background: bool) -> list[str]:
    """Step 1 is saved, then step 2 by ranks of which one is killed; the names of its calls."""
    grid = commgrid.initialize(timeout=30.0)
    checkpoint.save(folder, 1, model_of(1), progress=False)
    with Points(point if grid.rank == victim else None) as points:
        try:
            checkpoint.save(
                folder, 2, model_of(2), keep=1, background=in_background, progress=False
            )
            checkpoint.wait()
        except CommGridError:
            assert point is not None
    commgrid.shutdown()
    return points.names


def check(folder: Path) -> int:
    """The step that is there; after one more save nothing else is."""
    commgrid.initialize()
    model = model_of(0)
    step = checkpoint.load(folder, model, progress=False).step
    assert step in (1, 2)
    assert all(bool((one == float(step)).all()) for one in model.parameters())
    checkpoint.save(folder, 3, model, keep=1, progress=False)
    commgrid.shutdown()
    assert [path.name for path in folder.iterdir()] == ["step_00000003"]
    return step


@pytest.mark.nightly
@pytest.mark.parametrize("in_background", [False, True], ids=["at once", "in background"])
@pytest.mark.parametrize("victim", range(RANKS))
def test_killed_at_every_call(victim: int, in_background: bool, tmp_path: Path) -> None:
    killed_at(tmp_path, victim, in_background, every=1)


@pytest.mark.full
def test_killed_at_some_calls(tmp_path: Path) -> None:
    killed_at(tmp_path, 0, False, every=17)


def killed_at(tmp_path: Path, victim: int, in_background: bool, every: int) -> None:
    names = run_killable(saves, RANKS, str(tmp_path / "whole"), victim, None, in_background)[victim]
    assert check(tmp_path / "whole") == 2
    assert len(names) > 8, names
    found = set()
    for point in range(1, len(names) + 1, every):
        folder = tmp_path / f"{point}"
        results = run_killable(saves, RANKS, str(folder), victim, point, in_background)
        # In the background another rank may be the last one, and make the checkpoint.
        assert results[victim] == KILLED or in_background, (point, results)
        found.add(check(folder))
    assert 1 in found
