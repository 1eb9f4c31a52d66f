"""Data parallelism: gradients averaged, clipped, and updated in parts."""

from commgrid.data_parallel.norm import clip_gradients, gradient_norm, reduce_partial_gradients
from commgrid.data_parallel.optimizer import ShardedOptimizer
from commgrid.data_parallel.reducer import GradientReducer
from commgrid.data_parallel.scaler import GradScaler

__all__ = [
    "GradScaler",
    "GradientReducer",
    "ShardedOptimizer",
    "clip_gradients",
    "gradient_norm",
    "reduce_partial_gradients",
]
