"""megatron-core's `parallel_state`, on commgrid's groups, without megatron-core.

    import megatron_adapter.parallel_state as mpu

Every public function that asks for or sets megatron-core's state is here under its name, with its
result: those of every release in `SUPPORTED`, and `get_model_parallel_rank` and
`get_model_parallel_world_size` of older ones, which code that is handed an `mpu` object (as
DeepSpeed's) asks for. Arguments stand where the megatron-core that is installed has them. Without
one, arguments that releases have in different places are taken by name alone.

Functions answer for a grid that `initialize_model_parallel` made, or that
`megatron_adapter.active` or `install` was given. Where Megatron's getters fail an assertion these
raise `MegatronStateError`, which is an AssertionError; with several such grids, and none chosen,
`AmbiguousGridError`.
"""

# ruff: noqa: F401, F403 -- this module is the names it imports

from megatron_adapter.installed import shaped as _shaped
from megatron_adapter.installed import signatures as _signatures
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
    create_all_gather_groups,
    create_group,
    update_pg_timeout,
)

for _name, _signature in _signatures().items():
    if _name in globals():
        globals()[_name] = _shaped(_name, globals()[_name], _signature)
