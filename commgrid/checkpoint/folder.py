"""A folder of checkpoints, of which a crash at any moment leaves the last complete one.

step_00000040                 complete: it got this name when everything in it was on disk
.step_00000060.7f3a.partial   being written, or left by a crash; the next save clears it away,
                              so that a save that was taken for dead cannot end in it
.step_00000060.7f3a.ending    the same, when all ranks have written in the background
.step_00000040.replaced       between two renames, when step 40 is saved a second time
.step_00000020.deleted        being deleted
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

from commgrid.checkpoint.reader import Stored, missing_file, refuse_outside
from commgrid.checkpoint.remote import RemotePath, remove_tree, sync_names
from commgrid.errors import CheckpointError

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+:/)")  # Path("s3://a") is s3:/a
SUFFIX = ".safetensors"
METADATA = ".metadata"
"""The file of a checkpoint that is written last."""
_COMPLETE = re.compile(r"step_(\d+)")
_REPLACED = re.compile(r"\.step_(\d+)\.replaced")
_LEFT = re.compile(r"\.step_(\d+)(\.[0-9a-f]+)?\.(partial|ending|deleted)")


def local(folder: str | Path) -> Path:
    """The absolute path of a folder, which a URL says of another file system."""
    match = _URL.match(str(folder))
    if match is None:
        return Path(folder).absolute()
    rest = str(folder)[match.end() :].lstrip("/")
    return Path("/", rest) if match[1] == "file:/" else cast(Path, RemotePath(match[1][:-1], rest))


def whole(folder: Path) -> Iterator[tuple[int, Path]]:
    """The complete checkpoints with all of their files, by step, the newest first."""
    return ((step, path) for step, path in reversed(_named(folder).items()) if not half(path))


def half(path: Path) -> str | None:
    """Describe what half a checkpoint lacks; None: it is whole, or that cannot be told."""
    try:
        known = (path / METADATA).stat()
        return missing_file(path, _ends(path, known.st_mtime_ns, known.st_size))
    except FileNotFoundError:
        return f"{path} has no {METADATA}, which is written last"
    except CheckpointError as error:
        not_told = error.__cause__ is None or isinstance(error.__cause__, CheckpointError | OSError)
        return None if not_told else str(error)
    except (OSError, AttributeError, TypeError):  # others' metadata may name no files
        return None


@lru_cache(maxsize=64)
def _ends(path: Path, changed: int, size: int) -> Mapping[str, int]:
    """`Stored.ends` of a checkpoint whose metadata is of that age and size."""
    return Stored(path).ends


def warn_of_halves(folder: Path, last: int) -> None:
    """Warn of folders with a step's name that are later than the last whole checkpoint."""
    halves = [half(path) for step, path in _named(folder).items() if step > last]
    if halves and halves[-1]:
        warnings.warn(f"{halves[-1]}; it is skipped: copy it again, or delete it", stacklevel=3)


def complete(folder: Path) -> dict[int, Path]:
    """The checkpoints that have metadata, by step, ascending; their files may be missing."""
    return {step: path for step, path in _named(folder).items() if (path / METADATA).exists()}


def _named(folder: Path) -> dict[int, Path]:
    """Folders named after steps, by step, ascending; of two for one step the one with metadata."""
    found: dict[int, Path] = {}
    names = sorted(folder.iterdir()) if folder.is_dir() else []
    for pattern in (_REPLACED, _COMPLETE):
        for path in names:
            match = pattern.fullmatch(path.name)
            if match and path.is_dir():
                step = int(match[1])
                if step not in found or (path / METADATA).exists():
                    found[step] = path
    return dict(sorted(found.items()))


def find(folder: Path, step: int | None) -> tuple[int | None, Path]:
    """The checkpoint of a step, or the last one; and the step, where the folder's name has it.

    Args:
        folder: a folder of checkpoints, or one of these itself.
        step: None: the last.

    Raises:
        CheckpointError: there is none, or not this one; lists the steps that exist.
    """
    is_torchs = (folder / METADATA).exists()
    if is_torchs or is_safetensors_folder(folder):
        itself = _COMPLETE.fullmatch(folder.resolve().name) if is_torchs else None
        own = int(itself[1]) if itself else None
        if step not in (None, own):
            raise CheckpointError(
                f"{folder} is a checkpoint, and not of step {step}; "
                "leave step= out, or name the folder that has it"
            )
        return own, folder
    named, found = _named(folder), complete(folder)
    if step is None and (last := next(whole(folder), None)) is not None:
        warn_of_halves(folder, last[0])
        return last
    if step is None or not found:
        what = "has no complete checkpoint" if folder.is_dir() else "is no folder"
        why = " (only what a crash while saving has left)" if _left(folder) else ""
        if named:
            why = f" (only half a checkpoint: {half(named[max(named)])})"
        raise CheckpointError(f"{folder} {what}{why}; expected one with step_… in it")
    if step in named and step not in found:
        raise CheckpointError(f"half a checkpoint: {half(named[step])}")
    if step not in found:
        there = ", ".join(map(str, found))
        raise CheckpointError(f"{folder} has no checkpoint of step {step}; it has {there}")
    return step, found[step]


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
    sync_names(partial)
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    sync_names(folder)
    if replaced.exists():
        _remove(replaced)
    if keep is not None:
        older = [path for now, path in complete(folder).items() if now < step]
        kept = 1
        for path in reversed(older):
            if kept < keep:  # halves do not count, and may be about to become whole
                kept += half(path) is None
            else:  # under another name first, so that no half looks whole
                _remove(path.rename(folder / f".{path.name}.deleted"))
    return final


def _remove(path: Path) -> None:
    """Deletes a checkpoint, or a link to one; what cannot be deleted is no reason to stop."""
    try:
        if path.is_symlink() or path.is_file():
            path.unlink()
        else:
            remove_tree(path)
    except OSError as error:
        warnings.warn(f"{path} was not deleted: {error}", stacklevel=2)


def _name(step: int) -> str:
    return f"step_{step:08}"


def _left(folder: Path) -> list[Path]:
    names = folder.iterdir() if folder.is_dir() else ()
    return [path for path in names if _LEFT.fullmatch(path.name)]


def is_safetensors_folder(folder: Path) -> bool:
    """Return whether a folder has safetensors files, and neither is nor has a torch checkpoint."""
    ours = (folder / ".metadata").exists() or bool(complete(folder))
    return not ours and any(folder.glob(f"*{SUFFIX}"))


def safetensors_files(folder: Path) -> list[str]:
    """Return the safetensors files of a folder that belong together.

    Where there is an index, these are the files that it lists; others beside them, such as a
    consolidated copy, are left alone.

    Raises:
        CheckpointError: an index cannot be read, or names a file that is missing.
    """
    indexes = sorted(folder.glob(f"*{SUFFIX}.index.json"))
    if not indexes:
        return sorted(str(path) for path in folder.glob(f"*{SUFFIX}"))
    names: set[str] = set()
    for index in indexes:
        listed = {*_weight_map(index).values()}
        refuse_outside(index, listed)
        for name in sorted(listed):
            if not (folder / name).is_file():
                raise CheckpointError(
                    f"{folder} has no {name}, which {index.name} lists; copy the file, or the "
                    "whole folder again"
                )
        names |= listed
    return [str(folder / name) for name in sorted(names)]


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor, as an index has it.

    Raises:
        CheckpointError: it has none.
    """
    said = json_of(index)
    found = said.get("weight_map") if isinstance(said, dict) else None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise CheckpointError(
            f"{index} has no weight_map from tensors to files; copy it again, or delete it where "
            f"all *{SUFFIX} beside it are of one model"
        )
    return found


def json_of(path: Path) -> Any:
    """Return what a JSON file has.

    Raises:
        CheckpointError: it has none.
    """
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON: {error}; copy it again") from error
