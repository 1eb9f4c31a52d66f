"""Bridges: activations from one grid to another and their gradients back, as a layer.

The plan is arithmetic; only what runs it imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from commgrid.on_demand import on_demand

if TYPE_CHECKING:
    from commgrid.bridge.bridge import Bridge
    from commgrid.bridge.pipelines import split_schedule
    from commgrid.bridge.sides import Cut

__all__ = ["Bridge", "Cut", "split_schedule"]

_LIVE = {
    "commgrid.bridge.bridge": ("Bridge",),
    "commgrid.bridge.pipelines": ("split_schedule",),
    "commgrid.bridge.sides": ("Cut",),
}  # fmt: skip

__getattr__, __dir__ = on_demand(globals(), _LIVE)
