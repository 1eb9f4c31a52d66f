"""The expert region: groups, sizes and ranks, under Megatron-core's names."""

# Groups and variables of the state are Any.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import warnings
from typing import Any

from megatron_adapter.parallel_state import dense, pipeline
from megatron_adapter.parallel_state.access import is_up, peek, read, write
from megatron_adapter.releases import release_here

__all__ = [
    "get_all_ranks",
    "get_data_modulo_expert_parallel_group",
    "get_expert_data_parallel_group",
    "get_expert_data_parallel_group_gloo",
    "get_expert_data_parallel_rank",
    "get_expert_data_parallel_world_size",
    "get_expert_gtp_weight_remat_global_ranks",
    "get_expert_gtp_weight_remat_group",
    "get_expert_gtp_weight_remat_rank",
    "get_expert_gtp_weight_remat_world_size",
    "get_expert_model_parallel_group",
    "get_expert_model_parallel_rank",
    "get_expert_model_parallel_src_rank",
    "get_expert_model_parallel_world_size",
    "get_expert_tensor_and_model_parallel_group",
    "get_expert_tensor_and_model_parallel_rank",
    "get_expert_tensor_and_model_parallel_world_size",
    "get_expert_tensor_model_pipeline_parallel_group",
    "get_expert_tensor_parallel_group",
    "get_expert_tensor_parallel_rank",
    "get_expert_tensor_parallel_world_size",
    "get_inter_distributed_optimizer_instance_group",
    "get_intra_distributed_optimizer_instance_group",
    "set_expert_model_parallel_rank",
    "set_expert_model_parallel_world_size",
    "set_expert_tensor_parallel_rank",
    "set_expert_tensor_parallel_world_size",
]


def get_expert_model_parallel_group(check_initialized: bool = True) -> Any:
    """The group `ep`."""
    return read("_EXPERT_MODEL_PARALLEL_GROUP", "expert model parallel group", check_initialized)


def get_expert_model_parallel_src_rank() -> int:
    """The global rank of the first in `ep`."""
    return read("_EXPERT_MODEL_PARALLEL_RANKS", "expert model parallel group")[0]


def get_expert_model_parallel_world_size() -> int:
    """The size of `ep`, or what it was set to; 0 without torch.distributed."""
    size = peek("_MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE")
    if size is not None:
        return size
    return get_expert_model_parallel_group().size() if is_up() else 0


def set_expert_model_parallel_world_size(world_size: int | None) -> None:
    """Makes `get_expert_model_parallel_world_size` say this; None: the group's again."""
    write("_MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE", world_size)


def get_expert_model_parallel_rank() -> int:
    """This rank's position in `ep`, or what it was set to; 0 without torch.distributed."""
    rank = peek("_MPU_EXPERT_MODEL_PARALLEL_RANK")
    if rank is not None:
        return rank
    return get_expert_model_parallel_group().rank() if is_up() else 0


def set_expert_model_parallel_rank(rank: int | None) -> None:
    """Makes `get_expert_model_parallel_rank` say this; None: the group's again."""
    write("_MPU_EXPERT_MODEL_PARALLEL_RANK", rank)


# -- expert tensor parallel -------------------------------------------------------------


def get_expert_tensor_parallel_group(check_initialized: bool = True) -> Any:
    """The group `etp`."""
    return read("_EXPERT_TENSOR_PARALLEL_GROUP", "expert tensor parallel group", check_initialized)


def get_expert_tensor_parallel_world_size() -> int:
    """The size of `etp`, or what it was set to; before initialization what tp's was set to."""
    size = peek("_MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE")
    if size is not None:
        return size
    group = get_expert_tensor_parallel_group(check_initialized=False)
    return peek("_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE") if group is None else group.size()


def set_expert_tensor_parallel_world_size(world_size: int | None) -> None:
    """Makes `get_expert_tensor_parallel_world_size` say this; None: the group's again."""
    write("_MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE", world_size)


def get_expert_tensor_parallel_rank() -> int:
    """This rank's position in `etp`, or what it was set to; before that what tp's was set to."""
    rank = peek("_MPU_EXPERT_TENSOR_PARALLEL_RANK")
    if rank is not None:
        return rank
    group = get_expert_tensor_parallel_group(check_initialized=False)
    return peek("_MPU_TENSOR_MODEL_PARALLEL_RANK") if group is None else group.rank()


def set_expert_tensor_parallel_rank(rank: int | None) -> None:
    """Makes `get_expert_tensor_parallel_rank` say this; None: the group's again."""
    write("_MPU_EXPERT_TENSOR_PARALLEL_RANK", rank)


# -- combined ---------------------------------------------------------------------------


def get_expert_tensor_and_model_parallel_group(check_initialized: bool = True) -> Any:
    """The group `ep_etp`."""
    return read(
        "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "expert tensor and model parallel group",
        check_initialized,
    )  # fmt: skip


def get_expert_tensor_and_model_parallel_world_size() -> int:
    """The size of `ep_etp`; 0 without torch.distributed."""
    return get_expert_tensor_and_model_parallel_group().size() if is_up() else 0


def get_expert_tensor_and_model_parallel_rank() -> int:
    """This rank's position in `ep_etp`; 0 without torch.distributed."""
    return get_expert_tensor_and_model_parallel_group().rank() if is_up() else 0


def get_expert_tensor_model_pipeline_parallel_group(
    check_initialized: bool = True, with_egtp_remat: bool = False
) -> Any:
    """The group `pp_ep_etp`, or with the shards of weights too: `pp_egtp_ep_etp`."""
    return read(
        "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP" + ("_WITH_EGTP" if with_egtp_remat else ""),
        "expert tensor, model and pipeline parallel group", check_initialized,
    )  # fmt: skip


# -- weights sharded and gathered again -------------------------------------------------


def get_expert_gtp_weight_remat_group(check_initialized: bool = True) -> Any:
    """The group `egtp`, over which the experts' weights are sharded."""
    what = "group of experts' sharded weights"
    return read("_EXPERT_GTP_WEIGHT_REMAT_GROUP", what, check_initialized)


def get_expert_gtp_weight_remat_world_size() -> int:
    """The size of `egtp`; 0 where there is none."""
    group = get_expert_gtp_weight_remat_group(check_initialized=False) if is_up() else None
    return 0 if group is None else group.size()


def get_expert_gtp_weight_remat_rank() -> int:
    """This rank's position in `egtp`; 0 where there is none."""
    group = get_expert_gtp_weight_remat_group(check_initialized=False) if is_up() else None
    return 0 if group is None else group.rank()


def get_expert_gtp_weight_remat_global_ranks(check_initialized: bool = True) -> Any:
    """The global ranks of `egtp`, as a list."""
    what = "group of experts' sharded weights"
    return read("_EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS", what, check_initialized)


# -- expert data parallel ---------------------------------------------------------------


def get_expert_data_parallel_group(
    check_initialized: bool = True,
    with_gtp_remat: bool = True,
    partial_expert_data_parallel: bool = False,
) -> Any:
    """The group `edp_egtp`, or the replicas: `edp` or `intra_edp`.

    Without an axis `egtp` both are the same.
    """
    partial = "_INTRA_PARTIAL" if partial_expert_data_parallel else ""
    full = "_WITH_GTP_REMAT" if with_gtp_remat else ""
    variable = f"{partial}_EXPERT_DATA_PARALLEL_GROUP{full}"
    return read(variable, "expert data parallel group", check_initialized)


def get_data_modulo_expert_parallel_group(partial_expert_data_parallel: bool = False) -> Any:
    """`get_expert_data_parallel_group` under its older name."""
    warnings.warn(
        "get_data_modulo_expert_parallel_group is deprecated, use get_expert_data_parallel_group",
        DeprecationWarning,
        stacklevel=2,
    )
    return get_expert_data_parallel_group(partial_expert_data_parallel=partial_expert_data_parallel)


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> Any:
    """The group `edp_gloo` or `intra_edp_gloo`."""
    partial = "_INTRA_PARTIAL" if partial_expert_data_parallel else ""
    return read(
        f"{partial}_EXPERT_DATA_PARALLEL_GROUP_GLOO", "expert data parallel group over gloo"
    )


def get_expert_data_parallel_rank(
    with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    """This rank's position in `get_expert_data_parallel_group`; 0 without torch.distributed."""
    if not is_up():
        return 0
    return get_expert_data_parallel_group(
        with_gtp_remat=with_gtp_remat, partial_expert_data_parallel=partial_expert_data_parallel
    ).rank()


def get_expert_data_parallel_world_size(
    with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    """The size of `get_expert_data_parallel_group`; 0 without torch.distributed."""
    if not is_up():
        return 0
    return get_expert_data_parallel_group(
        with_gtp_remat=with_gtp_remat, partial_expert_data_parallel=partial_expert_data_parallel
    ).size()


# -- optimizer instances ----------------------------------------------------------------


def get_intra_distributed_optimizer_instance_group(check_initialized: bool = True) -> Any:
    """The group `intra_dist_opt`: all ranks of one optimizer instance."""
    return read(
        "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
        "intra distributed optimizer instance group", check_initialized,
    )  # fmt: skip


def get_inter_distributed_optimizer_instance_group(check_initialized: bool = True) -> Any:
    """The group `inter_edp`: the same place in every optimizer instance."""
    return read(
        "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
        "inter distributed optimizer instance group", check_initialized,
    )  # fmt: skip


def get_all_ranks() -> str:
    """Positions in tp, dp, cp, pp and ep, from 0.19 on in gtp as well, joined by underscores."""
    here = {**vars(dense), **vars(pipeline), **globals()}
    ranks = (here[getter]() for getter in release_here().positions)
    return "_".join(str(rank or 0) for rank in ranks)
