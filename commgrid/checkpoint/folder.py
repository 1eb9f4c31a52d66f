"""A folder of checkpoints, of which a crash at any moment leaves the last complete one.

step_00000040             complete: it got this name when everything in it was on disk
.step_00000060.partial    being written, or left by a crash; the next save clears it away
.step_00000040.replaced   between two renames, when step 40 is saved a second time
.step_00000020.deleted    being deleted
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from commgrid.checkpoint.storage import sync
from commgrid.errors import CheckpointError

_COMPLETE = re.compile(r"step_(\d+)")
_REPLACED = re.compile(r"\.step_(\d+)\.replaced")
_LEFT = re.compile(r"\.step_(\d+)\.(partial|deleted)")


def complete(folder: Path) -> dict[int, Path]:
    """The complete checkpoints, by step, ascending."""
    found: dict[int, Path] = {}
    names = sorted(folder.iterdir()) if folder.is_dir() else []
    for pattern in (_REPLACED, _COMPLETE):  # the complete one counts
        for path in names:
            match = pattern.fullmatch(path.name)
            if match and path.is_dir():
                found[int(match[1])] = path
    return dict(sorted(found.items()))


def find(folder: Path, step: int | None) -> tuple[int, Path]:
    """The checkpoint of a step, or the last one.

    Args:
        folder: a folder of checkpoints, or one of these itself.
        step: None: the last.

    Raises:
        CheckpointError: there is none, or not this one; names those that there are.
    """
    itself = _COMPLETE.fullmatch(folder.name)
    if itself and (folder / ".metadata").exists() and step in (None, int(itself[1])):
        return int(itself[1]), folder
    found = complete(folder)
    if not found:
        what = "has no complete checkpoint" if folder.is_dir() else "is no folder"
        halves = " (only what a crash while saving has left)" if _left(folder) else ""
        raise CheckpointError(f"{folder} {what}{halves}; expected one with step_… in it")
    wanted = max(found) if step is None else step
    if wanted not in found:
        there = ", ".join(map(str, found))
        raise CheckpointError(f"{folder} has no checkpoint of step {wanted}; it has {there}")
    return wanted, found[wanted]


def begin(folder: Path, step: int) -> Path:
    """Where a checkpoint is to be written; clears away what crashes have left."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in _left(folder):
        shutil.rmtree(path)
    for now, path in complete(folder).items():
        if _REPLACED.fullmatch(path.name):  # the crash came between the two renames
            path.rename(path.with_name(_name(now)))
    for path in folder.iterdir():
        if _REPLACED.fullmatch(path.name):
            shutil.rmtree(path)
    partial = folder / f".{_name(step)}.partial"
    partial.mkdir()
    return partial


def end(partial: Path, step: int, keep: int | None) -> Path:
    """Gives a checkpoint that is written its name, and deletes older ones than the last `keep`."""
    folder = partial.parent
    final, replaced = folder / _name(step), folder / f".{_name(step)}.replaced"
    sync(partial)
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    sync(folder)
    if replaced.exists():
        shutil.rmtree(replaced)
    if keep is not None:
        older = [path for now, path in complete(folder).items() if now != step]
        for path in older[: max(len(older) - (keep - 1), 0)]:
            deleted = path.rename(folder / f".{path.name}.deleted")  # so that no half looks whole
            shutil.rmtree(deleted)
    return final


def _name(step: int) -> str:
    return f"step_{step:08}"


def _left(folder: Path) -> list[Path]:
    names = folder.iterdir() if folder.is_dir() else ()
    return [path for path in names if _LEFT.fullmatch(path.name)]
