"""Layers whose parameters are split over a tensor-parallel group."""

from commgrid.tensor_parallel.init import initialize_parameters, sharded_parameters
from commgrid.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "initialize_parameters",
    "sharded_parameters",
]
