"""Pipeline parallelism: schedules as data, a simulator for them, and their execution.

The schedules, the simulator and the partition are arithmetic; only the execution imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from commgrid.on_demand import on_demand
from commgrid.pipeline_schedules.messages import Exchange, programs
from commgrid.pipeline_schedules.partition import partition_layers
from commgrid.pipeline_schedules.schedule import (
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
from commgrid.pipeline_schedules.simulator import Simulation, Times, simulate

if TYPE_CHECKING:
    from commgrid.pipeline.p2p import StageLinks
    from commgrid.pipeline.stage import Pipeline

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

_LIVE = {
    "commgrid.pipeline.p2p": ("StageLinks",),
    "commgrid.pipeline.stage": ("Pipeline",),
}  # fmt: skip

__getattr__, __dir__ = on_demand(globals(), _LIVE)
