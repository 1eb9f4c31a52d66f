"""Local boxes: this rank's tensors of one side of a plan, and the layout that it tells others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations

import torch
from torch import Tensor

from commgrid.errors import SpecError
from commgrid.layout.box import Box, Shape, common
from commgrid.resharding.item import Chunk
from commgrid.resharding.layouts import Form, LayoutEntry, pack


@dataclass
class _HeldTensor:
    shape: Shape
    dtype: torch.dtype
    source: str
    chunks: dict[Box, list[Tensor]] = field(default_factory=dict)


class LocalBoxes:
    """Tensors of this rank by name, and where each lies in the full one.

    Attributes:
        is_lasting: whether a box has one place in memory.
    """

    is_lasting = True

    def __init__(self) -> None:
        self._tensors: dict[str, _HeldTensor] = {}

    def add(
        self,
        name: str,
        shape: Shape,
        dtype: torch.dtype,
        chunks: Iterable[Chunk],
        source: str = "",
    ) -> None:
        """Adds a tensor's boxes; one of a name that is there already is a further copy.

        Raises:
            SpecError: that one has another shape or dtype.
        """
        held = self._tensors.setdefault(name, _HeldTensor(tuple(shape), dtype, source))
        if (held.shape, held.dtype) != (tuple(shape), dtype):
            raise SpecError(
                f"{name} is twice on this rank, of shape {held.shape} and dtype {held.dtype}, and "
                f"of shape {tuple(shape)} and dtype {dtype}; expected copies"
            )
        for chunk in chunks:
            box = (tuple(chunk.offset), tuple(chunk.data.shape))
            held.chunks.setdefault(box, []).append(chunk.data)

    @cached_property
    def layout(self) -> bytes:
        """The layout for the other ranks; call it after the last `add`."""
        entries = []
        for name, held in self._tensors.items():
            dtype = str(held.dtype).removeprefix("torch.")
            form = Form(held.shape, dtype, held.dtype.itemsize, tuple(held.chunks))
            entries.append(LayoutEntry(name, form, held.source))
        return pack(entries)

    def view(self, name: str, box: Box) -> Tensor:
        """The part of this rank's tensor that a box is."""
        for (offset, size), tensors in self._tensors[name].chunks.items():
            if common((offset, size), box) == box:
                places = zip(box[0], box[1], offset, strict=True)
                return tensors[0][tuple(slice(b - o, b - o + n) for b, n, o in places)]
        raise AssertionError(f"{name} has no {box}")

    def tensors(self, name: str) -> list[Tensor]:
        """This rank's boxes of a tensor, each once; []: it has none."""
        held = self._tensors.get(name)
        return [] if held is None else [tensors[0] for tensors in held.chunks.values()]

    def has(self, name: str, chunks: Iterable[Chunk]) -> bool:
        """Whether the same memory is there already, as of a tied tensor's second name."""
        return [chunk.data.data_ptr() for chunk in chunks] == [
            tensor.data_ptr() for tensor in self.tensors(name)
        ]

    def items(self) -> Iterator[tuple[str, Shape, torch.dtype, list[Chunk]]]:
        """Each tensor's name, full shape, dtype and boxes on this rank, each once."""
        for name, held in self._tensors.items():
            chunks = [Chunk(box[0], tensors[0]) for box, tensors in held.chunks.items()]
            yield name, held.shape, held.dtype, chunks

    def copy_further(self) -> None:
        """Gives copies of a name on this rank what the first of them has got."""
        for held in self._tensors.values():
            for first, *others in held.chunks.values():
                for other in others:
                    other.copy_(first)

    def storages(self) -> dict[int, str]:
        """Where the tensors' memory begins, and whose it is."""
        return {
            tensor.untyped_storage().data_ptr(): name
            for name, held in self._tensors.items()
            for tensors in held.chunks.values()
            for tensor in tensors if tensor.numel()
        }  # fmt: skip

    def overlapping(self) -> Iterator[tuple[str, Box, Box]]:
        """Each two boxes of one tensor that have something in common and are not equal."""
        for name, held in self._tensors.items():
            for one, other in combinations(held.chunks, 2):
                if common(one, other) is not None:
                    yield name, one, other

    def begins(self) -> Iterator[tuple[str, int]]:
        """Each tensor's name, and where in memory its parts begin."""
        for name, held in self._tensors.items():
            for tensors in held.chunks.values():
                yield from ((name, tensor.data_ptr()) for tensor in tensors if tensor.numel())

    @property
    def device_types(self) -> set[str]:
        """Where they are."""
        return {
            tensor.device.type
            for held in self._tensors.values()
            for tensors in held.chunks.values()
            for tensor in tensors
        }
