"""Megatron-core's arithmetic on ranks, and its own ways to make a group, on commgrid's layouts.

These are for code that makes further groups itself, through torch and by all ranks at once, as
Megatron's do. Grids do not use them.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from commgrid.errors import GridNotInitializedError
from commgrid.layout.rank_layout import RankLayout
from commgrid.layout.rank_text import describe_ranks
from commgrid.torch_compat import world as torch_world
from commgrid.torch_compat.groups import barrier
from commgrid.torch_compat.peer_errors import as_peer_error
from megatron_adapter.errors import MegatronSizeError, MegatronStateError
from megatron_adapter.parallel_state.access import peek, write
from megatron_adapter.state import STORE

_AXES = ("tp", "pp", "dp", "ep", "cp", "gtp_remat")


def generate_masked_orthogonal_rank_groups(
    world_size: int, parallel_size: list[int], mask: list[bool]
) -> list[list[int]]:
    """All groups along the masked axes.

    Args:
        world_size: the number of ranks, the product of `parallel_size`.
        parallel_size: sizes, the fastest-varying first.
        mask: which of these axes a group runs along.

    Returns:
        The groups' ranks, groups in the order of their first ranks.

    Raises:
        MegatronSizeError: sizes that do not make the world, or a mask of another length.

    Example:
        >>> generate_masked_orthogonal_rank_groups(8, [2, 2, 2], [False, True, False])
        [[0, 2], [1, 3], [4, 6], [5, 7]]
    """
    if len(mask) != len(parallel_size) or math.prod(parallel_size) != world_size:
        raise MegatronSizeError(
            f"parallel_size={parallel_size} and mask={mask}: expected equally many, and sizes "
            f"whose product is world_size={world_size}"
        )
    layout = RankLayout.from_sizes({f"axis{i}": size for i, size in enumerate(parallel_size)})
    axes = [f"axis{i}" for i, chosen in enumerate(mask) if chosen]
    return sorted(list(group) for group in layout.groups(*axes))


class RankGenerator:
    """The groups of one region, by axes: `get_ranks("tp-dp")`.

    Args:
        tp, ep, dp, pp, cp: sizes; one of ep and cp is 1.
        order: axes fastest first; axes of size 1 may be left out.
        rank_offset: the first rank.
        gtp_remat: over how many ranks weights are sharded.

    Raises:
        MegatronStateError: both ep and cp are above 1.
        MegatronSizeError: an axis of size above 1 that `order` lacks.
    """

    def __init__(
        self,
        tp: int,
        ep: int,
        dp: int,
        pp: int,
        cp: int,
        order: str,
        rank_offset: int = 0,
        gtp_remat: int = 1,
    ) -> None:
        if ep > 1 and cp > 1:
            raise MegatronStateError(
                f"ep={ep} and cp={cp}: dense layers have cp and experts ep; use a generator each"
            )
        self.tp, self.ep, self.dp, self.pp, self.cp = tp, ep, dp, pp, cp
        self.gtp_remat, self.rank_offset = gtp_remat, rank_offset
        self.world_size = tp * ep * dp * pp * cp * gtp_remat
        self.name_to_size = {name: getattr(self, name) for name in _AXES}
        placed = order.lower().split("-")
        for name, size in self.name_to_size.items():
            if name not in placed:
                if size != 1:
                    raise MegatronSizeError(
                        f"order={order!r}: {name} is missing, and its size is {size}"
                    )
                placed.append(name)
        self.order = "-".join(placed)
        self.ordered_size = [self.name_to_size[name] for name in placed]

    def get_mask(self, order: str, token: str) -> list[bool]:
        """The axes of `order` in `token`, both dash-joined."""
        wanted, placed = token.split("-"), order.split("-")
        for name in wanted:
            if name not in placed:
                raise MegatronSizeError(f"{token!r}: {name!r} is not in the order {order!r}")
        return [name in wanted for name in placed]

    def get_ranks(self, token: str) -> list[list[int]]:
        """All groups along the axes of `token`."""
        mask = self.get_mask(self.order, token)
        groups = generate_masked_orthogonal_rank_groups(self.world_size, self.ordered_size, mask)
        return [[rank + self.rank_offset for rank in group] for group in groups]

    def get_gtp_ranks(self, gtp_remat_size: int) -> list[list[int]]:
        """All groups over which weights are sharded; of one rank each without sharding.

        Raises:
            MegatronStateError: `gtp_remat_size` is not the generator's.
        """
        if gtp_remat_size != self.gtp_remat:
            raise MegatronStateError(
                f"gtp_remat_size={gtp_remat_size}: this generator has gtp_remat={self.gtp_remat}"
            )
        return self.get_ranks("gtp_remat")


def default_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """The first and the last of a pipeline."""
    return [pp_ranks[0]] if len(pp_ranks) == 1 else [pp_ranks[0], pp_ranks[-1]]


def default_position_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """The first of a pipeline."""
    return [pp_ranks[0]]


# -- making groups ----------------------------------------------------------------------


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


def create_hierarchical_groups(
    rank: int,
    ranks: list[int],
    hierarchical_group_sizes: list[int],
    create_gloo_process_groups: bool = False,
    pg_options: Any = None,
    timeout: timedelta | None = None,
    group_desc: str | None = None,
) -> tuple[list[Any], list[Any]]:
    """Groups of every level of some ranks, innermost level first, and their gloo twins.

    Args:
        rank: this rank.
        ranks: the ranks to cut into levels; their number is the product of the sizes.
        hierarchical_group_sizes: of the levels, innermost first.
        create_gloo_process_groups: whether there are twins; else these are None.
        pg_options: for all levels, or a list with those of each.
        timeout, group_desc: as torch takes them.

    Returns:
        This rank's groups and twins, a pair of lists; empty where it is not in `ranks`.
    """
    sizes = list(hierarchical_group_sizes)
    options = pg_options if isinstance(pg_options, list) else [pg_options] * len(sizes)
    groups: list[Any] = []
    twins: list[Any] = []
    for level in range(len(sizes)):
        mask = [i == level for i in range(len(sizes))]
        for positions in generate_masked_orthogonal_rank_groups(len(ranks), sizes, mask):
            members = [ranks[position] for position in positions]
            group = create_group(
                members, timeout=timeout, pg_options=options[level],
                group_desc=f"HIERARCHICAL_{group_desc}_L{level}",
            )  # fmt: skip
            twin = None
            if create_gloo_process_groups:
                twin = create_group(
                    members, timeout=timeout, backend="gloo",
                    group_desc=f"HIERARCHICAL_{group_desc}_GLOO_L{level}",
                )  # fmt: skip
            if rank in members:
                groups.append(group)
                twins.append(twin)
    return groups, twins


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


def create_hybrid_dp_cp_groups(rank: int, ranks: list[int], pg_options: Any) -> dict[int, Any]:
    """Groups of every power of two below the number of ranks: blocks of that many neighbours.

    Returns:
        Size to this rank's group. Ranks in the rest that a size leaves have none of that size.
    """
    found = {}
    size = 2
    while 2 * size <= len(ranks):
        for start in range(0, len(ranks) - size + 1, size):
            members = ranks[start : start + size]
            group = create_group(
                members, pg_options=pg_options, group_desc=f"HYBRID_DP_CP_GROUP_{size}"
            )
            if rank in members:
                found[size] = group
        size *= 2
    return found


def get_nccl_options(pg_name: str, nccl_comm_cfgs: dict[str, dict[str, Any]]) -> Any:
    """torch's NCCL options of a group, from Megatron's configuration; None: it has none.

    Raises:
        MegatronSizeError: a net_name other than IB or socket.
    """
    if pg_name not in nccl_comm_cfgs:
        return None
    given = nccl_comm_cfgs[pg_name]
    if str(given.get("net_name", "IB")).lower() not in ("ib", "socket"):
        raise MegatronSizeError(
            f"net_name ({given['net_name']}) is not supported; expected IB or socket"
        )
    options = dist.ProcessGroupNCCL.Options(
        is_high_priority_stream=given.get("is_high_priority_stream", False)
    )
    for key in ("cga_cluster_size", "max_ctas", "min_ctas", "net_name"):
        if key in given:
            setattr(options.config, key, given[key])
    return options


def overwrite_nccl_comm_cfgs(
    nccl_comm_cfgs: dict[str, dict[str, Any]], pg_name: str, key_value_pair: tuple[str, Any]
) -> None:
    """Sets one option of a group in a configuration."""
    key, value = key_value_pair
    nccl_comm_cfgs.setdefault(pg_name, {})[key] = value


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
