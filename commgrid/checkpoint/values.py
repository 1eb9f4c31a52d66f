"""Values beside tensors: comparing them between ranks, and naming those of a single rank."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from commgrid.equality.digest import digest
from commgrid.parameters.boxes import local_part
from commgrid.resharding.items import Path, Shared

if TYPE_CHECKING:
    from commgrid.runtime.grid import HyperCommGrid

OWN = "extra_per_rank"


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


def _words(value: Any) -> Iterable[str]:
    """A text for each equal value."""
    match value:
        case Shared():
            yield from _words(value.value)
        case None | bool() | str() | bytes():
            yield repr(value)
        case int() | float():
            yield repr(value + 0.0 if abs(value) < 2**53 else value)  # 1 is 1.0, and -0.0 is 0.0
        case complex():
            yield repr(value)
        case io.BytesIO():
            yield repr(value.getvalue())
        case Tensor():
            yield f"{value.dtype} {tuple(value.shape)} {int(digest(local_part(value)))}"
        case list() | tuple():
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


def own_path(grid: HyperCommGrid) -> Path:
    """Return the name of a rank's own values, with its coordinates: `dp=1 tp=0`."""
    coordinate = grid.spec.layout("dense").coordinate(grid.rank)
    return OWN, " ".join(f"{axis}={place}" for axis, place in coordinate.items())


def offered(keys: Iterable[str], grid: HyperCommGrid) -> list[Path]:
    """Return the names of the old ranks' own values that this rank is offered.

    On an axis of n ranks, the rank at coordinate i is offered the values of old ranks at i, i + n,
    i + 2 n and so on. So each old rank's values are offered to exactly one new rank.

    Args:
        keys: of a checkpoint.
        grid: that loads.

    Returns:
        Paths, sorted by the old ranks' coordinates.
    """
    mine = grid.spec.layout("dense").coordinate(grid.rank)
    shape = grid.spec.layout("dense").shape
    found = []
    for key in keys:
        first, _, said = key.partition(".")
        if first != OWN:
            continue
        places = {axis: int(place) for axis, _, place in (p.partition("=") for p in said.split())}
        axes = {*mine, *places}
        if all(places.get(a, 0) % shape.get(a, 1) == mine.get(a, 0) for a in axes):
            found.append(([*places.values()], (OWN, said)))
    return [path for _, path in sorted(found)]
