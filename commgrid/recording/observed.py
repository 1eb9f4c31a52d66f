"""Observed grid: the properties of a grid that the recorder and the live check read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch.distributed as dist

from commgrid.health.detector import Watch


class ObservedGroup(Protocol):
    """A communicator whose calls are recorded."""

    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def group(self) -> dist.ProcessGroup: ...
    @property
    def suspended(self) -> bool: ...


class ObservedGrid(Protocol):
    """A grid whose calls are recorded."""

    @property
    def identity(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def communicators(self) -> Sequence[ObservedGroup]: ...
    @property
    def watch(self) -> Watch | None: ...
    def before_destroy(self, callback: Callable[[], object], /) -> None: ...
