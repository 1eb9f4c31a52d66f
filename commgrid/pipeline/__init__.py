"""Pipeline parallelism: schedules as data, a simulator for them, and what runs them.

The schedules, the simulator and the partition are arithmetic; only what runs them imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from commgrid.pipeline.exchange import Exchange, programs
from commgrid.pipeline.partition import partition_layers
from commgrid.pipeline.schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Recv,
    Schedule,
    Send,
    forward_only,
    gpipe,
    interleaved,
    make_schedule,
    one_f_one_b,
    zb_h1,
)
from commgrid.pipeline.simulator import Simulation, Times, simulate

if TYPE_CHECKING:
    from commgrid.pipeline.p2p import StageLinks
    from commgrid.pipeline.runner import Pipeline

__all__ = [
    "Backward",
    "BackwardInput",
    "BackwardWeight",
    "Exchange",
    "Forward",
    "Pipeline",
    "Recv",
    "Schedule",
    "Send",
    "Simulation",
    "StageLinks",
    "Times",
    "forward_only",
    "gpipe",
    "interleaved",
    "make_schedule",
    "one_f_one_b",
    "partition_layers",
    "programs",
    "simulate",
    "zb_h1",
]

_LIVE = {"Pipeline": "commgrid.pipeline.runner", "StageLinks": "commgrid.pipeline.p2p"}


def __getattr__(name: str) -> Any:
    if name not in _LIVE:
        raise AttributeError(f"module 'commgrid.pipeline' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LIVE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LIVE})
