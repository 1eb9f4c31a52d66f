"""Layout of each parameter of a model on the grid: sliced, replicated, or with partial gradients.

Gradient reduction, norms, sharded optimizers and checkpoints all read it here, so that a layer
declares it once.
"""

import commgrid.parameters.ddp  # noqa: F401  checks DistributedDataParallel
from commgrid.parameters.foreign import Foreign, foreign_slice
from commgrid.parameters.layout import Distinct, ParameterLayout, layout_of
from commgrid.parameters.marks import Mark, mark_parameters
from commgrid.parameters.placement import Placement, own_slice, placements
from commgrid.parameters.sharded_module import ShardedModule

__all__ = [
    "Distinct",
    "Foreign",
    "Mark",
    "ParameterLayout",
    "Placement",
    "ShardedModule",
    "foreign_slice",
    "layout_of",
    "mark_parameters",
    "own_slice",
    "placements",
]
