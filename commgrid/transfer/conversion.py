"""Conversions: other forms in which a source sends its tensors, such as fp8 with block scales.

A conversion computes block by block of the full tensor, wherever this is cut. A rank converts the
blocks that it holds; where a cut splits a block, the rank with the first element gets the rest:

    full (5, …), blocks of 2 rows     rank 0 holds rows 0, 1, 2      rank 1 holds rows 3, 4
                                      converts 0, 1 and 2, 3         converts 4
                                               row 3  ◄────────────  sends row 3
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from commgrid.errors import SpecError, TransferError
from commgrid.layout.box import Box, Shape
from commgrid.transfer.models import Names, Only

Function = Callable[[str, Tensor], Tensor | Mapping[str, Tensor]]


@dataclass(frozen=True)
class Convert:
    """A function of the tensors that are sent.

    Args:
        function: called as `function(name, tensor)` with the target's name of a tensor, on its
            device; returns another tensor, or several by name. A tensor that it returns itself is
            not converted. It must not write to the tensor.
        block: the size of the blocks that it computes by themselves, of the last dims; dims before
            them are cut anywhere. `(1,)` is every element by itself, None in it a whole dim. None:
            the whole tensor. Along a dim a result has an element for each element, or one for
            each block.
        only: patterns of names, or a function of one; None: all.

    Raises:
        SpecError: a block of something else.

    Example:
        >>> plus_one = Convert(lambda name, norm: norm + 1, block=(1,), only=["*norm.weight"])
        >>> plus_one.blocks((4, 6)), Convert(plus_one.function, block=(None, 4)).blocks((4, 6))
        ((1, 1), (4, 4))
    """

    function: Function
    block: Sequence[int | None] | None = None
    only: Only | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise SpecError(f"convert={self.function!r}: expected a function of name and tensor")
        if self.block is not None and not (
            isinstance(self.block, tuple | list)
            and all(size is None or (type(size) is int and size > 0) for size in self.block)
        ):
            raise SpecError(
                f"block={self.block!r}: expected whole numbers from 1, of the last dims, or None "
                "for a whole dim, as (128, 128)"
            )
        if self.only is not None and not callable(self.only):
            given = (self.only,) if isinstance(self.only, str) else tuple(self.only)
            object.__setattr__(self, "only", given)
        Names(None, self.only)  # which checks the patterns

    def takes(self, name: str) -> bool:
        """Whether it is for a tensor of this name."""
        return Names(None, self.only).has(name)

    def patterns(self, names: Collection[str]) -> dict[str, bool]:
        """Its patterns, and whether each takes one of some names."""
        given = () if self.only is None or callable(self.only) else self.only
        return {one: any(Names(None, [one]).has(name) for name in names) for one in given}

    def blocks(self, shape: Shape) -> Shape:
        """The size of a block in each dim of a tensor of this shape."""
        dims = len(shape)
        given = [None] * dims if self.block is None else [*[1] * dims, *self.block]
        sizes = zip(given[len(given) - dims :], shape, strict=True)
        return tuple(min(block or size, size) for block, size in sizes)


_FP8 = (
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
)  # fmt: skip
Conversion = Convert | Function | Sequence["Convert | Function"]


class Fp8Blocks(Convert):
    """Matrices as float8 with a scale for each block, as DeepSeek-V3's checkpoints have them.

    `weight` becomes `weight`, each block divided by its scale, and `weight_scale_inv` in fp32, by
    which an engine multiplies. A block's largest number becomes the largest of float8. Tensors of
    one dim stay as they are; of more than two dims, as of stacked experts, the last two are blocks.

    Args:
        block: rows and columns of a block.
        only: patterns of names, or a function of one; None: all.
        dtype: torch.float8_e4m3fn, torch.float8_e5m2 or the `fnuz` form of these.

    Raises:
        SpecError: another block or dtype.
    """

    def __init__(
        self,
        block: Sequence[int | None] = (128, 128),
        only: Only | None = None,
        dtype: torch.dtype = torch.float8_e4m3fn,
    ) -> None:
        if not isinstance(block, tuple | list) or len(block) != 2:
            raise SpecError(f"block={block!r}: expected rows and columns of a block, as (128, 128)")
        if dtype not in _FP8:
            raise SpecError(f"dtype={dtype}: expected float8 numbers, as torch.float8_e4m3fn")
        super().__init__(partial(_quantized, block, dtype), block, only)


def _quantized(
    block: Sequence[int | None], dtype: torch.dtype, name: str, tensor: Tensor
) -> Tensor | Mapping[str, Tensor]:
    if tensor.dim() < 2 or not tensor.is_floating_point():
        return tensor
    rows, columns = tensor.shape[-2:]
    height, width = block[0] or rows, block[1] or columns
    padded = torch.nn.functional.pad(tensor.float(), (0, -columns % width, 0, -rows % height))
    blocks = padded.reshape(
        *tensor.shape[:-2], padded.shape[-2] // height, height, padded.shape[-1] // width, width
    )
    limits, scaled = torch.finfo(torch.float32), torch.finfo(dtype).max
    largest = blocks.abs().amax((-3, -1), keepdim=True)
    scales = torch.where(largest == 0, 1.0, largest / scaled).clamp(min=limits.smallest_normal)
    numbers = (blocks / scales).to(dtype).view(padded.shape)[..., :rows, :columns]
    return {name: numbers, f"{name}_scale_inv": scales.squeeze((-3, -1))}


def conversions(given: Any) -> tuple[Convert, ...]:
    """The conversions of a transfer's argument: a function, a `Convert`, or several."""
    if given is None:
        return ()
    several = given if isinstance(given, tuple | list) else (given,)
    return tuple(one if isinstance(one, Convert) else Convert(one) for one in several)


@dataclass(frozen=True)
class _Output:
    """One result of a conversion.

    Args:
        dtype: of its numbers.
        shape: of the full one.
        steps: elements of the tensor for each of its own, in each dim; None: it has all of the dim.
    """

    dtype: torch.dtype
    shape: Shape
    steps: tuple[int | None, ...]

    def box(self, box: Box) -> Box:
        """Its box that is made of one of the tensor, of whole blocks."""
        if len(box[0]) != len(self.shape):  # of the whole tensor
            return (0,) * len(self.shape), self.shape
        offset, size = [], []
        for begin, count, full, step in zip(*box, self.shape, self.steps, strict=True):
            offset.append(0 if step is None else begin // step)
            size.append(full if step is None else -(-count // step))
        return tuple(offset), tuple(size)


@dataclass(frozen=True)
class Converted:
    """A tensor that is converted.

    Args:
        name: the target's, before.
        shape: of the full tensor.
        how: what converts it.
        outputs: results, by name.
    """

    name: str
    shape: Shape
    how: Convert
    outputs: Mapping[str, _Output]

    def pieces(self, box: Box) -> Iterator[tuple[Box, bool]]:
        """The blocks whose first elements are in a box, as boxes; and whether all of them are."""
        dims = []
        for *place, block, full in zip(*box, self.how.blocks(self.shape), self.shape, strict=True):
            begin, end = place[0], sum(place)
            first = -(-begin // block) * block
            last = end if end == full else end // block * block
            dims.append([(first, last, True)] if first < last else [])
            if begin <= last < end:
                dims[-1].append((last, min(last + block, full), False))
        for parts in product(*dims):
            offset = tuple(begin for begin, _, _ in parts)
            size = tuple(end - begin for begin, end, _ in parts)
            yield (offset, size), all(inside for _, _, inside in parts)

    def made_of(self, tensor: Tensor) -> dict[str, Tensor]:
        """The results for some blocks.

        Raises:
            TransferError: other names, shapes or dtypes than it made of the first block.
        """
        made = _by_name(self.name, self.how.function(self.name, tensor))
        start, shape = (0,) * tensor.dim(), tuple(tensor.shape)
        told = _described((name, tuple(one.shape), one.dtype) for name, one in made.items())
        expected = _described(
            (name, output.box((start, shape))[1], output.dtype)
            for name, output in self.outputs.items()
        )
        if told != expected:
            raise TransferError(
                f"convert= made {told} of a part of shape {shape} of {self.name}; expected "
                f"{expected}, as of one block. Names, shapes and dtypes may not depend on numbers"
            )
        return made


def _described(tensors: Iterable[tuple[str, Shape, torch.dtype]]) -> str:
    return " and ".join(
        sorted(
            f"{name} of shape {shape} and {str(dtype).removeprefix('torch.')}"
            for name, shape, dtype in tensors
        )
    )


def tried(
    how: Convert, name: str, shape: Shape, dtype: torch.dtype, device: torch.device
) -> Converted | None:
    """Try a conversion on a block of ones; None: it does not convert the tensor."""
    blocks = how.blocks(shape)
    block = torch.ones(blocks, dtype=dtype, device=device)
    given = how.function(name, block)
    if not torch.equal(block, torch.ones_like(block)):
        raise SpecError(
            f"convert= writes to the tensor {name} that it is given, which is the model's; return "
            "a new one"
        )
    if given is block:
        return None
    outputs = {}
    for output, made in _by_name(name, given).items():
        sizes = tuple(made.shape)
        if blocks == shape:
            outputs[output] = _Output(made.dtype, sizes, (None,) * len(sizes))
            continue
        if len(sizes) != len(shape) or not all(
            one in (size, 1) or size == full
            for one, size, full in zip(sizes, blocks, shape, strict=True)
        ):
            raise SpecError(
                f"convert= made {output} of shape {sizes} of a block {blocks} of {name}; expected "
                "in each dim as many elements, or 1; block=None gives it whole tensors"
            )
        steps = tuple(
            None if size == full else 1 if one == size else size
            for one, size, full in zip(sizes, blocks, shape, strict=True)
        )
        whole = tuple(
            one if step is None else -(-full // step)
            for one, step, full in zip(sizes, steps, shape, strict=True)
        )
        outputs[output] = _Output(made.dtype, whole, steps)
    return Converted(name, shape, how, outputs)


def _by_name(name: str, given: Any) -> dict[str, Tensor]:
    """The tensors that a conversion returned."""
    made = {name: given} if isinstance(given, Tensor) else given
    if (
        not isinstance(made, Mapping)
        or not made
        or not all(isinstance(one, Tensor) for one in made.values())
    ):
        raise SpecError(
            f"convert= returned {type(given).__name__} for {name}; expected a tensor, or tensors "
            "by name"
        )
    return {**made}
