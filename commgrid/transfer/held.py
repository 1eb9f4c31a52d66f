"""This rank's tensors of one side, and the layout of them that it tells the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from commgrid.checkpoint.items import Item
from commgrid.checkpoint.naming import Naming, Rename
from commgrid.errors import ShapeError, SpecError
from commgrid.parameters.boxes import Chunk, local_part
from commgrid.planning.boxes import Box, Shape, common
from commgrid.planning.names import nearest
from commgrid.transfer.layouts import Entry, Form, pack

if TYPE_CHECKING:
    pass

Only = Iterable[str] | Callable[[str], bool]


@dataclass(frozen=True)
class Part:
    """A box of a full tensor, for a mapping of names to tensors.

    Args:
        tensor: this rank's, which is read, or written in place.
        shape: of the full tensor.
        offset: of the tensor's first element in the full one.

    Raises:
        ShapeError: it does not lie within the full tensor.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    def __post_init__(self) -> None:
        held, full, offset = tuple(self.tensor.shape), tuple(self.shape), tuple(self.offset)
        if not len(held) == len(full) == len(offset) or any(
            begin < 0 or begin + size > whole
            for begin, size, whole in zip(offset, held, full, strict=True)
        ):
            raise ShapeError(
                f"Part: a tensor of shape {held} at offset {offset} is not within one of shape "
                f"{full}; give shape and offset of the full tensor, one number for each dim"
            )


Model = nn.Module | Sequence[nn.Module] | Mapping[str, Tensor | Part | Sequence[Part]]
"""A module, a pipeline stage's chunks, or tensors by name: whole, DTensors, a part or several."""


@dataclass
class _HeldTensor:
    shape: Shape
    dtype: torch.dtype
    source: str
    chunks: dict[Box, list[Tensor]] = field(default_factory=dict)


class Held:
    """Tensors of this rank by name, and where each lies in the full one."""

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
            entries.append(Entry(name, form, held.source))
        return pack(entries)

    def view(self, name: str, box: Box) -> Tensor:
        """The part of this rank's tensor that a box is."""
        for (offset, size), tensors in self._tensors[name].chunks.items():
            if common((offset, size), box) == box:
                places = zip(box[0], box[1], offset, strict=True)
                return tensors[0][tuple(slice(b - o, b - o + n) for b, n, o in places)]
        raise AssertionError(f"{name} has no {box}")

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


class Names:
    """The names of the tensors that are moved, on both sides.

    Args:
        rename: the source's names to the target's; names that are not in it stay.
        only: patterns of the target's names, as `blocks.*`, or a function of one; None: all.

    Raises:
        SpecError: something else.
    """

    def __init__(self, rename: Rename | None, only: Only | None) -> None:
        if isinstance(only, str):
            only = [only]
        self._naming = Naming("", rename)
        self._only = only if only is None or callable(only) else list(only)
        if isinstance(self._only, list) and not all(isinstance(p, str) for p in self._only):
            raise SpecError(f"only={self._only!r}: expected patterns of names, or a function")

    @property
    def is_partial(self) -> bool:
        """Whether the sides may have tensors that are not moved."""
        return self._only is not None

    def check_used(self, names: Collection[str]) -> None:
        """Refuses a pattern by which nothing is moved, such as one typed wrong.

        Args:
            names: the target's that are moved.

        Raises:
            SpecError: names the pattern.
        """
        for pattern in self._only if isinstance(self._only, list) else ():
            if not any(fnmatchcase(name, pattern) for name in names):
                raise SpecError(
                    f"only={self._only}: {pattern!r} is the name of no tensor of the target"
                    f"{nearest(pattern, names)}; leave it out, or give one that is"
                )

    def of_source(self, name: str) -> str | None:
        """The target's name for one of the source's; None: it is not moved."""
        found = self._naming.of_model(name)
        return found if found is not None and self.has(found) else None

    def has(self, name: str) -> bool:
        """Whether a tensor of this name on the target is moved."""
        if self._only is None:
            return True
        if callable(self._only):
            return self._only(name)
        return any(fnmatchcase(name, pattern) for pattern in self._only)


def tensors_of(model: Model) -> list[Any]:
    """Every tensor of a model: what it is, where its memory is, its shape and dtype.

    This takes a few microseconds a tensor, and reading placements hundreds.
    """
    if isinstance(model, Mapping):
        given = [each for one in model.values() for each in _several(one)]
        tensors = [one.tensor if isinstance(one, Part) else one for one in given]
        return [*model, *map(_trace_of, tensors)]
    roots = [model] if isinstance(model, nn.Module) else model
    return [
        _trace_of(tensor)
        for root in roots
        for module in root.modules()
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    ]  # fmt: skip


def _trace_of(tensor: Any) -> tuple[Any, ...]:
    if not isinstance(tensor, Tensor):  # which is refused
        return (id(tensor),)
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return id(tensor), local.data_ptr(), local.shape, local.stride(), local.dtype


def mapped_items(tensors: Mapping[str, Tensor | Part | Sequence[Part]]) -> list[Item]:
    """The tensors of a mapping.

    Raises:
        SpecError: something in it is no tensor, or has no numbers.
    """
    return [_mapped(name, each) for name, given in tensors.items() for each in _several(given)]


def _several(given: Any) -> Sequence[Any]:
    """The parts of a name; what is no list of parts is one by itself."""
    return given if isinstance(given, list | tuple) else (given,)


def _mapped(name: str, given: Tensor | Part) -> Item:
    tensor = given.tensor if isinstance(given, Part) else given
    if not isinstance(name, str) or not isinstance(tensor, Tensor) or tensor.is_meta:
        raise SpecError(
            f"{{{name!r}: {type(tensor).__name__!s}}}: expected names, and tensors with "
            "numbers, DTensors, or Part(tensor, shape, offset)"
        )
    data = local_part(tensor)
    shape, offset = tuple(tensor.shape), (0,) * tensor.dim()
    if isinstance(given, Part):
        shape, offset = tuple(given.shape), tuple(given.offset)
    elif isinstance(tensor, DTensor):
        if any(placement.is_partial() for placement in tensor.placements):
            raise SpecError(
                f"{name} is a DTensor with placements {tensor.placements}, parts of a sum; "
                "redistribute it to Shard or Replicate first"
            )
        (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
        offset = tuple(chunk.offsets)
    chunks = [Chunk(offset, data)] if data.numel() else []
    return Item(("model", name), shape, chunks, tensor.dtype)
