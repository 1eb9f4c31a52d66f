"""Local boxes: this rank's tensors of one side of a plan, and the layout that it tells others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from commgrid.errors import SpecError, TransferError
from commgrid.layout.box import Box, Shape, common, slices
from commgrid.resharding.item import Chunk, Item
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
        is_lasting: whether boxes stay where they are from run to run.
    """

    is_lasting = True

    def __init__(self) -> None:
        self._tensors: dict[str, _HeldTensor] = {}
        self.apart_from: LocalBoxes | None = None  # another side, which has memory of its own

    def add(self, item: Item, name: str = "", source: str = "") -> None:
        """Adds a tensor's boxes; one of a name that is there already is a further copy.

        Boxes without elements are left out: nothing of them is moved or compared.

        Args:
            item: the tensor.
            name: "": its key.
            source: the name of the tensor that it gets its numbers from; "": the same.

        Raises:
            SpecError: that one has another shape or dtype.
        """
        name = name or item.key
        source = "" if source == name else source
        held = self._tensors.setdefault(name, _HeldTensor(item.shape, item.dtype, source))
        if (held.shape, held.dtype) != (item.shape, item.dtype):
            raise SpecError(
                f"{name} is twice on this rank, of shape {held.shape} and dtype {held.dtype}, and "
                f"of shape {item.shape} and dtype {item.dtype}; expected copies"
            )
        for chunk in _filled(item.chunks):
            held.chunks.setdefault(chunk.box, []).append(chunk.data)

    @cached_property
    def layout(self) -> bytes:
        """The layout for the other ranks; read it after the last `add`."""
        entries = []
        for name, held in self._tensors.items():
            form = Form.of(held.shape, held.dtype, held.chunks)
            entries.append(LayoutEntry(name, form, held.source))
        return pack(entries)

    def view(self, name: str, box: Box) -> Tensor:
        """The part of this rank's tensor that a box is."""
        for (offset, size), tensors in self._tensors[name].chunks.items():
            if common((offset, size), box) == box:
                return tensors[0][slices(box, offset)]
        raise AssertionError(f"{name} has no {box}")

    def tensors(self, name: str) -> list[Tensor]:
        """This rank's boxes of a tensor, each once; []: it has none."""
        held = self._tensors.get(name)
        return [] if held is None else [tensors[0] for tensors in held.chunks.values()]

    def has(self, name: str, chunks: Iterable[Chunk]) -> bool:
        """Whether the same memory is there already, as of a tied tensor's second name."""
        return [chunk.data.data_ptr() for chunk in _filled(chunks)] == [
            tensor.data_ptr() for tensor in self.tensors(name)
        ]

    @property
    def names(self) -> Collection[str]:
        """Of all tensors."""
        return self._tensors.keys()

    def items(self) -> Iterator[Item]:
        """Each tensor, with its boxes on this rank, each once."""
        for name, held in self._tensors.items():
            chunks = [Chunk(box[0], tensors[0]) for box, tensors in held.chunks.items()]
            yield Item((name,), held.shape, chunks, held.dtype)

    @property
    def twice(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Two tensors of one box, in memories of their own."""
        for name, held in self._tensors.items():
            for first, *others in held.chunks.values():
                for other in others:
                    if other.data_ptr() != first.data_ptr():
                        yield name, first, other

    def copy_further(self) -> None:
        """Gives copies of a name on this rank what the first of them has got."""
        for held in self._tensors.values():
            for first, *others in held.chunks.values():
                for other in others:
                    other.copy_(first)

    def beside(self) -> LocalBoxes:
        """The same boxes in memory of their own, without the numbers."""
        made = LocalBoxes()
        made.is_lasting = False
        for item in self.items():
            made.add(item.empty(), source=self._tensors[item.key].source)
        return made

    @torch.no_grad()
    def take(self, other: LocalBoxes) -> None:
        """Copies into these boxes the numbers that another side has for them."""
        for name, held in self._tensors.items():
            for box, tensors in held.chunks.items():
                for tensor in tensors:
                    tensor.copy_(other.view(name, box))

    @cached_property
    def parts(self) -> list[MemoryPart]:
        """Where each box lies in memory; read it after the last `add`."""
        return [
            # Those of one owner get the same numbers.
            MemoryPart(tensor, name, (held.source or name, box))
            for name, held in self._tensors.items()
            for box, tensors in held.chunks.items()
            for tensor in tensors if tensor.numel()
        ]  # fmt: skip


def _filled(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """The boxes that have elements."""
    return (chunk for chunk in chunks if chunk.data.numel())


class MemoryPart(NamedTuple):
    """A tensor's place in memory.

    Args:
        tensor: of some elements.
        name: for messages.
        owner: parts of one owner may have memory in common.
    """

    tensor: Tensor
    name: str
    owner: Any


def shared_memory(parts: Iterable[MemoryPart]) -> tuple[MemoryPart, MemoryPart] | None:
    """The first two parts of different owners that have a byte in common; None: there are none.

    >>> pool = torch.zeros(4, 6)
    >>> parts = [MemoryPart(pool[:, :3], "one", 1), MemoryPart(pool[:, 3:], "other", 2)]
    >>> shared_memory(parts)
    >>> [part.name for part in shared_memory([*parts, MemoryPart(pool[2], "row", 3)])]
    ['one', 'row']
    """
    listed = list(parts)
    near: list[tuple[int, int]] = []
    pairs: list[tuple[int, int]] = []
    begins = [part.tensor.data_ptr() for part in listed]
    for place in sorted(range(len(listed)), key=begins.__getitem__):
        part = listed[place]
        near = [(end, other) for end, other in near if end > begins[place]]
        pairs += [
            (min(place, other), max(place, other))
            for _, other in near
            if listed[other].owner != part.owner
            and _have_common_byte(listed[other].tensor, part.tensor)
        ]
        near.append((begins[place] + _reach(part.tensor), place))
    return next(((listed[one], listed[other]) for one, other in sorted(pairs)), None)


def _reach(tensor: Tensor) -> int:
    """Bytes from a tensor's first to behind its last element."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * stride for size, stride in steps) + 1) * tensor.itemsize


def _have_common_byte(one: Tensor, other: Tensor) -> bool:
    """Whether there are indices of both that lead to one address.

    The address of a byte is a sum of strides, each times an index, and so is the distance of two.
    """
    counts: dict[int, tuple[int, int]] = {1: (other.itemsize - 1, one.itemsize - 1)}
    for tensor in (other, one):
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            back, ahead = counts.get(stride * tensor.itemsize, (0, 0))
            more = (size - 1, 0) if tensor is other else (0, size - 1)
            if stride:
                counts[stride * tensor.itemsize] = back + more[0], ahead + more[1]
    strides = sorted(((stride, *most) for stride, most in counts.items()), reverse=True)
    return _is_sum(other.data_ptr() - one.data_ptr(), strides)


def _is_sum(distance: int, strides: list[tuple[int, int, int]]) -> bool:
    """Whether a distance is a sum of strides, each times a number from -`back` to `ahead`."""
    if not strides:
        return distance == 0
    (stride, back, ahead), *rest = strides
    most_back = sum(step * count for step, count, _ in rest)
    most_ahead = sum(step * count for step, _, count in rest)
    first = max(-back, -((most_ahead - distance) // stride))
    last = min(ahead, (distance + most_back) // stride)
    return any(_is_sum(distance - stride * count, rest) for count in range(first, last + 1))


def refuse_shared_memory(source: LocalBoxes | None, target: LocalBoxes | None) -> None:
    """Refuse a target in the source's memory, which would be overwritten while it is sent."""
    if source is None or target is None or target.apart_from is source:
        return
    sides = [(source, 0), (target, 1)]
    found = shared_memory(p._replace(owner=side) for held, side in sides for p in held.parts)
    if found is not None:
        first, second = found
        raise TransferError(
            f"{second.name} of the target shares its memory with {first.name} of the source; give "
            "the target tensors of its own, or leave it out with only="
        )
    target.apart_from = source


def refuse_one_memory(target: LocalBoxes) -> None:
    """Refuse two tensors of a target in one memory: only one's numbers would be there."""
    found = shared_memory(target.parts)
    if found is not None:
        raise TransferError(
            f"{found[0].name} and {found[1].name} of the target are in one memory, and only one of "
            "them would be there in the end; leave one of them out on both sides, or give the "
            "modules, which know what is tied"
        )


def refuse_overlaps(held: LocalBoxes) -> None:
    """Refuse parts of a target that overlap: only one of them would get the numbers of both."""
    for item in held.items():
        for one, other in combinations([chunk.box for chunk in item.chunks], 2):
            if common(one, other) is not None:
                raise TransferError(
                    f"{item.key} of the target has parts on this rank that overlap, {list(one[1])} "
                    f"at {list(one[0])} and {list(other[1])} at {list(other[0])}; give parts that "
                    "are equal, or have nothing in common"
                )
