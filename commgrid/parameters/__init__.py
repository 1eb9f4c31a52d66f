"""Layout of each parameter of a model on the grid: sliced, replicated, or with partial gradients.

Gradient reduction, norms, sharded optimizers and checkpoints all read it here, so that a layer
declares it once.
"""

from torch.optim.optimizer import register_optimizer_step_pre_hook

from commgrid.parameters.foreign import Foreign, foreign_slice
from commgrid.parameters.layout import Distinct, ParameterLayout, layout_of
from commgrid.parameters.marks import Mark, mark_buffers, mark_parameters
from commgrid.parameters.optimizers import (
    check_before_step,
    check_before_unscaling,
    refuse_copying_over_slices,
)
from commgrid.parameters.placement import Placement, own_slice, placements
from commgrid.parameters.sharded_module import REGISTERED, ShardedModule
from commgrid.torch_compat.mesh import BeforeUnscaling, before_ddp

__all__ = [
    "Distinct",
    "Foreign",
    "Mark",
    "ParameterLayout",
    "Placement",
    "ShardedModule",
    "foreign_slice",
    "layout_of",
    "mark_buffers",
    "mark_parameters",
    "own_slice",
    "placements",
]

REGISTERED += [
    lambda: register_optimizer_step_pre_hook(check_before_step),
    lambda: before_ddp(refuse_copying_over_slices),
    lambda: BeforeUnscaling(check_before_unscaling),
]
