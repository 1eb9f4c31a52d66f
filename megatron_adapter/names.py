"""The commgrid group for each of Megatron-core's groups; `python -m megatron_adapter names`.

The table covers all supported releases. Megatron's state, the grid's additional groups and the
fields of a ProcessGroupCollection are derived from it.

Where weights are sharded and gathered again (Megatron's GTP, its `gtp_remat` axes), the grid has an
axis `gtp` in its dense region, `egtp` in the experts', or both. Some of Megatron's groups then span
it, and some exist only then.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple


class MegatronGroup(NamedTuple):
    """One group of Megatron-core.

    Args:
        getter: the function of `megatron.core.parallel_state`, with its argument if it has one.
        name: the commgrid group of the same ranks.
        state: the variable of that module which holds it.
        ranks: the variable with its ranks, if there is one.
        field: of a ProcessGroupCollection.
        options: its key in an NCCL configuration file.
        made_of: description, if the group is no combination of axes.
        with_gtp: its name instead where the grid has the axis `gtp`.
        without_gtp: the group with the same ranks on a grid without this group's gtp axis.
    """

    getter: str
    name: str
    state: str
    ranks: str | None = None
    field: str | None = None
    options: str | None = None
    made_of: str = ""
    with_gtp: str | None = None
    without_gtp: str | None = None

    def name_on(self, axes: Container[str]) -> str:
        """The name of its ranks on a grid with these axes.

        >>> full = next(group for group in MEGATRON_GROUPS if group.name == "edp_egtp")
        >>> full.name_on(["tp", "egtp"]), full.name_on(["tp", "gtp"])
        ('edp_egtp', 'edp')
        """
        if self.with_gtp is not None and "gtp" in axes:
            return self.with_gtp
        axis = "egtp" if "egtp" in self.name else "gtp"
        if self.without_gtp is not None and axis not in axes:
            return self.without_gtp
        return self.name


_WITH_CP = "with_context_parallel=True"
_PARTIAL = "partial_data_parallel=True"
_PARTIAL_EXPERT = "partial_expert_data_parallel=True"
_FULL = "with_gtp_remat=True"

MEGATRON_GROUPS = (
    MegatronGroup(
        "get_tensor_model_parallel_group()", "tp", "_TENSOR_MODEL_PARALLEL_GROUP",
        "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS", "tp", "tp",
    ),
    MegatronGroup(
        "get_pipeline_model_parallel_group()", "pp", "_PIPELINE_MODEL_PARALLEL_GROUP",
        "_PIPELINE_GLOBAL_RANKS", "pp", "pp",
    ),
    MegatronGroup(
        "get_model_parallel_group()", "pp_tp", "_MODEL_PARALLEL_GROUP",
        "_MODEL_PARALLEL_GLOBAL_RANKS", "mp", "mp", with_gtp="pp_gtp_tp",
    ),
    MegatronGroup(
        "get_data_parallel_group()", "dp", "_DATA_PARALLEL_GROUP",
        "_DATA_PARALLEL_GLOBAL_RANKS", "dp", "dp",
    ),
    MegatronGroup(
        "get_data_parallel_group_gloo()", "dp_gloo", "_DATA_PARALLEL_GROUP_GLOO",
        made_of="dp over gloo",
    ),
    MegatronGroup(
        f"get_data_parallel_group({_WITH_CP})", "dp_cp", "_DATA_PARALLEL_GROUP_WITH_CP",
        "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP", "dp_cp", "dp_cp",
    ),
    MegatronGroup(
        f"get_data_parallel_group({_WITH_CP}, independent_all_gather=True)", "dp_cp_ag",
        "_DATA_PARALLEL_GROUP_WITH_CP_AG", None, "dp_cp_ag",
        made_of="dp_cp, a communicator of its own",
    ),
    MegatronGroup(
        f"get_data_parallel_group_gloo({_WITH_CP})", "dp_cp_gloo",
        "_DATA_PARALLEL_GROUP_WITH_CP_GLOO", made_of="dp_cp over gloo",
    ),
    MegatronGroup(
        f"get_data_parallel_group({_WITH_CP}, {_PARTIAL})", "intra_dp_cp",
        "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", None, "intra_dp_cp", "intra_dp_cp",
        "dp_cp within one optimizer instance",
    ),
    MegatronGroup(
        f"get_data_parallel_group_gloo({_WITH_CP}, {_PARTIAL})", "intra_dp_cp_gloo",
        "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO", made_of="intra_dp_cp over gloo",
    ),
    MegatronGroup(
        "get_context_parallel_group()", "cp", "_CONTEXT_PARALLEL_GROUP",
        "_CONTEXT_PARALLEL_GLOBAL_RANKS", "cp", "cp",
    ),
    MegatronGroup(
        "get_tensor_and_context_parallel_group()", "cp_tp", "_TENSOR_AND_CONTEXT_PARALLEL_GROUP",
        None, "tp_cp", "tp_cp",
    ),
    MegatronGroup(
        "get_tensor_and_data_parallel_group()", "dp_tp", "_TENSOR_AND_DATA_PARALLEL_GROUP",
        options="tp_dp", with_gtp="dp_gtp_tp",
    ),
    MegatronGroup(
        f"get_tensor_and_data_parallel_group({_WITH_CP})", "dp_cp_tp",
        "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", None, "tp_dp_cp", "tp_dp_cp",
        with_gtp="dp_cp_gtp_tp",
    ),
    MegatronGroup(
        "get_embedding_group()", "embedding", "_EMBEDDING_GROUP", "_EMBEDDING_GLOBAL_RANKS",
        "embd", "embd", "the first and last of pp",
    ),
    MegatronGroup(
        "get_position_embedding_group()", "position_embedding", "_POSITION_EMBEDDING_GROUP",
        "_POSITION_EMBEDDING_GLOBAL_RANKS", "pos_embd", "pos_embd", "the first of pp",
    ),
    MegatronGroup(
        "get_expert_model_parallel_group()", "ep", "_EXPERT_MODEL_PARALLEL_GROUP",
        "_EXPERT_MODEL_PARALLEL_RANKS", "ep", "ep",
    ),
    MegatronGroup(
        "get_expert_tensor_parallel_group()", "etp", "_EXPERT_TENSOR_PARALLEL_GROUP",
        None, "expt_tp", "ep_tp",
    ),
    MegatronGroup(
        "get_expert_tensor_and_model_parallel_group()", "ep_etp",
        "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", None, "tp_ep", "tp_ep_mp",
    ),
    MegatronGroup(
        "get_expert_tensor_model_pipeline_parallel_group()", "pp_ep_etp",
        "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP", None, "tp_ep_pp", "tp_ep_pp",
    ),
    MegatronGroup(
        "get_expert_data_parallel_group()", "edp", "_EXPERT_DATA_PARALLEL_GROUP",
        None, "expt_dp", "ep_dp",
    ),
    MegatronGroup(
        "get_expert_data_parallel_group_gloo()", "edp_gloo", "_EXPERT_DATA_PARALLEL_GROUP_GLOO",
        made_of="edp over gloo",
    ),
    MegatronGroup(
        f"get_expert_data_parallel_group({_PARTIAL_EXPERT})", "intra_edp",
        "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", None, "intra_expt_dp", "intra_ep_dp",
        "edp within one optimizer instance",
    ),
    MegatronGroup(
        f"get_expert_data_parallel_group_gloo({_PARTIAL_EXPERT})", "intra_edp_gloo",
        "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO", made_of="intra_edp over gloo",
    ),
    MegatronGroup(
        "get_inter_distributed_optimizer_instance_group()", "inter_edp",
        "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", None, "inter_dist_opt", "inter_ep_dp",
        "the same place of edp in every optimizer instance",
    ),
    MegatronGroup(
        "get_intra_distributed_optimizer_instance_group()", "intra_dist_opt",
        "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", None, "intra_dist_opt",
        "intra_dist_opt_instance", "all ranks of one optimizer instance",
    ),
    MegatronGroup(
        "create_all_gather_groups(for_expert_parallelism=True)[1]", "edp_ag",
        "_EXPERT_DATA_PARALLEL_GROUP_AG", None, "expt_dp_ag",
        made_of="edp, a communicator of its own",
    ),
    MegatronGroup(
        "get_gtp_weight_remat_group()", "gtp", "_GTP_WEIGHT_REMAT_GROUP",
        "_GTP_WEIGHT_REMAT_GLOBAL_RANKS", "gtp_remat", "gtp_remat",
    ),
    MegatronGroup(
        f"get_data_parallel_group({_FULL})", "dp_gtp", "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT",
        options="gtp_remat_dp", without_gtp="dp",
    ),
    MegatronGroup(
        f"get_data_parallel_group({_WITH_CP}, {_FULL})", "dp_cp_gtp",
        "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT", None, "dp_cp_gtp_remat", "gtp_remat_dp_cp",
        without_gtp="dp_cp",
    ),
    MegatronGroup(
        f"get_data_parallel_group({_WITH_CP}, {_FULL}, {_PARTIAL})", "dp_cp_gtp",
        "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT", without_gtp="intra_dp_cp",
    ),
    MegatronGroup(
        "get_expert_gtp_weight_remat_group()", "egtp", "_EXPERT_GTP_WEIGHT_REMAT_GROUP",
        "_EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS", "expt_gtp_remat", "expt_gtp_remat",
    ),
    MegatronGroup(
        f"get_expert_data_parallel_group({_FULL})", "edp_egtp",
        "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT", None, "expt_dp_gtp_remat", "ep_gtp_remat_dp",
        without_gtp="edp",
    ),
    MegatronGroup(
        f"get_expert_data_parallel_group({_FULL}, {_PARTIAL_EXPERT})", "edp_egtp",
        "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT", without_gtp="intra_edp",
    ),
    MegatronGroup(
        "get_expert_tensor_model_pipeline_parallel_group(with_egtp_remat=True)", "pp_egtp_ep_etp",
        "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP", None, "tp_ep_pp_with_egtp_remat",
        "tp_ep_gtp_remat_pp", without_gtp="pp_ep_etp",
    ),
)  # fmt: skip
"""Megatron-core's groups, apart from `hcp_0`, `hcp_1`, … (levels of hierarchical context
parallelism) and `hybrid_2`, `hybrid_4`, … (parts of dp_cp)."""

OPTIONAL = frozenset({"dp_cp_ag", "edp_ag", "inter_edp"})
"""Groups that exist only where their option asks for them, besides those over gloo."""


def hierarchical_name(level: int) -> str:
    """Name of a level's group in hierarchical context parallelism; 0 is the innermost level."""
    return f"hcp_{level}"


def hybrid_name(size: int, block: int | None = None) -> str:
    """Name of a part of dp_cp with `size` ranks, and the block's number if dp_cp has several."""
    return f"hybrid_{size}" if block is None else f"hybrid_{size}_{block}"


def as_text() -> str:
    """The mapping as a table."""
    wide = max(len(group.getter) for group in MEGATRON_GROUPS)
    name = max(len(group.name) for group in MEGATRON_GROUPS)
    lines = [
        f"{'megatron.core.parallel_state':{wide}}  {'commgrid':{name}}  {'collection':24} note"
    ]
    for group in MEGATRON_GROUPS:
        made_of = group.made_of
        if group.without_gtp is not None:
            made_of = f"{group.without_gtp} where the grid has no axis for it"
        if group.with_gtp is not None:
            made_of = f"{group.with_gtp} where the grid has gtp"
        lines.append(
            f"{group.getter:{wide}}  {group.name:{name}}  {group.field or '':24} {made_of}"
        )
    lines += [
        f"{'get_hierarchical_context_parallel_groups()':{wide}}  {'hcp_0, hcp_1, …':{name}}  hcp",
        f"{'get_hybrid_data_context_parallel_groups(group_size=n)':{wide}}  hybrid_n",
    ]
    return "\n".join(line.rstrip() for line in lines)
