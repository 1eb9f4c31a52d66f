"""Numbers of values that are no tensors, equal where the values are, so that ranks compare them."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from commgrid.equality.digest import MANTISSA, bits_of, digest

_FEW = 8  # elements, such as an optimizer's step, which take less time than their digest


def number_of(value: Any) -> Tensor:
    """Return a number that is the same on ranks with equal values, and else another.

    Numbers, texts, bytes and tensors are compared, and lists, dicts and sets of these. Anything
    else counts as equal, since objects may be equal and pickle to different bytes.

    Returns:
        An int64 tensor of shape () on the CPU.
    """
    found = sha256("".join(_words(value)).encode()).digest()
    return torch.tensor(int.from_bytes(found[:8], "big", signed=True))


def numbers_of(values: Mapping[str, Any] | None) -> dict[str, int]:
    """Return the number of each value."""
    return {key: int(number_of(value)) for key, value in (values or {}).items()}


def exact_number_of(value: Any) -> float:
    """As `number_of`, but exact in fp64."""
    return float(int(number_of(value)) & MANTISSA)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor within lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, list | tuple | deque | set):
        for each in value:
            yield from tensors_in(each)


def _words(value: Any) -> Iterable[str]:
    """A text for each equal value."""
    match value:
        case None | bool() | str() | bytes():
            yield repr(value)
        case int() | float():
            yield repr(value + 0.0 if abs(value) < 2**53 else value)  # 1 is 1.0, and -0.0 is 0.0
        case complex():
            yield repr(value)
        case io.BytesIO():
            yield repr(value.getvalue())
        case Tensor():
            held = _local(value)
            bits = bits_of(held).tolist() if held.numel() <= _FEW else int(digest(held))
            yield f"{value.dtype} {tuple(value.shape)} {bits}"
        case list() | tuple() | deque():
            yield "["
            for each in value:
                yield from (*_words(each), ",")
            yield "]"
        case Mapping():
            pairs = (("".join(_words(key)), "".join(_words(each))) for key, each in value.items())
            yield repr(sorted(pairs))
        case set() | frozenset():
            yield repr(sorted("".join(_words(each)) for each in value))
        case _ if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            plain = value.tolist()  # a longdouble's is itself
            yield repr(value) if type(plain) is type(value) else "".join(_words(plain))
        case _:
            yield type(value).__qualname__


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
