"""The bytes that torch.save writes around a tensor's numbers, made without the numbers.

torch.save makes a zip archive: a description of the tensor, its numbers, and a list of both at the
end. The checksum of the numbers is written in two places; nothing else depends on them. A caller
that writes the numbers in pieces gets the other bytes from here:

    head                            numbers                     tail
    archive/data.pkl, names, …      as they lie in memory       their checksum, …, the list
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

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


def placed(index: MetadataIndex, file: str, start: int, length: int) -> WriteResult:
    """An entry of torch's metadata, for a tensor or a value in a file.

    Args:
        index: its key.
        file: its name in the checkpoint's folder.
        start, length: where it is in that, in bytes.
    """
    return WriteResult(index, length, _StorageInfo(file, start, length))
