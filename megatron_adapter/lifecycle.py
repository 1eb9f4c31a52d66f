"""Megatron-core's way to start and end: `initialize_model_parallel`, `destroy_model_parallel`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

import commgrid
from commgrid.layout.rank_layout import RankLayout
from commgrid.layout.ranks import as_index
from commgrid.planning.audited import audit_sizes
from commgrid.planning.yaml_keys import DEFAULT_SHARE
from commgrid.rendezvous.timeouts import Seconds
from commgrid.runtime.grid import HyperCommGrid
from megatron_adapter.errors import MegatronSizeError, MegatronStateError
from megatron_adapter.grid_state import MegatronState
from megatron_adapter.spec import (
    CONNECT,
    DEFAULT_ORDER,
    SHARP,
    MegatronSizes,
    Pick,
    read_nccl_config,
)
from megatron_adapter.state import STORE

RanksOf = Callable[[list[int]], Sequence[int]]
"""From the ranks of a pipeline to the ones with a copy of something."""


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    pipeline_model_parallel_comm_backend: str | None = None,
    use_sharp: bool = False,
    context_parallel_size: int = 1,
    hierarchical_context_parallel_sizes: list[int] | None = None,
    *,
    hybrid_context_parallel: bool = False,
    expert_model_parallel_size: int = 1,
    gtp_remat_size: int = 1,
    expert_gtp_remat_size: int = 1,
    num_distributed_optimizer_instances: int = 1,
    expert_tensor_parallel_size: int | None = None,
    nccl_communicator_config_path: str | None = None,
    distributed_timeout_minutes: int = 30,
    order: str = DEFAULT_ORDER,
    get_embedding_ranks: RanksOf | None = None,
    get_position_embedding_ranks: RanksOf | None = None,
    create_gloo_process_groups: bool = True,
    high_priority_stream_groups: list[str] | None = None,
    sharp_enabled_group: str | None = None,
    create_all_gather_group: bool | None = False,
    rank_offset: int = 0,
    local_world_size: int | None = None,
    share: str = DEFAULT_SHARE,
    connect: str | Sequence[str] = CONNECT,
    startup_timeout: Seconds = 600.0,
    name: str = "default",
) -> HyperCommGrid:
    """One grid with exactly Megatron's groups, and Megatron's state read from it.

    Every parameter means what it means to megatron-core's function of this name, in the release
    that has it; the last four are commgrid's. Every rank of the grid calls it, with the same
    arguments.

    Args:
        tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size: sizes.
        virtual_pipeline_model_parallel_size: virtual stages of each rank.
        pipeline_model_parallel_comm_backend: None, "nccl" or "ucc".
        use_sharp: SHARP for one kind of data-parallel groups.
        hierarchical_context_parallel_sizes: levels of cp, innermost first.
        hybrid_context_parallel: groups of every power of two within dp · cp.
        expert_model_parallel_size, expert_tensor_parallel_size: sizes of the expert region.
        gtp_remat_size, expert_gtp_remat_size: over how many ranks weights, and the experts', are
            sharded to be gathered again where they are used (0.19).
        num_distributed_optimizer_instances: in how many parts dp is cut for the optimizer.
        nccl_communicator_config_path: YAML of NCCL options, by Megatron's names of groups.
        distributed_timeout_minutes: of collectives.
        order: axes fastest first.
        get_embedding_ranks, get_position_embedding_ranks: from a pipeline's ranks to the ones
            with an embedding; the same positions in every pipeline.
        create_gloo_process_groups: whether dp groups have twins over gloo.
        high_priority_stream_groups: Megatron's names of groups with streams of high priority.
        sharp_enabled_group: "dp" or "dp_replica".
        create_all_gather_group: whether dp_cp has a second communicator (0.16 and 0.17; later
            `create_all_gather_groups` makes it).
        rank_offset, local_world_size: the first rank and the number of ranks of the grid (0.17);
            None: as many as WORLD has. Other ranks may call it too, and get no state.
        share, startup_timeout, name: as `commgrid.initialize` takes them.
        connect: likewise; by default tp, cp, dp and pp connect now, the rest at first use, as
            all of Megatron's do.

    Returns:
        The grid; None on a rank that `rank_offset` and `local_world_size` leave out.

    Raises:
        MegatronSizeError: sizes that do not fit (a RuntimeError, as Megatron's); also where
            there is a state already.
        MegatronStateError: torch.distributed is not up, Megatron's state exists already, or
            what Megatron asserts does not hold (an AssertionError, as Megatron's).
        SpecError, GridMismatchError, PeerTimeoutError: see `commgrid.initialize`.
    """
    given = _audited(dict(locals()))
    sizes = check_sizes(given)
    _check_free(name)
    virtual = virtual_pipeline_model_parallel_size
    if sizes.offset is not None and dist.get_rank() - sizes.offset not in range(sizes.world_size):
        STORE.set_virtual_stages(virtual)
        # As commgrid.initialize does; the annotation is for the many who give no offset.
        return cast("HyperCommGrid", None)
    chosen = _choose(sizes, get_embedding_ranks, get_position_embedding_ranks)
    picks: dict[str, Any] = {one: tuple(sorted(positions)) for one, positions in chosen.items()}
    grid = commgrid.initialize(
        config=replace(sizes, **picks).spec(share=share, connect=connect),
        timeout=timedelta(minutes=distributed_timeout_minutes),
        startup_timeout=startup_timeout,
        name=name,
    )
    state = MegatronState(grid, owns_grid=True)
    if virtual is not None:
        state.values["_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK"] = 0
        state.values["_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"] = virtual
    for embedding, positions in chosen.items():
        variable = f"_{embedding.upper()}_GLOBAL_RANKS"
        if state.values[variable] is not None:  # in the order in which the function named them
            state.values[variable] = [grid.get_ranks("pp")[i] for i in positions]
    STORE.add(STORE.keep(state))
    return grid


_SIZES = {
    "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size", "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}  # fmt: skip


def _audited(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments, with an audit's sizes where one runs."""
    sizes = audit_sizes(**{axis: given[name] for axis, name in _SIZES.items()})
    return {**given, **{name: sizes[axis] for axis, name in _SIZES.items()}}


PARAMETERS = inspect.signature(initialize_model_parallel).parameters
OWN = ("share", "connect", "startup_timeout", "name")
"""What `initialize_model_parallel` takes that megatron-core's does not."""


def check_sizes(given: Mapping[str, Any]) -> MegatronSizes:
    """The arguments of `initialize_model_parallel` about groups, checked in Megatron's order.

    Raises:
        MegatronStateError, MegatronSizeError, SpecError: as `initialize_model_parallel`.
    """
    given = {**{name: one.default for name, one in PARAMETERS.items()}, **given}
    instances = given["num_distributed_optimizer_instances"]
    sharp = _sharp_group(given["use_sharp"], given["sharp_enabled_group"], instances)
    if not dist.is_initialized():
        raise MegatronStateError(
            "torch.distributed is not initialized; call torch.distributed.init_process_group "
            "before initialize_model_parallel, as Megatron wants it"
        )
    offset, world_size = _ranks(given["rank_offset"], given["local_world_size"])
    nccl = read_nccl_config(
        given["nccl_communicator_config_path"], given["high_priority_stream_groups"]
    )
    if sharp is not None:
        nccl.setdefault(sharp, {})[SHARP] = 1
    sizes = MegatronSizes(
        world_size=world_size,
        offset=offset,
        tp=given["tensor_model_parallel_size"],
        pp=given["pipeline_model_parallel_size"],
        cp=given["context_parallel_size"],
        ep=given["expert_model_parallel_size"],
        etp=given["expert_tensor_parallel_size"],
        gtp=given["gtp_remat_size"],
        egtp=given["expert_gtp_remat_size"],
        instances=instances,
        order=given["order"],
        hierarchical=tuple(given["hierarchical_context_parallel_sizes"] or ()),
        hybrid=given["hybrid_context_parallel"],
        gloo=given["create_gloo_process_groups"],
        all_gather=bool(given["create_all_gather_group"]),
        pipeline_backend=given["pipeline_model_parallel_comm_backend"],
        backend=dist.get_backend_config(),
        nccl=nccl,
    )
    virtual = given["virtual_pipeline_model_parallel_size"]
    if virtual is not None and sizes.pp == 1:
        raise MegatronSizeError(
            f"virtual_pipeline_model_parallel_size={virtual} needs a "
            f"pipeline_model_parallel_size above 1, not {sizes.pp}"
        )
    sizes.check()
    return sizes


def _ranks(rank_offset: Any, local_world_size: Any) -> tuple[int | None, int]:
    """The first rank of the grid, None where it is the world, and how many there are."""
    world = dist.get_world_size()
    offset = as_index(rank_offset)
    size = world if local_world_size is None else as_index(local_world_size)
    if offset is None or size is None or offset < 0 or size < 1 or offset + size > world:
        raise MegatronSizeError(
            f"rank_offset={rank_offset!r} and local_world_size={local_world_size!r}: expected a "
            f"first rank and a number of ranks from there, within the {world} ranks of WORLD"
        )
    return (None if size == world else offset), size


def _check_free(name: str) -> None:
    """Refuses a second state of one name."""
    if any(state.grid.name == name for state in STORE.states):
        raise MegatronStateError(
            f"model parallel is already initialized on grid {name!r}; call destroy_model_parallel "
            "first, or give another name="
        )


def _sharp_group(use_sharp: bool, group: str | None, instances: int) -> str | None:
    """Megatron's name of the group that uses SHARP."""
    if not use_sharp:
        if group is not None:
            raise MegatronStateError(
                f"sharp_enabled_group={group!r} means something only with use_sharp=True; "
                "leave it out, or give both"
            )
        return None
    if group not in (None, "dp", "dp_replica"):
        raise MegatronStateError(f"sharp_enabled_group={group!r}; expected dp or dp_replica")
    if group == "dp_replica" and instances < 2:
        raise MegatronStateError(
            "sharp_enabled_group='dp_replica' needs num_distributed_optimizer_instances above 1"
        )
    return "inter_ep_dp" if group == "dp_replica" else "dp_cp"


def _choose(
    sizes: MegatronSizes, embedding: RanksOf | None, position_embedding: RanksOf | None
) -> dict[str, Pick]:
    """Where in its pipeline the ranks are that functions choose for an embedding."""
    dense, _ = sizes.axes()
    layout = RankLayout.from_sizes(dense, offset=sizes.offset or 0)
    pipeline = list(layout.group(dist.get_rank(), "pp"))
    found = {}
    functions = {"embedding": embedding, "position_embedding": position_embedding}
    for name, function in functions.items():
        if function is None:
            continue
        chosen = list(function(list(pipeline)))
        if not set(chosen) <= set(pipeline) or len(set(chosen)) < len(chosen):
            raise MegatronStateError(
                f"get_{name}_ranks answered {chosen} for the pipeline {pipeline}; expected some "
                "of its ranks, each once"
            )
        found[name] = tuple(pipeline.index(rank) for rank in chosen)
    return found


def destroy_model_parallel() -> None:
    """Ends Megatron's state: destroys the grid that `initialize_model_parallel` made.

    A grid that was given to `install` is left to its owner. Destroying nothing is fine.

    Raises:
        AmbiguousGridError: several grids are alive and none was chosen.
    """
    state = STORE.current
    if state is None:
        STORE.clear()
        return
    if state.owns_grid:
        commgrid.destroy(state.grid.name)
    STORE.remove(state)
