"""megatron-core's `parallel_state`, on commgrid's groups, without megatron-core.

    import megatron_adapter.parallel_state as mpu

Every public function of megatron-core 0.16.1's module is here under its name, with its signature
and its result, and `get_model_parallel_rank` and `get_model_parallel_world_size` of its older
versions, which code that is handed an `mpu` object (as DeepSpeed's) asks for. Where Megatron's
getters fail an assertion these raise `MegatronStateError`, which is an AssertionError; with
several grids alive, `AmbiguousGridError`.
"""

# ruff: noqa: F401, F403 -- this module is the names it imports

from megatron_adapter.lifecycle import destroy_model_parallel, initialize_model_parallel
from megatron_adapter.parallel_state.buffers import (
    destroy_global_memory_buffer,
    destroy_global_symmetric_memory_buffer,
    get_global_memory_buffer,
    get_global_symmetric_memory_buffer,
)
from megatron_adapter.parallel_state.dense import *
from megatron_adapter.parallel_state.expert import *
from megatron_adapter.parallel_state.pipeline import *
from megatron_adapter.parallel_state.rank_groups import (
    RankGenerator,
    create_group,
    create_hierarchical_groups,
    create_hybrid_dp_cp_groups,
    default_embedding_ranks,
    default_position_embedding_ranks,
    generate_masked_orthogonal_rank_groups,
    get_nccl_options,
    overwrite_nccl_comm_cfgs,
    update_pg_timeout,
)
