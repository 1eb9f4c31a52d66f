"""Products of int8 matrices, for which processors have instructions of their own."""

from __future__ import annotations

import platform
from functools import cache

import torch
from torch import Tensor


@cache
def has_quick_products(device: torch.device) -> bool:
    """Return whether `products` are quicker there than sums of 64-bit integers."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    has_library: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return device.type == "cpu" and is_x86 and has_library


def products(rows: Tensor, columns: Tensor) -> Tensor:
    """Multiply matrices of int8 numbers.

    Args:
        rows: of shape (n, k).
        columns: of shape (k, m).

    Returns:
        An int32 tensor of shape (n, m).
    """
    return torch._int_mm(rows, columns)
