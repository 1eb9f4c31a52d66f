"""Rooms in one piece of memory, which are given back in the order in which they were taken.

░░░░████████░░░░     taken from the left to the right, and from the start again at the end
███░████████░░░░     where there is no room, the oldest has to come back first
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGNED = 64  # bytes: where any element may begin, and a line of a CPU's cache


def aligned(size: int) -> int:
    """The bytes that a buffer of so many takes."""
    return -(-size // _ALIGNED) * _ALIGNED


@dataclass(frozen=True)
class Room:
    """A part of a ring.

    Args:
        start: its first byte.
        buffer: its bytes.
    """

    start: int
    buffer: Tensor


class Ring:
    """Memory that is made at its first use.

    Args:
        size: its bytes.
        device: where it is.

    Example:
        >>> ring = Ring(128, torch.device("cpu"))
        >>> one, other = ring.take(64), ring.take(64)
        >>> ring.take(64) is None
        True
        >>> ring.give_back(one)
        >>> ring.take(64).start
        0
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self._device = size, device
        self._memory: Tensor | None = None
        self._taken: deque[Room] = deque()

    def take(self, size: int) -> Room | None:
        """A room of so many bytes, at most the ring's; None: others have to come back first."""
        start = self._start(size)
        if start is None:
            return None
        if self._memory is None:
            self._memory = torch.empty(self._size, dtype=torch.uint8, device=self._device)
        room = Room(start, self._memory[start : start + size])
        if size:
            self._taken.append(room)
        return room

    def give_back(self, room: Room) -> None:
        """Lets the oldest room be taken again; one of no bytes is none."""
        if len(room.buffer):
            oldest = self._taken.popleft()
            assert oldest is room, "rooms come back in the order in which they were taken"

    def _start(self, size: int) -> int | None:
        if not self._taken or not size:
            return 0
        first, last = self._taken[0].start, self._taken[-1]
        end = last.start + aligned(len(last.buffer))
        if last.start >= first:  # what is taken is one piece: room behind it, or before it
            if end + size <= self._size:
                return end
            return 0 if size <= first else None
        return end if end + size <= first else None
