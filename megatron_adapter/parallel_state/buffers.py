"""The memory that Megatron's layers reuse for gathered activations."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch

from megatron_adapter.parallel_state.access import peek, read, write


class GlobalMemoryBuffer:
    """Tensors by name and dtype, kept and handed out again while they are large enough."""

    def __init__(self) -> None:
        self.buffer: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get_tensor(
        self,
        tensor_shape: Iterable[int],
        dtype: torch.dtype,
        name: str,
        mem_alloc_context: Any = None,
    ) -> torch.Tensor:
        """A tensor of this shape, without set contents; the same memory for the same name."""
        shape = tuple(tensor_shape)
        needed = math.prod(shape)
        kept = self.buffer.get((name, dtype))
        if kept is None or kept.numel() < needed:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            with (mem_alloc_context or nullcontext)():
                kept = torch.empty(needed, dtype=dtype, device=device, requires_grad=False)
            self.buffer[name, dtype] = kept
        return kept[:needed].view(shape)


def get_global_memory_buffer() -> Any:
    """The buffer of the grid that is asked; made at the first call."""
    if peek("_DATA_PARALLEL_GROUP") is not None and peek("_GLOBAL_MEMORY_BUFFER") is None:
        write("_GLOBAL_MEMORY_BUFFER", GlobalMemoryBuffer())
    return read("_GLOBAL_MEMORY_BUFFER", "global memory buffer")


def destroy_global_memory_buffer() -> None:
    """Gives the buffer's memory back."""
    write("_GLOBAL_MEMORY_BUFFER", None)


def get_global_symmetric_memory_buffer() -> Any:
    """The buffer of megatron-core's inference, which an installed megatron-core makes itself."""
    return read("_GLOBAL_SYMMETRIC_MEMORY_BUFFER", "global symmetric memory buffer")


def destroy_global_symmetric_memory_buffer() -> None:
    """Gives that buffer's memory back."""
    write("_GLOBAL_SYMMETRIC_MEMORY_BUFFER", None)
