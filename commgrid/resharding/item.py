"""Item: a tensor in boxes, or a plain value, under its name in a checkpoint or a transfer.

Layers, torch and other libraries cut a full parameter into the boxes that ranks hold:

    full (6, 4) = tp 2 by rows, then fsdp 2 by rows; rank (fsdp 1, tp 0) has row 2 of 6:

        tp 0 ┌ fsdp 0   rows 0, 1          the module says: dim 0, tp         offset 0 of 6
             └ fsdp 1   row  2        ◄─   FSDP's DTensor: dim 0, fsdp        offset 2 of 3
        tp 1 ┌ fsdp 0   rows 3, 4
             └ fsdp 1   row  5

| who cuts it | where it is read |
|---|---|
| a layer of commgrid's, or of the user's | `ShardedModule.shards_of` |
| torch (FSDP2, `parallelize_module`) | the DTensor's own chunks |
| Megatron-core, Transformers | `parameters/foreign.py` |

A rank holds one box, or several of a Megatron-core parameter with a stride. A sharded optimizer
holds a range of a parameter's elements: in n dims these are up to 2 n - 1 boxes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from commgrid.errors import SpecError
from commgrid.layout.box import Box, Shape, boxes_of_range, common
from commgrid.parameters.foreign import ForeignCut
from commgrid.parameters.placement import Placement
from commgrid.resharding.layouts import Form


@dataclass(frozen=True)
class Item:
    """A tensor, or this rank's boxes of it.

    Args:
        path: its name.
        shape: of the full tensor.
        chunks: this rank's boxes.
        dtype: of the numbers.
        writes: whether this rank writes its boxes, or checks them as it reads; False: a rank with
            copies of them does.
        repeats: whether several stages may have it, equal ones, without saying so.
        copies: axes along which ranks should have equal boxes, of which one writes.
        shared: stages that have copies too, as of tied embeddings.
        own: of a tensor that ranks each have of their own; None: it is one for all.
    """

    path: Path
    shape: Shape
    chunks: list[Chunk]
    dtype: torch.dtype
    writes: bool = True
    repeats: bool = False
    copies: tuple[str, ...] = ()
    shared: ProcessGroup | None = None
    own: Own | None = None

    @property
    def key(self) -> str:
        """The name in the checkpoint."""
        return key_of(self.path)

    @property
    def form(self) -> Form:
        """Its full shape and dtype."""
        return Form.of(self.shape, self.dtype)

    def fitted(self, stored: Shape) -> tuple[Item, Callable[[], None] | None]:
        """The item to read where ranks each have their own, and what to do when it is read.

        Args:
            stored: shape of the tensor that is read.

        Raises:
            SpecError: it is of another number of ranks, and no `merge` makes them one.
        """
        if self.own is None or tuple(stored) == self.shape:
            return self, None
        each, chunks = self.shape, self.chunks
        if self.own.is_stacked:
            each, chunks = each[1:], [Chunk(c.offset[1:], c.data[0]) for c in chunks]
        if tuple(stored) == each:  # one for all
            return replace(self, shape=each, chunks=chunks), None
        if tuple(stored[1:]) != each:
            return self, None
        return self._merged(each, chunks, stored[0], self.own)

    def _merged(
        self, each: Shape, chunks: list[Chunk], count: int, own: Own
    ) -> tuple[Item, Callable[[], None]]:
        if own.merge is None:
            raise SpecError(
                f"{self.key} is of {count} ranks, each of which had its own, and here of "
                f"{self.shape[0] if own.is_stacked else 1}; say with mark_buffers(…, merge=) how "
                "they become one, or leave it out"
            )
        for chunk in chunks:
            refuse_unwritable(self.key, chunk.data)
        made = [Chunk((0, *c.offset), c.data.new_empty((count, *c.data.shape))) for c in chunks]

        def merge() -> None:
            for chunk, read in zip(chunks, made, strict=True):
                chunk.data.copy_(_MERGES[own.merge](read.data))

        return replace(self, shape=(count, *each), chunks=made), merge

    def without_padding(self, rows: int) -> Item:
        """The first entries along dim 0 alone."""
        shape = true_shape(self.path[-1], self.shape, rows)
        kept = [(c, min(max(rows - c.offset[0], 0), c.data.shape[0])) for c in self.chunks]
        chunks = [Chunk(c.offset, c.data.narrow(0, 0, count)) for c, count in kept if count]
        return replace(self, shape=shape, chunks=chunks)

    def staged(self, dtype: torch.dtype | None = None) -> Item:
        """The same boxes with memory of their own, on the CPU, to be read into, and then taken."""
        for chunk in self.chunks:
            refuse_unwritable(self.key, chunk.data)
        return self.empty(dtype, "cpu")

    def empty(
        self, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> Item:
        """The same boxes with contiguous memory of their own, without numbers.

        Args:
            dtype, device: None: as they are.
        """
        form = torch.contiguous_format  # whatever the strides are, as messages go into it
        made = partial(torch.empty_like, dtype=dtype, device=device, memory_format=form)
        chunks = [Chunk(chunk.offset, made(chunk.data)) for chunk in self.chunks]
        return replace(self, chunks=chunks, dtype=dtype or self.dtype)

    def take(self, staged: Item) -> None:
        """Copies what was read."""
        for mine, read in zip(self.chunks, staged.chunks, strict=True):
            mine.data.copy_(read.data)


@dataclass(frozen=True)
class Own:
    """How ranks along some axes have a tensor of their own each.

    Args:
        merge: how those of another number of ranks become one, as `mark_buffers` takes it.
        is_stacked: whether there are several ranks, whose tensors are stacked along a first dim.
    """

    merge: str | None
    is_stacked: bool


_MERGES: dict[str | None, Callable[[Tensor], Tensor]] = {
    "mean": lambda stacked: stacked.double().mean(0),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
}


@dataclass(frozen=True)
class Value:
    """Anything else, pickled.

    Args:
        path: its name.
        value: anything that can be pickled, once where many names have it; None where it is to be
            read.
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


class Chunk(NamedTuple):
    """A box of a full tensor.

    Args:
        offset: of its first element in the full tensor.
        data: this rank's tensor of it, of the box's size; writing to it sets what it is a view of.
    """

    offset: Shape
    data: Tensor

    @property
    def box(self) -> Box:
        """Its offset and size."""
        return tuple(self.offset), tuple(self.data.shape)

    @property
    def stored(self) -> ChunkStorageMetadata:
        """The box as torch's metadata has it."""
        return ChunkStorageMetadata(torch.Size(self.offset), torch.Size(self.data.shape))


@dataclass(frozen=True)
class HeldBoxes:
    """The boxes of a full parameter that this rank has.

    Args:
        shape: of the full parameter.
        held: of this rank's tensor, which where slices are padded reaches beyond `shape`.
        boxes: of this rank's tensor, each with its offset in the full parameter.
    """

    shape: Shape
    held: Shape
    boxes: tuple[tuple[Box, Shape], ...]

    @property
    def is_first(self) -> bool:
        """Whether this rank's part begins where the parameter does."""
        return not any(self.boxes[0][1])

    def chunks(self, data: Tensor, start: int = 0, stop: int | None = None) -> list[Chunk]:
        """The boxes of a tensor that holds elements start … stop - 1 of this rank's part.

        Args:
            data: of as many elements, in their order.
            start, stop: None: all of this rank's part.
        """
        local = local_part(data)
        if not math.prod(self.shape):
            return [Chunk(self.boxes[0][1], local)]
        found = []
        for split, part in _split(local, start, stop, self.held):
            for own, place in self.boxes:
                both = common((split, tuple(part.shape)), own)
                if both is None:
                    continue
                piece = part
                for dim, (begin, size) in enumerate(zip(*both, strict=True)):
                    piece = piece.narrow(dim, begin - split[dim], size)
                where = tuple(p + b - o for p, b, o in zip(place, both[0], own[0], strict=True))
                for dim, (begin, whole) in enumerate(zip(where, self.shape, strict=True)):
                    piece = piece.narrow(dim, 0, min(max(whole - begin, 0), piece.shape[dim]))
                if piece.numel():
                    found.append(Chunk(where, piece))
        return found


def held_boxes(placement: Placement, foreign: ForeignCut | None = None) -> HeldBoxes:
    """The boxes of a parameter that this rank has.

    Args:
        placement: the parameter, which may be a DTensor, such as FSDP2 makes of it.
        foreign: how another library's layer has cut it.

    Raises:
        SpecError: a DTensor of several chunks.
    """
    parameter = placement.parameter
    if foreign is not None:
        held = tuple(parameter.shape)
        return HeldBoxes(foreign.full_shape(held), held, foreign.boxes(held))
    offset, held = [0] * parameter.dim(), tuple(parameter.shape)
    if isinstance(parameter, DTensor):
        refuse_partial(placement.name, parameter)
        chunks = parameter.__create_chunk_list__()  # type: ignore[no-untyped-call]
        if len(chunks) != 1:
            raise SpecError(
                f"{placement.name} is a DTensor with placements {parameter.placements}, which has "
                f"{len(chunks)} chunks on this rank; expected one"
            )
        offset, held = list(chunks[0].offsets), tuple(chunks[0].sizes)
    for dim, group in placement.shards:  # FSDP cuts what a layer has cut
        offset[dim] += group.rank * parameter.shape[dim]
    whole = (0,) * len(held), held
    return HeldBoxes(placement.shape, held, ((whole, tuple(offset)),))


def true_shape(name: str, shape: Shape, rows: int) -> Shape:
    """A tensor's shape without its padding.

    Args:
        rows: how many entries along dim 0 are no padding.

    Raises:
        SpecError: it has fewer.
    """
    if not shape or shape[0] < rows:
        raise SpecError(
            f"padded= has {rows} for {name}, which has shape {tuple(shape)}; expected how many of "
            "its entries along dim 0 are no padding"
        )
    return (rows, *shape[1:])


def refuse_partial(name: str, tensor: DTensor) -> None:
    """Refuse a DTensor whose ranks have parts of a sum."""
    if any(placement.is_partial() for placement in tensor.placements):
        raise SpecError(
            f"{name} is a DTensor with placements {tensor.placements}, parts of a sum; "
            "redistribute it to Shard or Replicate first"
        )


def refuse_unreadable(name: str, tensor: Tensor) -> None:
    """Refuse a tensor without numbers, or whose memory does not hold its numbers plainly."""
    told = ""
    if is_lazy(tensor):
        told = "has no shape yet; run the model once, so that lazy modules take theirs"
    elif tensor.is_meta:
        told = "is on the meta device, without numbers; call to_empty(device=…) first"
    elif tensor.is_quantized or tensor.layout != torch.strided or tensor.is_nested:
        kind = tensor.dtype if tensor.is_quantized else tensor.layout
        told = f"is {kind}; keep its numbers and scales or indices as plain tensors, in buffers"
    elif str(tensor.dtype).endswith("_x2"):
        told = f"is {tensor.dtype}, two numbers a byte; keep it as its view(torch.uint8)"
    elif hasattr(tensor.data, "__tensor_flatten__") and not isinstance(tensor, DTensor):
        told = (
            f"is a {type(tensor.data).__name__}, whose numbers are in inner tensors; save and move "
            "the weights before they are wrapped, or keep the inner tensors as buffers"
        )
    if told:
        shape = "" if is_lazy(tensor) else f" of shape {tuple(tensor.shape)}"
        raise SpecError(f"{name}{shape} has no plain numbers: it {told}")


def refuse_unwritable(name: str, tensor: Tensor) -> None:
    """Refuse a target that torch does not write, or whose elements share memory."""
    told = ""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        told = (
            "it was made in torch.inference_mode(), and this is outside of it; call this within "
            "it, too, or make the model under torch.no_grad()"
        )
    elif _overlaps_itself(tensor):
        told = "elements of it are one in memory, as expand() makes them; give a clone() of it"
    if told:
        raise SpecError(f"{name} of shape {tuple(tensor.shape)} cannot be written: {told}")


def _overlaps_itself(tensor: Tensor) -> bool:
    steps = [(step, n) for step, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1]
    reach, is_plain = 0, True
    for step, count in sorted(steps) if tensor.numel() else ():
        if not step:
            return True
        is_plain = is_plain and step > reach
        reach += step * (count - 1)
    if is_plain:
        return False
    places = torch.zeros((), dtype=torch.int64)
    for step, count in steps:
        places = places.unsqueeze(-1) + step * torch.arange(count)
    return len({*places.flatten().tolist()}) < tensor.numel()


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor, without its graph and as a plain tensor."""
    data = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    return data if type(data) is Tensor else data.as_subclass(Tensor)


def _split(
    data: Tensor, start: int, stop: int | None, shape: Shape
) -> Iterator[tuple[Shape, Tensor]]:
    """The boxes of this rank's tensor that a range of its elements has, with their offsets."""
    if stop is None:
        yield (0,) * len(shape), data.reshape(shape)
        return
    flat, done = data.reshape(-1), 0
    for offset, size in boxes_of_range(start, stop, shape):
        count = math.prod(size)
        yield offset, flat[done : done + count].view(size)
        done += count


Path = tuple[str, ...]
"""A name in the nested dict that torch's readers make of a checkpoint: ("model", "norm.weight")."""
