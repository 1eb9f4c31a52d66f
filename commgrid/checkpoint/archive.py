"""Tensors in the archives that torch.save writes, compared with the checksums in them.

torch.load compares no checksums, and copies an archive twice. Here the bytes of a tensor stay where
they were read to.

    archive   data.pkl          dtype, size, strides ─► torch.load, without the bytes
              byteorder
              data/0            the bytes            ─► torch.frombuffer
              list of parts     checksums            ─► zlib.crc32
"""

from __future__ import annotations

import io
import struct
import sys
import zipfile
import zlib
from collections.abc import Mapping
from typing import IO, Any, cast

import torch
from torch import Tensor

_FIRST = b"PK\x03\x04"
_LENGTHS, _HEADER = 26, 30  # bytes into the header of a part: of two lengths, and its end


class DamagedError(Exception):
    """An archive has other bytes than were written; the message names the part."""


def parts_of(archive: memoryview, checks: bool = True) -> Mapping[str, memoryview]:
    """Return the bytes of each part of an archive by its name, without the archive's own.

    Args:
        archive: as torch.save wrote it; with `set_crc32_options(False)` it has no checksums, and
            nothing is compared. If it is something else it has no parts.
        checks: whether to compare it with the checksums in it.

    Raises:
        DamagedError: a part has other bytes than were written.
    """
    found: dict[str, memoryview] = {}
    if bytes(archive[: len(_FIRST)]) != _FIRST:
        return found
    name = "its list of parts"
    try:
        with zipfile.ZipFile(Readable(archive)) as parts:
            for part in parts.infolist():
                name = part.filename
                content = _stored(archive, part)
                if checks and part.CRC and zlib.crc32(content) != part.CRC:
                    raise DamagedError(name)
                found[name.partition("/")[2]] = content
    except (zipfile.BadZipFile, struct.error) as error:
        raise DamagedError(name) from error
    return found


def _stored(archive: memoryview, part: zipfile.ZipInfo) -> memoryview:
    """The bytes of a part, which torch does not compress."""
    lengths = struct.unpack_from("<HH", archive, part.header_offset + _LENGTHS)
    start = part.header_offset + _HEADER + sum(lengths)
    return archive[start : start + part.file_size]


_Form = tuple[torch.dtype, torch.Size, tuple[int, ...], int]
"""How a tensor lies in the bytes of an archive: dtype, size, stride, and offset in elements."""


class Tensors:
    """Makes tensors of archives, whose numbers are the archive's own bytes where that can be.

    Tensors of one dtype and shape are described by the same bytes, which are read once.
    """

    def __init__(self) -> None:
        self._forms: dict[bytes, _Form | None] = {}

    def of(self, archive: memoryview, parts: Mapping[str, memoryview]) -> Tensor:
        """Return the tensor in an archive.

        Args:
            archive: as torch.save wrote it, in memory that can be written to.
            parts: its parts.

        Raises:
            pickle.UnpicklingError: it holds more than torch's `weights_only` makes.
            TypeError: it holds something else.
        """
        stored = parts.get("data/0")
        native = bytes(parts.get("byteorder", b"")) == sys.byteorder.encode()
        if not stored or not native or "data/1" in parts or "data.pkl" not in parts:
            return _loaded(archive)
        described = bytes(parts["data.pkl"])
        if described not in self._forms:
            self._forms[described] = _form_of(archive)
        form = self._forms[described]
        if form is None:
            return _loaded(archive)
        dtype, size, stride, offset = form
        return torch.frombuffer(stored, dtype=dtype).as_strided(size, stride, offset)


def _form_of(archive: memoryview) -> _Form | None:
    """How the tensor of an archive lies in it; None: it is of a kind with more to it."""
    with torch.serialization.skip_data():
        empty = _loaded(archive)
    plain = type(empty) is Tensor and empty.layout == torch.strided and not empty.is_quantized
    if not plain or empty.is_conj() or empty.is_neg():
        return None
    return empty.dtype, empty.size(), empty.stride(), int(empty.storage_offset())


def _loaded(archive: memoryview) -> Tensor:
    loaded = torch.load(cast(IO[bytes], Readable(archive)), map_location="cpu", weights_only=True)
    if not isinstance(loaded, Tensor):
        raise TypeError(f"it holds a {type(loaded).__name__}, no tensor")
    return loaded.detach()


class Readable(io.RawIOBase):
    """A file of bytes in memory, which are not copied before they are read.

    Args:
        content: all of it.
    """

    def __init__(self, content: memoryview) -> None:
        super().__init__()
        self._content, self._place = content, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._content[self._place : self._place + len(buffer)]
        buffer[: len(piece)] = piece
        self._place += len(piece)
        return len(piece)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: len(self._content)}
        self._place = max(start[whence] + offset, 0)
        return self._place

    def tell(self) -> int:
        return self._place
