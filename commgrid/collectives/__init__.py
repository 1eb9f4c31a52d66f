"""Named groups in use: collectives, and their differentiable pairs."""

from commgrid.collectives.pairs import (
    all_gather_from_group,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    reduce_scatter_to_group,
    scatter_to_group,
)
from commgrid.collectives.plain import (
    Group,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    reduce_scatter,
    resolve,
)

__all__ = [
    "Group",
    "all_gather",
    "all_gather_from_group",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "copy_to_group",
    "gather_from_group",
    "reduce_from_group",
    "reduce_scatter",
    "reduce_scatter_to_group",
    "resolve",
    "scatter_to_group",
]
