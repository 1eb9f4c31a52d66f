"""megatron-core's own layers over commgrid's groups, on the CPU as well.

megatron-core asks CUDA for its current device in a few places that have nothing to do with
CUDA; `prepare` answers for it where there is none.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from tests import peers  # noqa: F401  (imports megatron with its warnings off)


def prepare(group: ProcessGroup) -> None:
    """Gives Megatron its tp group and buffer, and where there is no CUDA a current device."""
    from megatron.core import parallel_state

    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # else its layers warn
    warnings.simplefilter("ignore", FutureWarning)  # it calls collectives by their older names
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    parallel_state._TENSOR_MODEL_PARALLEL_GROUP = group
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()


def forget_buffers() -> None:
    """Drops the memory that Megatron keeps for gathered inputs, as if none had been gathered."""
    from megatron.core import parallel_state

    parallel_state._GLOBAL_MEMORY_BUFFER.buffer.clear()


def config(group: ProcessGroup, sequence_parallel: bool, dtype: torch.dtype | None) -> Any:
    """Megatron's configuration of a layer over `group`."""
    from megatron.core.model_parallel_config import ModelParallelConfig

    return ModelParallelConfig(
        tensor_model_parallel_size=group.size(),
        sequence_parallel=sequence_parallel and group.size() > 1,
        use_cpu_initialization=True,
        params_dtype=dtype or torch.get_default_dtype(),
        gradient_accumulation_fusion=False,
    )


def column(
    features: tuple[int, int], group: ProcessGroup, *, sequence_parallel: bool = False,
    bias: bool = True, gather_output: bool = False, dtype: torch.dtype | None = None,
) -> nn.Module:  # fmt: skip
    """megatron-core's ColumnParallelLinear."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    return ColumnParallelLinear(
        *features, config=config(group, sequence_parallel, dtype), init_method=nn.init.normal_,
        bias=bias, gather_output=gather_output, tp_group=group,
    )  # fmt: skip


def row(
    features: tuple[int, int], group: ProcessGroup, *, sequence_parallel: bool = False,
    bias: bool = True, dtype: torch.dtype | None = None,
) -> nn.Module:  # fmt: skip
    """megatron-core's RowParallelLinear."""
    from megatron.core.tensor_parallel import RowParallelLinear

    return RowParallelLinear(
        *features, config=config(group, sequence_parallel, dtype), init_method=nn.init.normal_,
        bias=bias, input_is_parallel=True, skip_bias_add=False, tp_group=group,
    )  # fmt: skip


def embedding(
    size: tuple[int, int], group: ProcessGroup, *, sequence_parallel: bool = False,
    dtype: torch.dtype | None = None,
) -> nn.Module:  # fmt: skip
    """megatron-core's VocabParallelEmbedding."""
    from megatron.core.tensor_parallel import VocabParallelEmbedding

    return VocabParallelEmbedding(
        *size, init_method=nn.init.normal_, config=config(group, sequence_parallel, dtype),
        reduce_scatter_embeddings=sequence_parallel and group.size() > 1, tp_group=group,
    )  # fmt: skip
