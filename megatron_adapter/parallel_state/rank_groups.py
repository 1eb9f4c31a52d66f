"""Megatron-core's functions for further groups beside a grid's, and for the timeout of all."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from commgrid.errors import GridNotInitializedError
from commgrid.layout.rank_text import describe_ranks
from commgrid.torch_compat import world as torch_world
from commgrid.torch_compat.groups import barrier
from commgrid.torch_compat.peer_errors import as_peer_error
from megatron_adapter.parallel_state.access import peek, write
from megatron_adapter.state import STORE


def create_group(
    ranks: list[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
) -> Any:
    """`torch.distributed.new_group`; `update_pg_timeout` knows the group from then on.

    Raises:
        PeerTimeoutError: the store is gone, or a member is gone or did not answer in time.
        CommGridError: any other error of torch's.
    """
    known = peek("_global_process_group_list") or [None]
    try:
        group = dist.new_group(
            ranks, timeout, backend, pg_options, use_local_synchronization, group_desc
        )
    except RuntimeError as error:
        of = "all ranks" if ranks is None else describe_ranks(sorted(ranks))
        what = f"rank {dist.get_rank()}: group {group_desc or ''!r} of {of} cannot be created"
        raise as_peer_error(what, error) from error
    if ranks is None or dist.get_rank() in ranks:
        write("_global_process_group_list", [*known, group])
    return group


def create_all_gather_groups(
    for_expert_parallelism: bool = False,
    timeout: timedelta | None = None,
    nccl_comm_cfgs: dict[str, dict[str, Any]] | None = None,
) -> tuple[Any, Any]:
    """Second communicators of `dp_cp` and `edp`, for gathers beside reduce-scatters.

    Every rank of the grid that is asked calls it. They have that grid's ranks in its order
    (Megatron's own function takes the default order from rank 0), and live as long as its state.

    Args:
        for_expert_parallelism: whether `edp` gets one, where ep is above 1.
        timeout: of collectives; None: the grid's.
        nccl_comm_cfgs: options, under `dp_cp` and `ep_dp`.

    Returns:
        The groups of this rank; the second one is None where there is none.

    Raises:
        GridNotInitializedError: there is no grid (a RuntimeError, as Megatron's).
    """
    state = STORE.current
    if state is None:
        raise GridNotInitializedError(
            "create_all_gather_groups needs a grid; call initialize_model_parallel first, or "
            "choose a grid with megatron_adapter.active or install"
        )
    group = state.values["_EXPERT_MODEL_PARALLEL_GROUP"]
    wanted = {"dp_cp_all_gather": ("dp_cp", "dp_cp")}
    if for_expert_parallelism and group is not None and group.size() > 1:
        parts = "intra_edp" in state.grid.shape
        wanted["edp_all_gather"] = ("inter_edp_intra_edp" if parts else "edp", "ep_dp")
    rows = {
        name: {
            "of": of,
            "own": True,
            "timeout": None if timeout is None else timeout.total_seconds(),
            "nccl": dict((nccl_comm_cfgs or {}).get(key, {})),
        }
        for name, (of, key) in wanted.items()
    }
    made = state.create(rows)
    return made[0], made[1] if len(made) > 1 else None


def update_pg_timeout(timeout: timedelta, pg: dist.ProcessGroup | None = None) -> None:
    """Gives every group of the grid that is asked another timeout; or one group.

    WORLD gets it too, unless the grid covers a part of it. All ranks of the grid (or group) call
    it, since it waits for them first.
    """
    state = STORE.current
    groups = [pg] if pg is not None else peek("_global_process_group_list") or [None]
    everyone, others = pg, None
    if pg is None and state is not None and state.grid.world_size < dist.get_world_size():
        groups = groups[1:]
        # All ranks of an optimizer instance, then one of each: together all ranks of the grid.
        everyone = peek("_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP")
        others = peek("_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP")
    barrier(everyone)
    if others is not None:
        barrier(others)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    for group in groups:
        made = group or dist.group.WORLD
        assert made is not None
        torch_world.set_timeout(made, timeout)
