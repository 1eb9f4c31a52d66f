"""Copies of a rank's state in the host's memory."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from commgrid.parameters.boxes import Chunk
from commgrid.resharding.items import Item, Value
from commgrid.runtime.registry import _registry


class Spares:
    """The memory of the last copy, for the next one: new memory costs more than copying to it."""

    def __init__(self) -> None:
        self._free: dict[_Kind, list[Tensor]] = {}
        self._wanted = True

    def give(self, tensors: Iterable[Tensor]) -> None:
        """Take back tensors that are no longer read; earlier ones are freed."""
        self.clear()
        if not self._wanted:
            return
        for each in tensors:
            self._free.setdefault(_kind_of(each, each.is_pinned()), []).append(each)

    def take(self, like: Tensor, pinned: bool) -> Tensor:
        """Return an uninitialized tensor on the host."""
        self._wanted = True
        free = self._free.get(_kind_of(like, pinned))
        if free:
            return free.pop()
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=pinned)

    def clear(self) -> None:
        """Free all of it."""
        self._free = {}

    def end(self) -> None:
        """Free all of it, and what a save under way gives back, until the next `take`."""
        self._wanted = False
        self.clear()


SPARES = Spares()
"""The memory of the last save in the background, until the next one or `shutdown`."""
_registry.at_shutdown.append(SPARES.end)

_Kind = tuple[torch.Size, torch.dtype, bool]


def _kind_of(tensor: Tensor, pinned: bool) -> _Kind:
    return tensor.shape, tensor.dtype, pinned


def stage(items: Sequence[Item | Value], spares: Spares | None = None) -> list[Item | Value]:
    """Copy items to the host's memory, pinned where they come from a GPU.

    Args:
        items: with the boxes that are copied.
        spares: memory to copy to; what does not fit is freed. None: copy to new memory.

    Returns:
        The same items; their tensors are contiguous, and have storage of their own.
    """
    spares = spares or Spares()
    made: dict[int, Tensor] = {}  # by the original's id: a tensor of several items is copied once
    memo: dict[int, Any] = {}
    found: list[Item | Value] = []
    for item in items:
        if isinstance(item, Value):
            found.append(replace(item, value=copy.deepcopy(item.value, memo)))
        else:
            chunks = [Chunk(c.offset, _on_host(c.data, made, spares)) for c in item.chunks]
            found.append(replace(item, chunks=chunks))
    if any(each.is_pinned() for each in made.values()):
        torch.cuda.current_stream().synchronize()
    spares.clear()
    return found


def tensors_of(staged: Iterable[Item | Value]) -> list[Tensor]:
    """Return the tensors of staged items, each once."""
    chunks = [chunk for item in staged if isinstance(item, Item) for chunk in item.chunks]
    return list({id(chunk.data): chunk.data for chunk in chunks}.values())


def _on_host(tensor: Tensor, made: dict[int, Tensor], spares: Spares) -> Tensor:
    key = id(tensor)
    if key not in made:
        pinned = tensor.device.type == "cuda"
        made[key] = spares.take(tensor, pinned)
        made[key].copy_(tensor, non_blocking=pinned)
    return made[key]
