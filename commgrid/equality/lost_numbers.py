"""Lost numbers: numbers that become infinite, or zero, in a narrower dtype."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain

import torch
from torch import Tensor

from commgrid.errors import CheckpointError, CommGridError, GridMismatchError

_MOST = 1000
"""One number in so many may become zero."""
_BLOCK = 1 << 16  # numbers at once, which stay in a CPU's cache


@dataclass(frozen=True)
class Lost:
    """Counts of numbers of one tensor.

    Args:
        dtype: of the target, as torch names it.
        overflowed: how many would be infinite.
        vanished: how many others would be zero.
        total: how many the whole tensor has.
        is_copy: whether another rank counts the same numbers for all.
    """

    dtype: str
    overflowed: int
    vanished: int
    total: int
    is_copy: bool = False

    def __add__(self, other: Lost) -> Lost:
        """The counts of two parts of a tensor."""
        overflowed, vanished = self.overflowed + other.overflowed, self.vanished + other.vanished
        return Lost(self.dtype, overflowed, vanished, self.total)


@cache
def narrows(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a dtype has a smaller range than another; False where one is of whole numbers."""
    both = [dtype.to_real() if dtype.is_complex else dtype for dtype in (source, target)]
    if not all(dtype.is_floating_point for dtype in both):
        return False
    one, other = map(torch.finfo, both)
    return other.max < one.max or other.smallest_normal * other.eps > one.smallest_normal * one.eps


@torch.no_grad()
def lost_numbers(tensor: Tensor, dtype: torch.dtype, total: int) -> Lost:
    """Count the numbers of a tensor that a dtype does not hold.

    Args:
        tensor: of which `total` numbers are all; of complex ones each part counts.
        dtype: that it is going to have.
    """
    name = str(dtype).removeprefix("torch.")
    if tensor.is_complex():
        tensor, dtype, total = torch.view_as_real(tensor), dtype.to_real(), 2 * total
    if not tensor.numel() or not narrows(tensor.dtype, dtype):
        return Lost(name, 0, 0, total)
    limits = torch.finfo(dtype)
    smallest = limits.smallest_normal * limits.eps
    wide = tensor.dtype if tensor.dtype.itemsize > 4 else torch.float32  # holds the limits
    overflowed = vanished = 0
    block = _BLOCK if tensor.device.type == "cpu" else 64 * _BLOCK
    for some in torch.split(tensor.reshape(-1), block):
        sizes = some.to(wide).abs()
        least, most = sizes.aminmax()
        if least >= smallest and most <= limits.max:  # as weights nearly always are
            continue
        doubtful = sizes[((sizes < smallest) & (sizes != 0)) | ~(sizes <= limits.max)]
        held = doubtful.to(dtype).to(doubtful.dtype)
        overflowed += int((doubtful.isfinite() & ~held.isfinite()).sum())
        vanished += int((held == 0).sum())
    return Lost(name, overflowed, vanished, total)


def summed(counts: Iterable[tuple[str, Lost]]) -> dict[str, Lost]:
    """The counts of tensors, by name, from those of their parts."""
    found: dict[str, Lost] = {}
    for name, lost in counts:
        found[name] = found[name] + lost if name in found else lost
    return found


def lost_by_all(told: Iterable[Iterable[tuple[str, Lost]]]) -> dict[str, Lost]:
    """The sums of all ranks' counts, which are refused for other than a few.

    Those of copies stand where the ranks that count for all have no overflow.
    """
    counts = [*chain.from_iterable(told)]
    found = summed(one for one in counts if not one[1].is_copy)
    for name, lost in counts:
        if lost.is_copy and lost.overflowed and not (name in found and found[name].overflowed):
            found[name] = lost
    refuse_lost(found, CheckpointError, warns=False)
    return found


def refuse_lost(
    found: Mapping[str, Lost], kind: type[CommGridError] = GridMismatchError, warns: bool = True
) -> None:
    """Refuse a conversion that loses numbers; warn where few are lost.

    Args:
        found: by name; those of which a target holds all may be among them.
        kind: of the error.
        warns: False: another call does.

    Raises:
        CommGridError: some overflow, or a thousandth of a tensor's or more become zero.
    """
    for name, lost in found.items():
        if lost.overflowed:
            raise kind(
                f"{name}: {lost.overflowed} of {lost.total} numbers are too large for "
                f"{lost.dtype}; give it a tensor of a wider dtype, or scale them first"
            )
        if lost.vanished * _MOST >= lost.total > 0 and lost.vanished:
            raise kind(
                f"{name}: {lost.vanished} of {lost.total} numbers are too small for {lost.dtype} "
                "and would be zero; give it a tensor of a wider dtype, or scale them first"
            )
    few = [f"{lost.vanished} of {lost.total} of {name}" for name, lost in found.items()
           if lost.vanished]  # fmt: skip
    if few and warns:
        more = f" and of {len(few) - 3} more tensors" if len(few) > 3 else ""
        warnings.warn(
            f"numbers too small for their new dtype became zero: {', '.join(few[:3])}{more}",
            stacklevel=2,
        )
