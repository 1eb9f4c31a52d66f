"""The releases of megatron-core as the adapter needs to know them, a table for each.

The first release is written out; every other one says what it changed. All code that depends on
the release reads this: which functions the module offers and in which places their arguments
stand, which variables are state, which fields a ProcessGroupCollection has, what else ends with
the state. An unknown release is refused with the list of its changes.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

Arguments = tuple[tuple[str, str], ...]
"""Names and what they are by default, as written; "" for what has to be given."""


@dataclass(frozen=True)
class Release:
    """One release.

    Args:
        version: the tested one; others of its series may work.
        functions: the public ones of `megatron.core.parallel_state`, and their arguments.
        variables: those of that module which are state.
        fields: of a ProcessGroupCollection.
        grid: the methods of HyperCommGrid, and their arguments.
        positions: the getters that `get_all_ranks` joins.
        ends: what `destroy_model_parallel` ends besides the state, as module and name.
    """

    version: str
    functions: Mapping[str, Arguments]
    variables: frozenset[str]
    fields: tuple[str, ...]
    grid: Mapping[str, Arguments]
    positions: tuple[str, ...]
    ends: tuple[tuple[str, str], ...] = ()

    @property
    def series(self) -> str:
        """`0.19` of `0.19.2`."""
        return ".".join(self.version.split(".")[:2])

    def then(
        self,
        version: str,
        *,
        new: str = "",
        gone: str = "",
        new_arguments: Mapping[str, Mapping[str, str]] | None = None,
        gone_arguments: Mapping[str, str] | None = None,
        new_variables: str = "",
        gone_variables: str = "",
        new_fields: str = "",
        new_methods: str = "",
        positions: tuple[str, ...] | None = None,
        ends: tuple[tuple[str, str], ...] | None = None,
    ) -> Release:
        """The release after this one.

        Args:
            version: its version.
            new, new_methods: functions, and methods of HyperCommGrid, a line each.
            gone: names of functions.
            new_arguments: function to new arguments by the one before ("" for the first).
            gone_arguments: function to names of its arguments.
            new_variables, gone_variables, new_fields: names.
            positions, ends: where they changed.
        """
        functions = {name: a for name, a in self.functions.items() if name not in gone.split()}
        for name, names in (gone_arguments or {}).items():
            functions[name] = tuple(a for a in functions[name] if a[0] not in names.split())
        for name, places in (new_arguments or {}).items():
            for after, text in places.items():
                known = functions[name]
                place = 1 + [a for a, _ in known].index(after) if after else 0
                functions[name] = (*known[:place], *_arguments(text), *known[place:])
        return replace(
            self,
            version=version,
            functions=functions | _functions(new),
            variables=self.variables - {*gone_variables.split()} | {*new_variables.split()},
            fields=(*self.fields, *new_fields.split()),
            grid={**self.grid, **_functions(new_methods)},
            positions=positions or self.positions,
            ends=self.ends if ends is None else ends,
        )


def _functions(text: str) -> dict[str, Arguments]:
    """Functions of lines such as `name(a, b=None)`."""
    lines = " ".join(text.split()).replace(") ", ")\n").splitlines()
    split = (line.removesuffix(")").partition("(") for line in lines)
    return {name: _arguments(arguments) for name, _, arguments in split}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _arguments(text: str) -> Arguments:
    pairs = (argument.partition("=") for argument in text.split(", ") if argument)
    return tuple((name, default) for name, _, default in pairs)


_FIRST = Release(
    version="0.15.3",
    functions=_functions("""
        get_nccl_options(pg_name, nccl_comm_cfgs)
        update_pg_timeout(timeout, pg=None)
        create_group(ranks=None, timeout=None, backend=None, pg_options=None,
            use_local_synchronization=False, group_desc=None)
        generate_masked_orthogonal_rank_groups(world_size, parallel_size, mask)
        create_hierarchical_groups(rank, ranks, hierarchical_group_sizes,
            create_gloo_process_groups=False, pg_options=None, timeout=None, group_desc=None)
        default_embedding_ranks(pp_ranks)
        default_position_embedding_ranks(pp_ranks)
        overwrite_nccl_comm_cfgs(nccl_comm_cfgs, pg_name, key_value_pair)
        initialize_model_parallel(tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
            virtual_pipeline_model_parallel_size=None, pipeline_model_parallel_comm_backend=None,
            use_sharp=False, context_parallel_size=1, hierarchical_context_parallel_sizes=None,
            expert_model_parallel_size=1, num_distributed_optimizer_instances=1,
            expert_tensor_parallel_size=None, nccl_communicator_config_path=None,
            distributed_timeout_minutes=30, order='tp-cp-ep-dp-pp', get_embedding_ranks=None,
            get_position_embedding_ranks=None, create_gloo_process_groups=True,
            high_priority_stream_groups=None, sharp_enabled_group=None)
        is_initialized()
        is_unitialized()
        model_parallel_is_initialized()
        get_model_parallel_group(check_initialized=True)
        get_tensor_model_parallel_group(check_initialized=True)
        get_pipeline_model_parallel_group(check_initialized=True)
        get_data_parallel_group(with_context_parallel=False, partial_data_parallel=False)
        get_data_parallel_group_gloo(with_context_parallel=False, partial_data_parallel=False)
        get_context_parallel_group(check_initialized=True)
        get_context_parallel_global_ranks(check_initialized=True)
        get_hierarchical_context_parallel_groups(check_initialized=True)
        get_embedding_group(check_initialized=True)
        get_position_embedding_group(check_initialized=True)
        get_amax_reduction_group(with_context_parallel=False, tp_only_amax_red=False)
        get_tensor_and_data_parallel_group(check_initialized=True, with_context_parallel=False)
        get_tensor_and_context_parallel_group(check_initialized=True)
        set_tensor_model_parallel_world_size(world_size)
        set_pipeline_model_parallel_world_size(world_size)
        set_virtual_pipeline_model_parallel_world_size(world_size)
        get_tensor_model_parallel_world_size()
        get_pipeline_model_parallel_world_size()
        set_tensor_model_parallel_rank(rank)
        set_pipeline_model_parallel_rank(rank)
        get_tensor_model_parallel_rank()
        get_pipeline_model_parallel_rank()
        is_pipeline_first_stage(ignore_virtual=True, vp_stage=None)
        is_pipeline_last_stage(ignore_virtual=True, vp_stage=None)
        is_rank_in_embedding_group(ignore_virtual=True, vp_stage=None)
        is_rank_in_position_embedding_group()
        get_virtual_pipeline_model_parallel_rank()
        set_virtual_pipeline_model_parallel_rank(rank)
        get_virtual_pipeline_model_parallel_world_size()
        get_tensor_model_parallel_src_rank()
        get_model_parallel_src_rank()
        get_data_parallel_src_rank(with_context_parallel=False)
        get_pipeline_model_parallel_first_rank()
        get_pipeline_model_parallel_last_rank()
        get_pipeline_model_parallel_next_rank()
        get_pipeline_model_parallel_prev_rank()
        get_data_parallel_world_size(with_context_parallel=False, partial_data_parallel=False)
        set_data_parallel_rank(rank)
        get_data_parallel_rank(with_context_parallel=False, partial_data_parallel=False)
        get_context_parallel_world_size()
        get_context_parallel_rank()
        get_tensor_and_context_parallel_world_size()
        get_tensor_and_context_parallel_rank()
        get_expert_model_parallel_group(check_initialized=True)
        get_expert_model_parallel_world_size()
        set_expert_model_parallel_world_size(world_size)
        get_expert_model_parallel_rank()
        set_expert_model_parallel_rank(rank)
        get_expert_tensor_parallel_group(check_initialized=True)
        get_expert_tensor_parallel_world_size()
        set_expert_tensor_parallel_world_size(world_size)
        get_expert_tensor_parallel_rank()
        set_expert_tensor_parallel_rank(rank)
        get_expert_tensor_and_model_parallel_group(check_initialized=True)
        get_expert_tensor_and_model_parallel_world_size()
        get_expert_tensor_and_model_parallel_rank()
        get_expert_tensor_model_pipeline_parallel_group(check_initialized=True)
        get_expert_data_parallel_group(check_initialized=True, partial_expert_data_parallel=False)
        get_data_modulo_expert_parallel_group(partial_expert_data_parallel=False)
        get_expert_data_parallel_group_gloo(partial_expert_data_parallel=False)
        get_expert_data_parallel_rank(partial_expert_data_parallel=False)
        get_expert_data_parallel_world_size(partial_expert_data_parallel=False)
        get_intra_distributed_optimizer_instance_group(check_initialized=True)
        get_inter_distributed_optimizer_instance_group(check_initialized=True)
        get_global_memory_buffer()
        destroy_global_memory_buffer()
        get_all_ranks()
        destroy_model_parallel()
    """),
    variables=_names("""
        _TENSOR_MODEL_PARALLEL_GROUP _TENSOR_MODEL_PARALLEL_GLOBAL_RANKS
        _PIPELINE_MODEL_PARALLEL_GROUP _PIPELINE_GLOBAL_RANKS
        _MODEL_PARALLEL_GROUP _MODEL_PARALLEL_GLOBAL_RANKS
        _DATA_PARALLEL_GROUP _DATA_PARALLEL_GROUP_GLOO _DATA_PARALLEL_GLOBAL_RANKS
        _DATA_PARALLEL_GROUP_WITH_CP _DATA_PARALLEL_GROUP_WITH_CP_GLOO
        _DATA_PARALLEL_GLOBAL_RANKS_WITH_CP
        _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO
        _CONTEXT_PARALLEL_GROUP _CONTEXT_PARALLEL_GLOBAL_RANKS
        _HIERARCHICAL_CONTEXT_PARALLEL_GROUPS
        _TENSOR_AND_CONTEXT_PARALLEL_GROUP
        _TENSOR_AND_DATA_PARALLEL_GROUP _TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP
        _EMBEDDING_GROUP _EMBEDDING_GLOBAL_RANKS
        _POSITION_EMBEDDING_GROUP _POSITION_EMBEDDING_GLOBAL_RANKS
        _EXPERT_MODEL_PARALLEL_GROUP _EXPERT_TENSOR_PARALLEL_GROUP
        _EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP _EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP
        _EXPERT_DATA_PARALLEL_GROUP _EXPERT_DATA_PARALLEL_GROUP_GLOO
        _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO
        _INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP _INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP
        _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE _MPU_TENSOR_MODEL_PARALLEL_RANK
        _MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE _MPU_PIPELINE_MODEL_PARALLEL_RANK
        _MPU_DATA_PARALLEL_WORLD_SIZE _MPU_DATA_PARALLEL_RANK
        _MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE _MPU_EXPERT_MODEL_PARALLEL_RANK
        _MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE _MPU_EXPERT_TENSOR_PARALLEL_RANK
        _VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE
        _GLOBAL_MEMORY_BUFFER _global_process_group_list
    """),
    fields=(
        "tp", "pp", "mp", "embd", "pos_embd", "cp", "tp_cp", "hcp", "ep", "expt_tp", "tp_ep",
        "tp_ep_pp", "tp_dp_cp", "dp", "dp_cp", "expt_dp", "intra_dp_cp", "intra_expt_dp",
        "inter_dist_opt", "intra_dist_opt",
    ),
    grid=_functions("""
        __init__(self, shape, dim_names, rank_offset=0, backend=None)
        create_pg(self, dims, **kwargs)
        get_pg(self, dims)
        _gen_rank_enum(self, dims)
    """),
    positions=(
        "get_tensor_model_parallel_rank", "get_data_parallel_rank", "get_context_parallel_rank",
        "get_pipeline_model_parallel_rank", "get_expert_model_parallel_rank",
    ),
)  # fmt: skip

_0_16 = _FIRST.then(
    "0.16.1",
    new="""
        create_hybrid_dp_cp_groups(rank, ranks, pg_options)
        has_separate_all_gather_group()
        get_hybrid_data_context_parallel_groups(check_initialized=True, group_size=None)
        get_expert_model_parallel_src_rank()
        get_global_symmetric_memory_buffer()
        destroy_global_symmetric_memory_buffer()
    """,
    new_arguments={
        "initialize_model_parallel": {
            "hierarchical_context_parallel_sizes": "hybrid_context_parallel=False",
            "sharp_enabled_group": "create_all_gather_group=False",
        },
        "get_data_parallel_group": {"partial_data_parallel": "independent_all_gather=False"},
    },
    new_variables="""
        _DATA_PARALLEL_GROUP_WITH_CP_AG _EXPERT_MODEL_PARALLEL_RANKS _HYBRID_DP_CP_GROUPS
        _GLOBAL_SYMMETRIC_MEMORY_BUFFER
    """,
    new_methods="get_rank_enum(self, dims)",
)

_0_17 = _0_16.then(
    "0.17.1",
    gone="""
        is_unitialized get_data_modulo_expert_parallel_group
        get_global_symmetric_memory_buffer destroy_global_symmetric_memory_buffer
    """,
    new_arguments={
        "initialize_model_parallel": {
            "create_all_gather_group": "rank_offset=0, local_world_size=None"
        },
    },
    gone_variables="_GLOBAL_SYMMETRIC_MEMORY_BUFFER",
    new_methods="""
        destroy(self)
        is_current_rank_in_grid(self)
    """,
    ends=(("megatron.core.inference.symmetric_memory", "SymmetricMemoryManager.destroy"),),
)

_0_18 = _0_17.then(
    "0.18.2",
    new="""
        create_all_gather_groups(for_expert_parallelism=False, timeout=None, nccl_comm_cfgs=None)
    """,
    gone="has_separate_all_gather_group",
    gone_arguments={
        "initialize_model_parallel": "create_all_gather_group",
        "get_data_parallel_group": "independent_all_gather",
    },
    gone_variables="_DATA_PARALLEL_GROUP_WITH_CP_AG",
    new_fields="dp_cp_ag expt_dp_ag",
)

_0_19 = _0_18.then(
    "0.19.2",
    new="""
        get_gtp_weight_remat_group(check_initialized=True)
        get_gtp_weight_remat_world_size()
        get_gtp_weight_remat_rank()
        get_gtp_weight_remat_global_ranks(check_initialized=True)
        get_expert_gtp_weight_remat_group(check_initialized=True)
        get_expert_gtp_weight_remat_world_size()
        get_expert_gtp_weight_remat_rank()
        get_expert_gtp_weight_remat_global_ranks(check_initialized=True)
    """,
    new_arguments={
        "initialize_model_parallel": {
            "expert_model_parallel_size": "gtp_remat_size=1, expert_gtp_remat_size=1"
        },
        "get_data_parallel_group": {"with_context_parallel": "with_gtp_remat=True"},
        "get_data_parallel_world_size": {"with_context_parallel": "with_gtp_remat=True"},
        "get_data_parallel_rank": {"with_context_parallel": "with_gtp_remat=True"},
        "get_expert_data_parallel_group": {"check_initialized": "with_gtp_remat=True"},
        "get_expert_data_parallel_rank": {"": "with_gtp_remat=True"},
        "get_expert_data_parallel_world_size": {"": "with_gtp_remat=True"},
        "get_expert_tensor_model_pipeline_parallel_group": {
            "check_initialized": "with_egtp_remat=False"
        },
    },
    new_variables="""
        _GTP_WEIGHT_REMAT_GROUP _GTP_WEIGHT_REMAT_GLOBAL_RANKS
        _EXPERT_GTP_WEIGHT_REMAT_GROUP _EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS
        _DATA_PARALLEL_GROUP_WITH_GTP_REMAT _DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT
        _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT
        _EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT
        _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT
        _EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP
    """,
    new_fields="""
        gtp_remat expt_gtp_remat dp_cp_gtp_remat expt_dp_gtp_remat tp_ep_pp_with_egtp_remat
    """,
    new_methods="""
        register_view(self, name, shape, dim_names, shared_dims=None)
        create_pg(self, dims, *, view=None, **kwargs)
        get_pg(self, dims, *, view=None)
        get_rank_enum(self, dims, *, view=None)
    """,
    positions=(_FIRST.positions[0], "get_gtp_weight_remat_rank", *_FIRST.positions[1:]),
    ends=(
        ("megatron.core.transformer.moe.fused_a2a", "nccl_ep_finalize"),
        ("megatron.core.inference.symmetric_memory", "SymmetricMemoryManager.destroy"),
    ),
)

RELEASES = (_FIRST, _0_16, _0_17, _0_18, _0_19, _0_19.then("0.20.0"))
"""Oldest first. 0.20.0 is Megatron's main of 22 August 2026, whose modules are those of 0.19.2."""

NEWEST = RELEASES[-1]

SUPPORTED = tuple(release.version for release in RELEASES)
"""The versions of megatron-core that are tested; others of these series may serve."""


def release_of(version: str) -> Release | None:
    """The release of a version's series; None: the adapter knows none."""
    found = (one for one in RELEASES if one.series == ".".join(version.split(".")[:2]))
    return next(found, None)


def installed_version() -> str | None:
    """The version of the megatron-core that is imported, or else could be; None: there is none."""
    imported = getattr(sys.modules.get("megatron.core"), "__version__", None)
    if imported is not None:
        return str(imported)
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return None


def release_here() -> Release:
    """The release of `installed_version`; the newest where there is none, or one not known."""
    version = installed_version()
    return (None if version is None else release_of(version)) or NEWEST


def moved_arguments(function: str) -> frozenset[str]:
    """The arguments that do not stand in one place in all releases that have the function."""
    known = [release.functions[function] for release in RELEASES if function in release.functions]
    same = 0
    while all(len(a) > same for a in known) and len({a[same] for a in known}) == 1:
        same += 1
    return frozenset(name for arguments in known for name, _ in arguments[same:])
