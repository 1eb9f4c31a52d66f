"""Layers whose parameters are split over a tensor-parallel group."""

from commgrid.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from commgrid.tensor_parallel.embedding import VocabParallelEmbedding, VocabParallelHead
from commgrid.tensor_parallel.init import initialize_parameters
from commgrid.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from commgrid.tensor_parallel.matmul import wanted
from commgrid.tensor_parallel.qkv import QKVParallelLinear
from commgrid.tensor_parallel.rng import set_random_seed, sharded_rng

__all__ = [
    "ColumnParallelLinear",
    "QKVParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "initialize_parameters",
    "set_random_seed",
    "sharded_rng",
    "vocab_parallel_cross_entropy",
    "wanted",
]
