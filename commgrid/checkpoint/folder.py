"""A folder of checkpoints, of which a crash at any moment leaves the last complete one.

step_00000040                 complete: it got this name when everything in it was on disk
.step_00000060.7f3a.partial   being written, or left by a crash; the next save clears it away,
                              so that a save that was taken for dead cannot end in it
.step_00000040.replaced       between two renames, when step 40 is saved a second time
.step_00000020.deleted        being deleted
"""

from __future__ import annotations

import re
import shutil
import warnings
from pathlib import Path
from uuid import uuid4

from commgrid.checkpoint.writer import sync
from commgrid.errors import CheckpointError, SpecError

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+:/)")  # Path("s3://a") is s3:/a
METADATA = ".metadata"
"""The file of a checkpoint that is written last."""
_COMPLETE = re.compile(r"step_(\d+)")
_REPLACED = re.compile(r"\.step_(\d+)\.replaced")
_LEFT = re.compile(r"\.step_(\d+)(\.[0-9a-f]+)?\.(partial|deleted)")


def local(folder: str | Path) -> Path:
    """The absolute path of a folder that this machine has.

    Raises:
        SpecError: it is a URL.
    """
    if match := _URL.match(str(folder)):
        raise SpecError(
            f"{folder}: checkpoints go to a folder of a file system, and {match[1]} is none that "
            "is mounted here; mount it, or copy folders with a tool of its own, such as fsspec"
        )
    return Path(folder).absolute()


def complete(folder: Path) -> dict[int, Path]:
    """The complete checkpoints, by step, ascending."""
    return _named(folder, complete=True)


def warn_of_halves(folder: Path) -> None:
    """Warn of folders with a step's name that are later than the last complete checkpoint."""
    last = max(complete(folder), default=-1)
    halves = [path.name for step, path in _named(folder).items() if step > last]
    if halves:
        warnings.warn(
            f"{folder / halves[-1]} has no {METADATA}, which is written last, and is skipped; "
            "copy it again, or delete it",
            stacklevel=3,
        )


def _named(folder: Path, complete: bool = False) -> dict[int, Path]:
    """Folders named after steps, by step; `complete` leaves out partial copies."""
    found: dict[int, Path] = {}
    names = sorted(folder.iterdir()) if folder.is_dir() else []
    for pattern in (_REPLACED, _COMPLETE):  # the complete one counts
        for path in names:
            match = pattern.fullmatch(path.name)
            if match and path.is_dir() and (not complete or (path / METADATA).exists()):
                found[int(match[1])] = path
    return dict(sorted(found.items()))


def find(folder: Path, step: int | None) -> tuple[int | None, Path]:
    """The checkpoint of a step, or the last one; and the step, where the folder's name has it.

    Args:
        folder: a folder of checkpoints, or one of these itself.
        step: None: the last.

    Raises:
        CheckpointError: there is none, or not this one; lists the steps that exist.
    """
    if (folder / METADATA).exists():
        itself = _COMPLETE.fullmatch(folder.resolve().name)
        own = int(itself[1]) if itself else None
        if step not in (None, own):
            raise CheckpointError(f"{folder} is a checkpoint, and not of step {step}")
        return own, folder
    found = complete(folder)
    if step is None and found:
        warn_of_halves(folder)
    if not found:
        what = "has no complete checkpoint" if folder.is_dir() else "is no folder"
        halves = " (only what a crash while saving has left)" if _left(folder) else ""
        if _named(folder):
            halves = f" (only a half one, with no {METADATA}, which is written last)"
        raise CheckpointError(f"{folder} {what}{halves}; expected one with step_… in it")
    wanted = max(found) if step is None else step
    if wanted not in found and wanted in _named(folder):
        raise CheckpointError(
            f"half a checkpoint: {_named(folder)[wanted]} has no {METADATA}, which is written last"
        )
    if wanted not in found:
        there = ", ".join(map(str, found))
        raise CheckpointError(f"{folder} has no checkpoint of step {wanted}; it has {there}")
    return wanted, found[wanted]


def begin(folder: Path, step: int) -> Path:
    """Where a checkpoint is to be written; clears away what crashes have left."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in _left(folder):
        _remove(path)
    for now, path in complete(folder).items():
        if _REPLACED.fullmatch(path.name):  # the crash came between the two renames
            if path.with_name(_name(now)).exists():
                _remove(path.with_name(_name(now)))
            path.rename(path.with_name(_name(now)))
    for path in folder.iterdir():
        if _REPLACED.fullmatch(path.name):
            _remove(path)
    later = [now for now in complete(folder) if now > step]
    if later:
        warnings.warn(
            f"{folder} has checkpoints of later steps than {step}: {', '.join(map(str, later))}; "
            "load takes the last step unless it is given one, and keep= leaves later ones alone",
            stacklevel=2,
        )
    partial = folder / f".{_name(step)}.{uuid4().hex[:8]}.partial"
    partial.mkdir()
    return partial


def final(partial: Path, step: int) -> Path:
    """The name that a checkpoint gets when all is on disk."""
    return partial.parent / _name(step)


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
        _remove(replaced)
    if keep is not None:
        older = [path for now, path in complete(folder).items() if now < step]
        for path in older[: max(len(older) - (keep - 1), 0)]:
            # Under another name first, so that no half looks whole.
            _remove(path.rename(folder / f".{path.name}.deleted"))
    return final


def _remove(path: Path) -> None:
    """Deletes a checkpoint, or a link to one; what cannot be deleted is no reason to stop."""
    try:
        if path.is_symlink() or path.is_file():
            path.unlink()
        else:
            shutil.rmtree(path)
    except OSError as error:
        warnings.warn(f"{path} was not deleted: {error}", stacklevel=2)


def _name(step: int) -> str:
    return f"step_{step:08}"


def _left(folder: Path) -> list[Path]:
    names = folder.iterdir() if folder.is_dir() else ()
    return [path for path in names if _LEFT.fullmatch(path.name)]
