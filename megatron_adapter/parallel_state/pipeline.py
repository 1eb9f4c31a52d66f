"""The pipeline and the embeddings at its ends: groups, stages and neighbours, as Megatron-core."""

# Groups and variables of the state are Any.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist

from megatron_adapter.errors import MegatronStateError
from megatron_adapter.parallel_state.access import peek, read, write

__all__ = [
    "get_embedding_group",
    "get_pipeline_model_parallel_first_rank",
    "get_pipeline_model_parallel_group",
    "get_pipeline_model_parallel_last_rank",
    "get_pipeline_model_parallel_next_rank",
    "get_pipeline_model_parallel_prev_rank",
    "get_pipeline_model_parallel_rank",
    "get_pipeline_model_parallel_world_size",
    "get_position_embedding_group",
    "get_virtual_pipeline_model_parallel_rank",
    "get_virtual_pipeline_model_parallel_world_size",
    "is_pipeline_first_stage",
    "is_pipeline_last_stage",
    "is_rank_in_embedding_group",
    "is_rank_in_position_embedding_group",
    "set_pipeline_model_parallel_rank",
    "set_pipeline_model_parallel_world_size",
    "set_virtual_pipeline_model_parallel_rank",
    "set_virtual_pipeline_model_parallel_world_size",
]


def get_pipeline_model_parallel_group(check_initialized: bool = True) -> Any:
    """The group `pp`."""
    return read(
        "_PIPELINE_MODEL_PARALLEL_GROUP", "pipeline model parallel group", check_initialized
    )


def get_pipeline_model_parallel_world_size() -> int:
    """The number of stages, or what it was set to."""
    size = peek("_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE")
    return get_pipeline_model_parallel_group().size() if size is None else size


def set_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Makes `get_pipeline_model_parallel_world_size` say this; None: the group's again."""
    write("_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", world_size)


def get_pipeline_model_parallel_rank() -> int:
    """This rank's stage, or what it was set to."""
    rank = peek("_MPU_PIPELINE_MODEL_PARALLEL_RANK")
    return get_pipeline_model_parallel_group().rank() if rank is None else rank


def set_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Makes `get_pipeline_model_parallel_rank` say this; None: the group's again."""
    write("_MPU_PIPELINE_MODEL_PARALLEL_RANK", rank)


# -- virtual stages ---------------------------------------------------------------------


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
    return (virtual is None or vp_stage == 0) and get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this is the last stage, and with `ignore_virtual=False` its last virtual one."""
    virtual = _virtual_stages(ignore_virtual, vp_stage)
    if virtual is not None and vp_stage != virtual - 1:
        return False
    return get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1


def _virtual_stages(ignore_virtual: bool, vp_stage: int | None) -> int | None:
    virtual = None if ignore_virtual else get_virtual_pipeline_model_parallel_world_size()
    if virtual is not None and vp_stage is None:
        raise MegatronStateError(
            f"vp_stage=None, but each rank has {virtual} virtual stages; say which one is meant"
        )
    return virtual


# -- neighbours -------------------------------------------------------------------------


def _ranks() -> list[int]:
    ranks: list[int] = read("_PIPELINE_GLOBAL_RANKS", "pipeline parallel group")
    return ranks


def get_pipeline_model_parallel_first_rank() -> int:
    """The global rank of the first stage."""
    return _ranks()[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """The global rank of the last stage."""
    return _ranks()[get_pipeline_model_parallel_world_size() - 1]


def get_pipeline_model_parallel_next_rank() -> int:
    """The global rank of the next stage; after the last, the first."""
    ranks, stage = _ranks(), get_pipeline_model_parallel_rank()
    return ranks[(stage + 1) % get_pipeline_model_parallel_world_size()]


def get_pipeline_model_parallel_prev_rank() -> int:
    """The global rank of the stage before; before the first, the last."""
    ranks, stage = _ranks(), get_pipeline_model_parallel_rank()
    return ranks[(stage - 1) % get_pipeline_model_parallel_world_size()]


# -- embeddings -------------------------------------------------------------------------


def get_embedding_group(check_initialized: bool = True) -> Any:
    """The group `embedding`, on its members."""
    return read("_EMBEDDING_GROUP", "embedding group", check_initialized)


def get_position_embedding_group(check_initialized: bool = True) -> Any:
    """The group `position_embedding`, on its members."""
    return read("_POSITION_EMBEDDING_GROUP", "position embedding group", check_initialized)


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
