"""Folders of other file systems, by fsspec: `s3://bucket/runs`, `gs://…`, `hdfs://…`, `memory://…`.

A path here has the methods of `pathlib.Path` that checkpoints use, so that a folder is written and
read in one way wherever it is. One difference: a rename copies files one after the other where the
storage cannot rename a folder. A crash in between leaves a half of a checkpoint, with files that
are missing, and halves are skipped.
"""

from __future__ import annotations

import io
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path, PurePath, PurePosixPath
from types import SimpleNamespace
from typing import Any, cast

from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemWriter

from commgrid.errors import SpecError


class RemotePath(PurePosixPath):
    """A path of another file system; its first part is the protocol, as `s3:`."""

    def opened(self) -> tuple[Any, str]:
        """The file system, without cached listings of folders, and the path in it.

        Raises:
            SpecError: fsspec does not open it, such as for a package that is not installed.
        """
        protocol, *rest = self.parts
        try:
            opens = import_module("fsspec.core").url_to_fs
            system, path = opens(f"{protocol}//{'/'.join(rest)}")
        except (ImportError, ValueError) as error:
            raise SpecError(
                f"{self}: checkpoints go to a folder of a file system, and {protocol}/ is none "
                f"that is mounted here, nor one that fsspec opens: {error}; install its package, "
                "or mount it"
            ) from error
        system.invalidate_cache()  # other ranks write there
        return system, path

    def _call(self, name: str, *given: Any, **options: Any) -> Any:
        system, path = self.opened()
        return getattr(system, name)(path, *given, **options)

    def absolute(self) -> RemotePath:
        return self

    def resolve(self) -> RemotePath:
        return self

    def exists(self) -> bool:
        return bool(self._call("exists"))

    def is_dir(self) -> bool:
        return bool(self._call("isdir"))

    def is_file(self) -> bool:
        return bool(self._call("isfile"))

    def is_symlink(self) -> bool:
        return False

    def iterdir(self) -> Iterator[RemotePath]:
        return (self / PurePosixPath(name).name for name in self._call("ls", detail=False))

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """The paths in the folder whose names are of a pattern."""
        listed = self.iterdir() if self.is_dir() else iter(())
        return (path for path in listed if fnmatchcase(path.name, pattern))

    def stat(self) -> SimpleNamespace:
        """The size, and a number that changes with the file in place of its age."""
        age = zlib.crc32(str(self._call("ukey")).encode())
        return SimpleNamespace(st_size=self._call("info")["size"], st_mtime_ns=age)

    def open(self, mode: str = "r", buffering: int = -1) -> Any:
        return self._call("open", mode)

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        self._call("makedirs", exist_ok=exist_ok)

    def rename(self, target: RemotePath) -> RemotePath:
        self._call("mv", target.opened()[1], recursive=self.is_dir())
        return target

    def unlink(self) -> None:
        self._call("rm_file")

    def remove_tree(self) -> None:
        """Delete the folder and its contents."""
        self._call("rm", recursive=True)


def is_remote(folder: Path) -> bool:
    """Whether a folder is not one of this machine's file system."""
    return isinstance(cast(PurePath, folder), RemotePath)


def remove_tree(folder: Path, ignore_errors: bool = False) -> None:
    """Delete a folder and its contents."""
    if not is_remote(folder):
        shutil.rmtree(folder, ignore_errors=ignore_errors)
        return
    with suppress(*([Exception] if ignore_errors else [])):
        cast(Any, folder).remove_tree()


def sync_file(file: Any) -> None:
    """Make the bytes of a file last, where it is one of this machine."""
    file.flush()
    with suppress(io.UnsupportedOperation, AttributeError):
        os.fsync(file.fileno())


def sync_names(folder: Path) -> None:
    """Make the names in a folder last, as fsync does the bytes of a file."""
    if is_remote(folder):
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def writer_to(folder: Path) -> FileSystemWriter:
    """Torch's writer of a checkpoint's files."""
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=not is_remote(folder))
    if is_remote(folder):
        writer.fs, writer.path = _Files(), str(folder)  # type: ignore[assignment]
    return writer


class _Files(FileSystemBase):
    """File operations of torch's writer, for `RemotePath`s or their texts."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with RemotePath(path).open(mode) as stream:
            yield stream

    def concat_path(self, path: Any, suffix: str) -> Any:
        return RemotePath(path) / suffix

    def rename(self, path: Any, new_path: Any) -> None:
        path.rename(new_path)

    def init_path(self, path: Any) -> Any:
        return path

    def mkdir(self, path: Any) -> None:
        RemotePath(path).mkdir(exist_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, RemotePath)

    def exists(self, path: Any) -> bool:
        return bool(path.exists())

    def rm_file(self, path: Any) -> None:
        path.unlink()
