"""Checksums in the archives that torch.save writes, which torch.load does not compare."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable, Sequence
from typing import IO

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import ReadItem

_FIRST = b"PK\x03\x04"
_PIECE = 1 << 20  # bytes


def damage_of(archive: IO[bytes]) -> str | None:
    """Compare an archive with the checksums in it, as torch.load does not.

    Args:
        archive: as torch.save wrote it; with `set_crc32_options(False)` it has no checksums, and
            nothing is compared. Read from its beginning.

    Returns:
        The part that has other bytes than were written; None: none has, or it is no archive.
    """
    if archive.read(len(_FIRST)) != _FIRST:
        return None
    archive.seek(0)
    name = "its list of parts"
    try:
        with zipfile.ZipFile(_Sought(archive)) as parts:
            for part in parts.infolist():
                name = part.filename
                if part.CRC:
                    with parts.open(part) as data:
                        while data.read(_PIECE):
                            pass
    except zipfile.BadZipFile:
        return name
    return None


class _Sought:
    """A stream that finds places from its end; torch's view of a part of a file goes beyond it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.read, self.tell, self.seekable = stream.read, stream.tell, stream.seekable
        self._seek = stream.seek

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_END:
            self._seek(0, os.SEEK_END)
            offset, whence = self.tell() + offset, os.SEEK_SET
        return self._seek(offset, whence)


class Checked:
    """What a FileSystemReader reads, compared with its checksums.

    Args:
        reader: its `transforms` are replaced by this.
        damaged: called with the key of what is damaged, and the part; raises.
    """

    def __init__(self, reader: FileSystemReader, damaged: Callable[[str, str], None]) -> None:
        self._before, self._damaged = reader.transforms, damaged
        reader.transforms = self  # type: ignore[assignment]

    def transform_load_stream(
        self, read_item: ReadItem, transform_descriptors: Sequence[str], raw_stream: IO[bytes]
    ) -> IO[bytes]:
        """What is stored for an item; called by the reader."""
        stream: IO[bytes] = self._before.transform_load_stream(
            read_item, transform_descriptors, raw_stream
        )
        if not stream.seekable():  # it was compressed
            stream = io.BytesIO(stream.read(-1))
        part = damage_of(stream)
        if part is not None:
            self._damaged(read_item.storage_index.fqn, part)
        stream.seek(0)
        return stream
