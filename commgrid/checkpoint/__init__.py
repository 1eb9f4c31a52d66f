"""Checkpoints that a grid of any shape can load.

    save("runs/7", 20, model, optimizer, extra={"tokens": 81_920})      on all ranks of a grid
    load("runs/7", model, optimizer).step                               on all ranks of any grid

A checkpoint is a folder of torch.distributed.checkpoint's, which its own tools open. Names in it:

| name | holds |
|---|---|
| `model.<parameter>` | the full parameter, in the boxes that ranks had of it; buffers likewise |
| `optimizer.state.<parameter>.<key>` | its state; `master` for half precision's fp32 copy |
| `optimizer.param_groups.<parameter>.<key>` | the options of its group, as torch flattens them |
| `extra.<key>` | what the job adds |
| `extra_per_rank.<place>` | what each rank adds; its place is as in `dp=1 tp=0` |
| `step`, `optimizer_class` | its step; the optimizer's class, of several for each parameter |

A parameter that modules share has the first of its names. It can be opened without commgrid:
`torch.distributed.checkpoint.load` into the unsharded model, or into one sharded otherwise, and
`torch.distributed.checkpoint.format_utils.dcp_to_torch_save` for one file. Megatron-core's
`dist_checkpointing.load` takes its tensors by these names; `export` writes safetensors files.
"""

from __future__ import annotations

from commgrid.checkpoint.loading import Restored, load, steps
from commgrid.checkpoint.memory import forget
from commgrid.checkpoint.safetensors import export
from commgrid.checkpoint.saving import keep, save, wait
from commgrid.checkpoint.values import random_states, set_random_states

__all__ = [
    "Restored", "export", "forget", "keep", "load", "random_states", "save", "set_random_states",
    "steps", "wait",
]  # fmt: skip
