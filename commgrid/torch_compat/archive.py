"""The archives that torch.save writes: their bytes around a tensor's numbers, and their checksums.

torch.save makes a zip archive: a description of the tensor, its numbers, and a list of both at the
end. The checksum of the numbers is written in two places; nothing else depends on them. A caller
that writes the numbers in pieces gets the other bytes from here:

    head                            numbers                     tail
    archive/data.pkl, names, …      as they lie in memory       their checksum, …, the list
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.storage import WriteResult

_FIRST = b"PK\x03\x04"
_NAME = b"/data/0"
_AFTER_DATA = b"PK\x07\x08"  # then the checksum
_LISTED = b"PK\x01\x02"
_LISTED_CHECKSUM, _LISTED_LENGTHS, _LISTED_NAME = 16, 28, 46  # bytes into an entry of the list


@dataclass(frozen=True)
class Envelope:
    """The bytes before and after a tensor's numbers.

    Args:
        head, tail: the bytes.
        places: in the tail, of the numbers' checksum.
    """

    head: bytes
    tail: bytes
    places: tuple[int, ...]

    def ending(self, checksum: int) -> bytes:
        """The tail for numbers of this CRC-32."""
        tail = bytearray(self.tail)
        for place in self.places:
            struct.pack_into("<I", tail, place, checksum)
        return bytes(tail)


class _Parts:
    """A file that remembers what is written, and how long the hole is."""

    def __init__(self) -> None:
        self.before, self.after, self.hole = bytearray(), bytearray(), 0

    def write(self, some: bytes) -> int:
        (self.after if self.hole else self.before).extend(some)
        return len(some)

    def seek(self, count: int, whence: int) -> None:
        self.hole += count

    def flush(self) -> None:
        """There is nothing to."""


def envelope(tensor: Tensor) -> Envelope | None:
    """Return the bytes that torch.save writes around a tensor's numbers.

    Args:
        tensor: contiguous, on the CPU, with storage of its own; its numbers are not read.

    Returns:
        None where torch lays its archives out otherwise; torch.save then has to write it.

    Example:
        >>> import io, zlib
        >>> x = torch.arange(1024.0)
        >>> around, numbers = envelope(x), x.numpy().tobytes()
        >>> archive = around.head + numbers + around.ending(zlib.crc32(numbers))
        >>> bool((torch.load(io.BytesIO(archive)) == x).all())
        True
    """
    parts = _Parts()
    with torch.serialization.skip_data():
        torch.save(tensor, parts)  # type: ignore[arg-type]
    tail = bytes(parts.after)
    listed = _listed(tail)
    if parts.hole != tensor.nbytes or not tail.startswith(_AFTER_DATA) or listed is None:
        return None
    return Envelope(bytes(parts.before), tail, (len(_AFTER_DATA), listed))


def _listed(tail: bytes) -> int | None:
    """Where the list has the checksum."""
    at = tail.find(_LISTED)
    while 0 <= at <= len(tail) - _LISTED_NAME:
        name, extra, comment = struct.unpack_from("<HHH", tail, at + _LISTED_LENGTHS)
        start = at + _LISTED_NAME
        if tail[start : start + name].endswith(_NAME):
            return at + _LISTED_CHECKSUM
        at = start + name + extra + comment
        if tail[at : at + len(_LISTED)] != _LISTED:
            return None
    return None


_PIECE = 1 << 20  # bytes


def damage_of(archive: IO[bytes]) -> str | None:
    """Compare an archive with the checksums in it, as torch.load does not.

    Args:
        archive: as torch.save wrote it; with `set_crc32_options(False)` it has no checksums, and
            nothing is compared. Read from its beginning.

    Returns:
        The part that has other bytes than were written; None: none has, or it is no archive.
    """
    if archive.read(len(_LISTED)) != _FIRST:
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


def placed(index: MetadataIndex, file: str, start: int, length: int) -> WriteResult:
    """An entry of torch's metadata, for a tensor or a value in a file.

    Args:
        index: its key.
        file: its name in the checkpoint's folder.
        start, length: where it is in that, in bytes.
    """
    return WriteResult(index, length, _StorageInfo(file, start, length))
