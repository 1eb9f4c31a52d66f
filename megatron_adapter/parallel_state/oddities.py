"""Megatron-core's getters that need code of their own; regular ones are rows of `getters`."""

# Groups and variables of the state are Any.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import warnings
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import torch.distributed as dist

from commgrid.torch_compat.world import is_initialized as is_up
from megatron_adapter.errors import MegatronStateError
from megatron_adapter.installed import signatures
from megatron_adapter.parallel_state import getters
from megatron_adapter.parallel_state.access import peek, read, write
from megatron_adapter.state import STORE

__all__ = [
    "get_all_ranks",
    "get_amax_reduction_group",
    "get_data_modulo_expert_parallel_group",
    "get_data_parallel_group",
    "get_data_parallel_group_gloo",
    "get_data_parallel_rank",
    "get_data_parallel_src_rank",
    "get_data_parallel_world_size",
    "get_expert_data_parallel_group",
    "get_expert_data_parallel_group_gloo",
    "get_expert_data_parallel_rank",
    "get_expert_data_parallel_world_size",
    "get_expert_tensor_model_pipeline_parallel_group",
    "get_expert_tensor_parallel_rank",
    "get_expert_tensor_parallel_world_size",
    "get_hybrid_data_context_parallel_groups",
    "get_pipeline_model_parallel_first_rank",
    "get_pipeline_model_parallel_last_rank",
    "get_pipeline_model_parallel_next_rank",
    "get_pipeline_model_parallel_prev_rank",
    "get_tensor_and_data_parallel_group",
    "get_virtual_pipeline_model_parallel_rank",
    "get_virtual_pipeline_model_parallel_world_size",
    "has_separate_all_gather_group",
    "is_initialized",
    "is_pipeline_first_stage",
    "is_pipeline_last_stage",
    "is_rank_in_embedding_group",
    "is_rank_in_position_embedding_group",
    "is_unitialized",
    "model_parallel_is_initialized",
    "set_virtual_pipeline_model_parallel_rank",
    "set_virtual_pipeline_model_parallel_world_size",
]


def is_initialized() -> bool:
    """Whether there is a state to ask, of one grid or several."""
    return bool(STORE.states)


def is_unitialized() -> bool:
    """The opposite of `is_initialized`, as Megatron once spelled it."""
    warnings.warn(
        "is_unitialized is deprecated, use is_initialized", DeprecationWarning, stacklevel=2
    )
    return not is_initialized()


def model_parallel_is_initialized() -> bool:
    """Whether the tensor, pipeline and data parallel groups exist."""
    return bool(STORE.states)


def get_data_parallel_group(
    with_context_parallel: bool = False,
    *,
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
    *,
    with_gtp_remat: bool = True,
    partial_data_parallel: bool = False,
) -> int:
    """The size of `get_data_parallel_group`; 0 without torch.distributed."""
    asked = with_context_parallel, with_gtp_remat, partial_data_parallel
    return _asked("_MPU_DATA_PARALLEL_WORLD_SIZE", methodcaller("size"), *asked)


def get_data_parallel_rank(
    with_context_parallel: bool = False,
    *,
    with_gtp_remat: bool = True,
    partial_data_parallel: bool = False,
) -> int:
    """This rank's position in `get_data_parallel_group`; 0 without torch.distributed."""
    asked = with_context_parallel, with_gtp_remat, partial_data_parallel
    return _asked("_MPU_DATA_PARALLEL_RANK", methodcaller("rank"), *asked)


def _asked(
    override: str, tells: Callable[[Any], int], with_cp: bool, with_gtp: bool, part: bool
) -> int:
    """The number that a program set, else the group's; 0 without torch.distributed."""
    said: int | None = peek(override)
    if said is not None or not is_up():
        return said or 0
    group = get_data_parallel_group(with_cp, with_gtp_remat=with_gtp, partial_data_parallel=part)
    return tells(group)


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """The global rank of the first in `dp` or `dp_cp`."""
    variable = "_DATA_PARALLEL_GLOBAL_RANKS" + ("_WITH_CP" if with_context_parallel else "")
    return read(variable, "data parallel group")[0]


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
        return getters.get_tensor_and_context_parallel_group()
    return getters.get_tensor_model_parallel_group()


def get_expert_tensor_parallel_world_size() -> int:
    """The size of `etp`, or what it was set to; before initialization what tp's was set to."""
    size = peek("_MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE")
    if size is not None:
        return size
    group = getters.get_expert_tensor_parallel_group(check_initialized=False)
    return peek("_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE") if group is None else group.size()


def get_expert_tensor_parallel_rank() -> int:
    """This rank's position in `etp`, or what it was set to; before that what tp's was set to."""
    rank = peek("_MPU_EXPERT_TENSOR_PARALLEL_RANK")
    if rank is not None:
        return rank
    group = getters.get_expert_tensor_parallel_group(check_initialized=False)
    return peek("_MPU_TENSOR_MODEL_PARALLEL_RANK") if group is None else group.rank()


def get_expert_tensor_model_pipeline_parallel_group(
    check_initialized: bool = True, *, with_egtp_remat: bool = False
) -> Any:
    """The group `pp_ep_etp`, or with the shards of weights too: `pp_egtp_ep_etp`."""
    return read(
        "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP" + ("_WITH_EGTP" if with_egtp_remat else ""),
        "expert tensor, model and pipeline parallel group", check_initialized,
    )  # fmt: skip


def get_expert_data_parallel_group(
    check_initialized: bool = True,
    *,
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
    *, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    """This rank's position in `get_expert_data_parallel_group`; 0 without torch.distributed."""
    if not is_up():
        return 0
    return get_expert_data_parallel_group(
        with_gtp_remat=with_gtp_remat, partial_expert_data_parallel=partial_expert_data_parallel
    ).rank()


def get_expert_data_parallel_world_size(
    *, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    """The size of `get_expert_data_parallel_group`; 0 without torch.distributed."""
    if not is_up():
        return 0
    return get_expert_data_parallel_group(
        with_gtp_remat=with_gtp_remat, partial_expert_data_parallel=partial_expert_data_parallel
    ).size()


def get_all_ranks() -> str:
    """Positions in tp, dp, cp, pp and ep, from 0.19 on in gtp as well, joined by underscores."""
    ranks = [
        getters.get_tensor_model_parallel_rank(), get_data_parallel_rank(),
        getters.get_context_parallel_rank(), getters.get_pipeline_model_parallel_rank(),
        getters.get_expert_model_parallel_rank(),
    ]  # fmt: skip
    if not signatures() or "get_gtp_weight_remat_rank" in signatures():
        ranks.insert(1, getters.get_gtp_weight_remat_rank())
    return "_".join(str(rank or 0) for rank in ranks)


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """How many virtual stages each rank has; None: no interleaving."""
    return peek("_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE")


def set_virtual_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Sets the number of virtual stages."""
    write("_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", world_size)


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """The virtual stage that is being worked on; None: no interleaving."""
    return peek("_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK")


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Sets the virtual stage that is being worked on."""
    warnings.warn(
        "set_virtual_pipeline_model_parallel_rank is deprecated; give vp_stage= to the functions "
        "that ask for a stage",
        DeprecationWarning,
        stacklevel=2,
    )
    write("_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK", rank)


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this is the first stage, and with `ignore_virtual=False` its first virtual one."""
    virtual = _virtual_stages(ignore_virtual, vp_stage)
    return (virtual is None or vp_stage == 0) and getters.get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this is the last stage, and with `ignore_virtual=False` its last virtual one."""
    virtual = _virtual_stages(ignore_virtual, vp_stage)
    if virtual is not None and vp_stage != virtual - 1:
        return False
    return (
        getters.get_pipeline_model_parallel_rank()
        == getters.get_pipeline_model_parallel_world_size() - 1
    )


def _virtual_stages(ignore_virtual: bool, vp_stage: int | None) -> int | None:
    virtual = None if ignore_virtual else get_virtual_pipeline_model_parallel_world_size()
    if virtual is not None and vp_stage is None:
        raise MegatronStateError(
            f"vp_stage=None, but each rank has {virtual} virtual stages; say which one is meant"
        )
    return virtual


def _ranks() -> list[int]:
    ranks: list[int] = read("_PIPELINE_GLOBAL_RANKS", "pipeline parallel group")
    return ranks


def get_pipeline_model_parallel_first_rank() -> int:
    """The global rank of the first stage."""
    return _ranks()[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """The global rank of the last stage."""
    return _ranks()[getters.get_pipeline_model_parallel_world_size() - 1]


def get_pipeline_model_parallel_next_rank() -> int:
    """The global rank of the next stage; after the last, the first."""
    ranks, stage = _ranks(), getters.get_pipeline_model_parallel_rank()
    return ranks[(stage + 1) % getters.get_pipeline_model_parallel_world_size()]


def get_pipeline_model_parallel_prev_rank() -> int:
    """The global rank of the stage before; before the first, the last."""
    ranks, stage = _ranks(), getters.get_pipeline_model_parallel_rank()
    return ranks[(stage - 1) % getters.get_pipeline_model_parallel_world_size()]


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank holds a copy of the word embeddings, in this virtual stage if asked."""
    ranks: list[int] = peek("_EMBEDDING_GLOBAL_RANKS") or []
    rank = dist.get_rank()
    if rank not in ranks:
        return False
    if not ignore_virtual and rank == ranks[0]:
        return is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    if not ignore_virtual and rank == ranks[-1]:
        return is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    return True


def is_rank_in_position_embedding_group() -> bool:
    """Whether this rank holds a copy of the position embeddings."""
    return dist.get_rank() in (peek("_POSITION_EMBEDDING_GLOBAL_RANKS") or ())
