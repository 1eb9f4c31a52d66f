"""Layout of each parameter of a model on the grid: sliced, replicated, or with partial gradients.

Gradient reduction, norms, sharded optimizers and checkpoints all read it here, so that a layer
declares it once.
"""

from commgrid.parameters.placement import (
    Distinct,
    Foreign,
    Mark,
    ParameterLayout,
    Placement,
    ShardedModule,
    foreign_slice,
    layout_of,
    mark_parameters,
    own_slice,
    placements,
)

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
