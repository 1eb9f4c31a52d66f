"""megatron-core's `parallel_state`, on commgrid's groups, without megatron-core.

    import megatron_adapter.parallel_state as mpu

Every public function of megatron-core's module is here under its name, with its result: those of
every release in `releases`, and `get_model_parallel_rank` and `get_model_parallel_world_size` of
older ones, which code that is handed an `mpu` object (as DeepSpeed's) asks for. Arguments stand
where the megatron-core that is installed has them. Without one, arguments that releases have
in different places are taken by name alone.

Functions answer for the one grid that is alive, also if none was chosen; groups that Megatron
has and that grid lacks (embedding groups, say) come with `megatron_adapter.active` or `install`.
Where Megatron's getters fail an assertion these raise `MegatronStateError`, which is an
AssertionError; with several grids alive, `AmbiguousGridError`.
"""

# ruff: noqa: F401, F403 -- this module is the names it imports

from megatron_adapter.facade import shape as _shape
from megatron_adapter.lifecycle import destroy_model_parallel as destroy_model_parallel
from megatron_adapter.lifecycle import initialize_model_parallel as initialize_model_parallel
from megatron_adapter.parallel_state.buffers import (
    destroy_global_memory_buffer,
    destroy_global_symmetric_memory_buffer,
    get_global_memory_buffer,
    get_global_symmetric_memory_buffer,
)
from megatron_adapter.parallel_state.getters import *
from megatron_adapter.parallel_state.oddities import *
from megatron_adapter.parallel_state.rank_groups import (
    RankGenerator,
    create_all_gather_groups,
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
from megatron_adapter.releases import installed_version as _installed_version
from megatron_adapter.releases import release_of as _release_of

_shape(globals(), _release_of(_installed_version() or ""))  # one not known: by name alone
