"""Checksums in the archives that torch.save writes, which torch.load does not compare."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from typing import IO

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import ReadItem

_FIRST = b"PK\x03\x04"
_LENGTHS, _HEADER = 26, 30  # bytes into the header of a part: of two lengths, and its end


def damage_of(archive: bytes) -> str | None:
    """Compare an archive with the checksums in it, as torch.load does not.

    Args:
        archive: as torch.save wrote it; with `set_crc32_options(False)` it has no checksums, and
            nothing is compared.

    Returns:
        The part that has other bytes than were written; None: none has, or it is no archive.
    """
    if not archive.startswith(_FIRST):
        return None
    name = "its list of parts"
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as parts:
            for part in parts.infolist():
                name = part.filename
                if part.CRC and zlib.crc32(_stored(archive, part)) != part.CRC:
                    return name
    except (zipfile.BadZipFile, struct.error):
        return name
    return None


def _stored(archive: bytes, part: zipfile.ZipInfo) -> memoryview:
    """The bytes of a part, which torch does not compress."""
    lengths = struct.unpack_from("<HH", archive, part.header_offset + _LENGTHS)
    start = part.header_offset + _HEADER + sum(lengths)
    return memoryview(archive)[start : start + part.file_size]


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
        archive = stream.read(-1)
        part = damage_of(archive)
        if part is not None:
            self._damaged(read_item.storage_index.fqn, part)
        return io.BytesIO(archive)
