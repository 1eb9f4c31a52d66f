"""Bridges: activations from one grid to another and their gradients back, as a layer.

The plan is arithmetic; only what runs it imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commgrid.bridge.layer import Bridge
    from commgrid.bridge.pipelines import split_schedule
    from commgrid.bridge.sides import Cut

__all__ = ["Bridge", "Cut", "split_schedule"]

_WHERE = {"Bridge": "layer", "Cut": "sides", "split_schedule": "pipelines"}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"commgrid.bridge.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
