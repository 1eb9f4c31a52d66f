"""A rank's file, and checksums of what it has, made beside training by a hand, in pieces.

The file is what torch's own writer would have written. Its way there costs training more: for each
tensor it goes through Python some forty times, and reads the numbers for checksums of its own.
"""

from __future__ import annotations

import ctypes
import io
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from commgrid.checkpoint.hand import Hand
from commgrid.torch_compat.archive import Envelope, envelope, placed

PIECE = 4 << 20
"""Bytes that the hand is given at once."""

_SMALL = 4096  # bytes of a tensor that torch.save may have
_MOST_PARTS = 512  # that a system writes in one call: 1,024

Part = bytes | memoryview


def checksums(tensors: Iterable[Tensor], hand: Hand) -> dict[int, int]:
    """The CRC-32 of each tensor's bytes.

    Args:
        tensors: contiguous, on the CPU.
        hand: reads them.

    Returns:
        By the tensor's id.
    """
    found: dict[int, int] = {}
    some: list[tuple[int, memoryview]] = []
    held = 0

    def read(some: list[tuple[int, memoryview]]) -> None:
        for key, piece in some:
            found[key] = zlib.crc32(piece, found[key])

    for tensor in tensors:
        found[id(tensor)] = 0
        for piece in _pieces(_bytes(tensor)):
            some.append((id(tensor), piece))
            held += len(piece)
            if held >= PIECE or len(some) == _MOST_PARTS:
                hand.do(partial(read, some))
                some, held = [], 0
    if some:
        hand.do(partial(read, some))
    return found


def put(
    path: Path, plan: SavePlan, planner: SavePlanner, *, hand: Hand, sums: Mapping[int, int]
) -> list[WriteResult]:
    """Writes a rank's file, which is on the disk when it returns.

    Args:
        path: of the file.
        plan: what is in it.
        planner: has the data.
        hand: writes it.
        sums: of the tensors, as `checksums` gives them.

    Returns:
        Where everything is.
    """
    kept: dict[tuple[torch.dtype, torch.Size], Envelope | None] = {}
    results = []
    with path.open("wb", buffering=0) as file:
        growing = _Growing(file.fileno(), hand)
        for item in sorted(plan.items, key=lambda one: one.type is not WriteItemType.BYTE_IO):
            start, data = growing.length, planner.resolve_data(item)
            for part in _archived(data, sums, kept):
                growing.add(part)
            length = growing.length - start
            results.append(placed(item.index, path.name, start, length))
        growing.finish()
        hand.do(partial(os.fsync, file.fileno()))
    return results


def _archived(
    data: Tensor | io.BytesIO,
    sums: Mapping[int, int],
    kept: dict[tuple[torch.dtype, torch.Size], Envelope | None],
) -> Iterator[Part]:
    """What torch.save makes of something, in parts."""
    if isinstance(data, io.BytesIO):
        yield data.getvalue()
        return
    kind = data.dtype, data.shape
    if data.nbytes >= _SMALL and kind not in kept:
        kept[kind] = envelope(torch.empty(data.shape, dtype=data.dtype, device="cpu"))
    around = kept.get(kind)
    if around is None:
        whole = io.BytesIO()
        torch.save(data, whole)
        yield whole.getvalue()
        return
    yield around.head
    yield _bytes(data)
    yield around.ending(sums[id(data)])


class _Growing:
    """A file to which a hand appends.

    Args:
        descriptor: of the file.
        hand: writes.
    """

    def __init__(self, descriptor: int, hand: Hand) -> None:
        self._descriptor, self._hand = descriptor, hand
        self._parts: list[Part] = []
        self._held = 0
        self.length = 0

    def add(self, part: Part) -> None:
        """Appends a part, now or with the next ones."""
        self.length += len(part)
        for piece in _pieces(memoryview(part)):
            self._parts.append(piece)
            self._held += len(piece)
            if self._held >= PIECE or len(self._parts) == _MOST_PARTS:
                self.finish()

    def finish(self) -> None:
        """Gives what it has to the system."""
        if self._parts:
            self._hand.do(partial(_write, self._descriptor, self._parts))
        self._parts, self._held = [], 0


def _write(descriptor: int, parts: list[Part]) -> None:
    done = os.writev(descriptor, parts)
    if done < sum(map(len, parts)):  # a signal, or a disk that is full: then the next call says so
        rest = memoryview(b"".join(parts))[done:]
        while len(rest):
            rest = rest[os.write(descriptor, rest) :]


def _pieces(whole: memoryview) -> Iterator[memoryview]:
    return (whole[start : start + PIECE] for start in range(0, len(whole), PIECE))


def _bytes(tensor: Tensor) -> memoryview:
    """A contiguous tensor's memory, for as long as there is the tensor."""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
