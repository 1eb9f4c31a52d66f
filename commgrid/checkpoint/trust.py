"""Reading that runs no code: pickles name the functions that make their values, any function.

torch reads a checkpoint's metadata with plain pickle, and values likewise, so that who can write a
file can run what they like on every rank that loads it. Here metadata may name torch's own types of
metadata and nothing else, and values load under torch's `weights_only`, unless they are trusted.
"""

from __future__ import annotations

import io
import pickle
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from commgrid.errors import CheckpointError

_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_KNOWN = {
    (_METADATA, "Metadata"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    # Python 3.13 pickles paths from where they are defined.
    ("pathlib._local", "Path"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "PurePosixPath"),
    # Megatron-core leaves the plans in it.
    (_PLANNER, "SavePlan"),
    (_PLANNER, "WriteItem"),
    (_PLANNER, "WriteItemType"),
    (_PLANNER, "TensorWriteData"),
    ("builtins", "frozenset"),
}


_WRITTEN = {
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    ("torch.distributed.checkpoint.storage", "WriteResult"),
    ("commgrid.checkpoint.writer", "Written"),
    ("commgrid.checkpoint.storage", "Written"),  # of releases up to 0.2
}
"""Types in a description of one rank's file."""


class _Unpickler(pickle.Unpickler):
    """Takes what metadata consists of."""

    known = _KNOWN

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) not in self.known and not is_dtype:
            raise CheckpointError(
                f"it names {module}.{name}, which is nothing that a checkpoint's metadata consists "
                "of, and loading it could run its author's code; if that is you, "
                "load(…, trusted=True)"
            )
        return super().find_class(module, name)


def read_metadata(path: Path, trusted: bool) -> Metadata:
    """Read a `.metadata` file.

    Args:
        path: of the file.
        trusted: whether it may name anything, and so run code.

    Raises:
        CheckpointError: it names what is not of metadata.
        Exception: pickle's, of any type, if the file is broken.
    """
    with path.open("rb") as file:
        found = (pickle.Unpickler if trusted else _Unpickler)(file).load()
    if not isinstance(found, Metadata):
        raise CheckpointError(f"it holds a {type(found).__name__}, no metadata")
    return found


class _OfWritten(_Unpickler):
    known = _KNOWN | _WRITTEN


def read_written(path: Path) -> Any:
    """Read the description that another rank has left beside its file.

    Raises:
        CheckpointError: it names other things than that consists of.
    """
    with path.open("rb") as file:
        return _OfWritten(file).load()


@dataclass(frozen=True)
class Unread:
    """The place of a value that was not read.

    Args:
        why: the error.
    """

    why: str


def storable(value: Any) -> Any:
    """A value with Python's numbers for NumPy's, which load without running code."""
    kind = type(value)
    if kind is dict:
        return {storable(key): storable(each) for key, each in value.items()}
    if kind in (list, tuple, set):
        return kind(storable(each) for each in value)
    if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():
        number = value.item()
        return number if type(number) in _PLAIN else value
    return value


def warn_if_untrusted(key: str, value: Any) -> None:
    """Warn of a value that `load` leaves out unless it is trusted.

    Args:
        key: its name in the checkpoint.
        value: after `storable`.
    """
    if _is_plain(value):
        return
    stored = io.BytesIO()
    try:
        torch.save(value, stored)
    except Exception:  # of which the writer makes an error
        return
    stored.seek(0)
    try:
        read_value(key, stored, trusted=False)
    except CheckpointError as error:
        what = "refuse" if key.startswith("model.") else "leave out"
        warnings.warn(f"load will {what} what is saved here: {error}", stacklevel=2)


_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is dict:
        return all(_is_plain(key) and _is_plain(each) for key, each in value.items())
    if kind in (list, tuple, set):
        return all(map(_is_plain, value))
    return kind in _PLAIN or kind is Tensor


def read_value(key: str, stored: io.BytesIO, trusted: bool) -> Any:
    """A value that is no tensor.

    Args:
        key: its name in the checkpoint.
        stored: as torch.save wrote it.
        trusted: whether any type may be made, which runs code of the file's author.

    Raises:
        CheckpointError: it is of a type that torch's `weights_only` does not make.
    """
    try:
        return torch.load(stored, map_location="cpu", weights_only=not trusted)
    except pickle.UnpicklingError as error:
        if trusted:
            raise
        stored.seek(0)
        raise CheckpointError(
            f"{key} is more than tensors and plain values{_named(stored)}, and loading it could "
            "run its author's code; if that is you, load(…, trusted=True), or save "
            "it as plain values (its state_dict), or torch.serialization.add_safe_globals([…])"
        ) from error


def _named(stored: io.BytesIO) -> str:
    """The names in a pickle that are not allowed, as far as torch can tell."""
    try:
        found = torch.serialization.get_unsafe_globals_in_checkpoint(stored)
    except Exception:  # a pickle made by hand
        return ""
    return f" ({', '.join(sorted(found)[:3])})" if found else ""
