"""Entries of a checkpoint: tensors in boxes, and plain values, each under a name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from commgrid.layout.box import Shape
from commgrid.parameters.boxes import Chunk

Path = tuple[str, ...]
"""A name in the nested dict that torch's readers make of a checkpoint: ("model", "norm.weight")."""


@dataclass(frozen=True)
class Item:
    """A tensor, or this rank's boxes of it.

    Args:
        path: its name.
        shape: of the full tensor.
        chunks: this rank's boxes.
        dtype: of the numbers.
        writes: whether this rank writes its boxes, and where they are read compares checksums;
            False: a rank with copies of them does.
        repeats: whether several stages may have it, equal ones, without saying so.
        copies: axes along which ranks should have equal boxes, of which one writes.
        shared: stages that have copies too, as of tied embeddings.
    """

    path: Path
    shape: Shape
    chunks: list[Chunk]
    dtype: torch.dtype
    writes: bool = True
    repeats: bool = False
    copies: tuple[str, ...] = ()
    shared: ProcessGroup | None = None

    @property
    def key(self) -> str:
        """The name in the checkpoint."""
        return key_of(self.path)

    def staged(self) -> Item:
        """The same boxes with memory of their own, on the CPU, to be read into."""
        chunks = [Chunk(c.offset, torch.empty_like(c.data, device="cpu")) for c in self.chunks]
        return Item(self.path, self.shape, chunks, self.dtype, self.writes)

    def take(self, staged: Item) -> None:
        """Copies what was read."""
        for mine, read in zip(self.chunks, staged.chunks, strict=True):
            mine.data.copy_(read.data)


@dataclass(frozen=True, eq=False)
class Shared:
    """A value that has many names, such as a learning rate; it is written once.

    Args:
        value: anything that can be pickled.
    """

    value: Any


@dataclass(frozen=True)
class Value:
    """Anything else, pickled.

    Args:
        path: its name.
        value: anything that can be pickled, or Shared; None where it is to be read.
        writes: whether this rank writes it.
        repeats: whether several stages may have it, equal ones, without saying so.
        copies: axes along which ranks should have equal ones, of which one writes.
        of: compared as well, such as the names of parameters that an option is of.
    """

    path: Path
    value: Any = None
    writes: bool = True
    repeats: bool = False
    copies: tuple[str, ...] = ()
    of: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The name in the checkpoint."""
        return key_of(self.path)


def key_of(path: Path) -> str:
    """As torch.distributed.checkpoint flattens nested dicts."""
    return ".".join(path)


def whole(path: Path, tensor: Tensor, **more: Any) -> Item:
    """A tensor that every rank holds whole."""
    data = tensor.detach()
    shape = tuple(data.shape)
    return Item(path, shape, [Chunk((0,) * len(shape), data)], data.dtype, **more)
