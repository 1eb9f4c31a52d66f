"""Tensor, data and context parallel: groups, sizes and ranks, under Megatron-core's names."""

# Groups and variables of the state are Any.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import warnings
from typing import Any

from megatron_adapter.errors import MegatronStateError
from megatron_adapter.parallel_state.access import is_up, peek, read, write
from megatron_adapter.state import STORE

__all__ = [
    "get_amax_reduction_group",
    "get_context_parallel_global_ranks",
    "get_context_parallel_group",
    "get_context_parallel_rank",
    "get_context_parallel_world_size",
    "get_data_parallel_group",
    "get_data_parallel_group_gloo",
    "get_data_parallel_rank",
    "get_data_parallel_src_rank",
    "get_data_parallel_world_size",
    "get_gtp_weight_remat_global_ranks",
    "get_gtp_weight_remat_group",
    "get_gtp_weight_remat_rank",
    "get_gtp_weight_remat_world_size",
    "get_hierarchical_context_parallel_groups",
    "get_hybrid_data_context_parallel_groups",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_src_rank",
    "get_model_parallel_world_size",
    "get_tensor_and_context_parallel_group",
    "get_tensor_and_context_parallel_rank",
    "get_tensor_and_context_parallel_world_size",
    "get_tensor_and_data_parallel_group",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_world_size",
    "has_separate_all_gather_group",
    "is_initialized",
    "is_unitialized",
    "model_parallel_is_initialized",
    "set_data_parallel_rank",
    "set_tensor_model_parallel_rank",
    "set_tensor_model_parallel_world_size",
]


def is_initialized() -> bool:
    """Whether there is a state to ask, of one grid or several."""
    return STORE.is_there()


def is_unitialized() -> bool:
    """The opposite of `is_initialized`, as Megatron once spelled it."""
    warnings.warn(
        "is_unitialized is deprecated, use is_initialized", DeprecationWarning, stacklevel=2
    )
    return not is_initialized()


def model_parallel_is_initialized() -> bool:
    """Whether the tensor, pipeline and data parallel groups exist."""
    return STORE.is_there()


# -- tensor and model parallel ----------------------------------------------------------


def get_tensor_model_parallel_group(check_initialized: bool = True) -> Any:
    """The group `tp`."""
    return read("_TENSOR_MODEL_PARALLEL_GROUP", "tensor model parallel group", check_initialized)


def get_model_parallel_group(check_initialized: bool = True) -> Any:
    """The group `pp_tp`."""
    return read("_MODEL_PARALLEL_GROUP", "model parallel group", check_initialized)


def get_model_parallel_world_size() -> int:
    """The size of `pp_tp`; of older versions of Megatron."""
    return get_model_parallel_group().size()


def get_model_parallel_rank() -> int:
    """This rank's position in `pp_tp`; of older versions of Megatron."""
    return get_model_parallel_group().rank()


def get_tensor_model_parallel_world_size() -> int:
    """The size of `tp`, or what it was set to."""
    size = peek("_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE")
    return get_tensor_model_parallel_group().size() if size is None else size


def set_tensor_model_parallel_world_size(world_size: int | None) -> None:
    """Makes `get_tensor_model_parallel_world_size` say this; None: the group's again."""
    write("_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE", world_size)


def get_tensor_model_parallel_rank() -> int:
    """This rank's position in `tp`, or what it was set to."""
    rank = peek("_MPU_TENSOR_MODEL_PARALLEL_RANK")
    return get_tensor_model_parallel_group().rank() if rank is None else rank


def set_tensor_model_parallel_rank(rank: int | None) -> None:
    """Makes `get_tensor_model_parallel_rank` say this; None: the group's again."""
    write("_MPU_TENSOR_MODEL_PARALLEL_RANK", rank)


def get_tensor_model_parallel_src_rank() -> int:
    """The global rank of the first in `tp`."""
    return read("_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS", "tensor model parallel group")[0]


def get_model_parallel_src_rank() -> int:
    """The global rank of the first in `pp_tp`."""
    return read("_MODEL_PARALLEL_GLOBAL_RANKS", "model parallel group")[0]


# -- data parallel ----------------------------------------------------------------------


def get_data_parallel_group(
    with_context_parallel: bool = False,
    with_gtp_remat: bool = True,
    partial_data_parallel: bool = False,
    independent_all_gather: bool = False,
) -> Any:
    """The group `dp_gtp`, `dp_cp_gtp`, or the replicas: `dp`, `dp_cp`, `intra_dp_cp`, `dp_cp_ag`.

    Without an axis `gtp` both are the same.
    """
    _check_whole(with_context_parallel, partial_data_parallel)
    if independent_all_gather and with_context_parallel and not partial_data_parallel:
        return read("_DATA_PARALLEL_GROUP_WITH_CP_AG", "data parallel group for all-gathers")
    partial = "_INTRA_PARTIAL" if partial_data_parallel else ""
    with_cp = "_WITH_CP" if with_context_parallel else ""
    full = "_WITH_GTP_REMAT" if with_gtp_remat else ""
    return read(f"{partial}_DATA_PARALLEL_GROUP{with_cp}{full}", "data parallel group")


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> Any:
    """The group `dp_gloo`, `dp_cp_gloo` or `intra_dp_cp_gloo`."""
    _check_whole(with_context_parallel, partial_data_parallel)
    partial = "_INTRA_PARTIAL" if partial_data_parallel else ""
    with_cp = "_WITH_CP" if with_context_parallel else ""
    return read(f"{partial}_DATA_PARALLEL_GROUP{with_cp}_GLOO", "data parallel group over gloo")


def _check_whole(with_context_parallel: bool, partial_data_parallel: bool) -> None:
    if partial_data_parallel and not with_context_parallel:
        raise MegatronStateError(
            "partial_data_parallel=True: an optimizer instance's part of dp includes cp; ask with "
            "with_context_parallel=True"
        )


def has_separate_all_gather_group() -> bool:
    """Whether `dp_cp_ag` was created."""
    return peek("_DATA_PARALLEL_GROUP_WITH_CP_AG") is not None


def get_data_parallel_world_size(
    with_context_parallel: bool = False,
    with_gtp_remat: bool = True,
    partial_data_parallel: bool = False,
) -> int:
    """The size of `get_data_parallel_group`; 0 without torch.distributed."""
    size = peek("_MPU_DATA_PARALLEL_WORLD_SIZE")
    if size is not None:
        return size
    if not is_up():
        return 0
    return get_data_parallel_group(
        with_context_parallel, with_gtp_remat, partial_data_parallel
    ).size()


def get_data_parallel_rank(
    with_context_parallel: bool = False,
    with_gtp_remat: bool = True,
    partial_data_parallel: bool = False,
) -> int:
    """This rank's position in `get_data_parallel_group`; 0 without torch.distributed."""
    rank = peek("_MPU_DATA_PARALLEL_RANK")
    if rank is not None:
        return rank
    if not is_up():
        return 0
    return get_data_parallel_group(
        with_context_parallel, with_gtp_remat, partial_data_parallel
    ).rank()


def set_data_parallel_rank(rank: int | None) -> None:
    """Makes `get_data_parallel_rank` say this; None: the group's again."""
    write("_MPU_DATA_PARALLEL_RANK", rank)


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """The global rank of the first in `dp` or `dp_cp`."""
    variable = "_DATA_PARALLEL_GLOBAL_RANKS" + ("_WITH_CP" if with_context_parallel else "")
    return read(variable, "data parallel group")[0]


# -- weights sharded and gathered again -------------------------------------------------


def get_gtp_weight_remat_group(check_initialized: bool = True) -> Any:
    """The group `gtp`, over which weights are sharded."""
    return read("_GTP_WEIGHT_REMAT_GROUP", "group of sharded weights", check_initialized)


def get_gtp_weight_remat_world_size() -> int:
    """The size of `gtp`; 0 where there is none."""
    group = get_gtp_weight_remat_group(check_initialized=False) if is_up() else None
    return 0 if group is None else group.size()


def get_gtp_weight_remat_rank() -> int:
    """This rank's position in `gtp`; 0 where there is none."""
    group = get_gtp_weight_remat_group(check_initialized=False) if is_up() else None
    return 0 if group is None else group.rank()


def get_gtp_weight_remat_global_ranks(check_initialized: bool = True) -> Any:
    """The global ranks of `gtp`, as a list."""
    return read("_GTP_WEIGHT_REMAT_GLOBAL_RANKS", "group of sharded weights", check_initialized)


# -- context parallel -------------------------------------------------------------------


def get_context_parallel_group(check_initialized: bool = True) -> Any:
    """The group `cp`."""
    return read("_CONTEXT_PARALLEL_GROUP", "context parallel group", check_initialized)


def get_context_parallel_global_ranks(check_initialized: bool = True) -> Any:
    """The global ranks of `cp`, as a list."""
    return read("_CONTEXT_PARALLEL_GLOBAL_RANKS", "context parallel group", check_initialized)


def get_hierarchical_context_parallel_groups(check_initialized: bool = True) -> Any:
    """The levels of `cp`, innermost first, as a list of groups."""
    return read(
        "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS", "hierarchical context parallelism",
        check_initialized,
    )  # fmt: skip


def get_hybrid_data_context_parallel_groups(
    check_initialized: bool = True, group_size: int | None = None
) -> Any:
    """The part of `dp_cp` with `group_size` ranks that this one is in.

    Raises:
        KeyError: there is none of this size; Megatron answers with a smaller one where the
            size leaves a rest of dp · cp.
    """
    whole = get_data_parallel_world_size(with_context_parallel=True, with_gtp_remat=False)
    if whole == group_size:
        variable = "_DATA_PARALLEL_GROUP_WITH_CP"
        return read(variable, "data parallel group with context parallel", check_initialized)
    groups = read("_HYBRID_DP_CP_GROUPS", "hybrid data and context parallelism", check_initialized)
    if group_size not in groups:
        raise KeyError(
            f"group_size={group_size!r}: this rank is in no such group, but in those of "
            f"{sorted(groups)} ranks"
        )
    return groups[group_size]


def get_context_parallel_world_size() -> int:
    """The size of `cp`; 0 without torch.distributed."""
    return get_context_parallel_group().size() if is_up() else 0


def get_context_parallel_rank() -> int:
    """This rank's position in `cp`; 0 without torch.distributed."""
    return get_context_parallel_group().rank() if is_up() else 0


# -- combined ---------------------------------------------------------------------------


def get_tensor_and_context_parallel_group(check_initialized: bool = True) -> Any:
    """The group `cp_tp`."""
    return read(
        "_TENSOR_AND_CONTEXT_PARALLEL_GROUP", "tensor and context parallel group",
        check_initialized,
    )  # fmt: skip


def get_tensor_and_context_parallel_world_size() -> int:
    """The size of `cp_tp`; 0 without torch.distributed."""
    return get_tensor_and_context_parallel_group().size() if is_up() else 0


def get_tensor_and_context_parallel_rank() -> int:
    """This rank's position in `cp_tp`; 0 without torch.distributed."""
    return get_tensor_and_context_parallel_group().rank() if is_up() else 0


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> Any:
    """The group `dp_tp` or `dp_cp_tp`."""
    variable = "_TENSOR_AND_DATA_PARALLEL_GROUP" + ("_WITH_CP" if with_context_parallel else "")
    return read(variable, "tensor and data parallel group", check_initialized)


def get_amax_reduction_group(
    with_context_parallel: bool = False, tp_only_amax_red: bool = False
) -> Any:
    """The group over which FP8's largest values are reduced."""
    if not tp_only_amax_red:
        return get_tensor_and_data_parallel_group(with_context_parallel=with_context_parallel)
    if with_context_parallel:
        return get_tensor_and_context_parallel_group()
    return get_tensor_model_parallel_group()
