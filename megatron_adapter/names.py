"""Which commgrid group each of Megatron-core's getters means; `python -m megatron_adapter names`.

As in `megatron.core.parallel_state` of megatron-core 0.16.1.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class MegatronGroup(NamedTuple):
    """One group of Megatron-core.

    Args:
        getter: the function of `megatron.core.parallel_state`, with its argument if it has one.
        name: the commgrid group of the same ranks.
        entry: the row of the groups table it needs, where it is no combination of axes.
    """

    getter: str
    name: str
    entry: dict[str, Any] | None = None


MEGATRON_GROUPS = (
    MegatronGroup("get_tensor_model_parallel_group()", "tp"),
    MegatronGroup("get_pipeline_model_parallel_group()", "pp"),
    MegatronGroup("get_model_parallel_group()", "pp_tp"),
    MegatronGroup("get_data_parallel_group()", "dp"),
    MegatronGroup("get_data_parallel_group(with_context_parallel=True)", "dp_cp"),
    MegatronGroup("get_context_parallel_group()", "cp"),
    MegatronGroup("get_tensor_and_context_parallel_group()", "cp_tp"),
    MegatronGroup("get_tensor_and_data_parallel_group()", "dp_tp"),
    MegatronGroup("get_tensor_and_data_parallel_group(with_context_parallel=True)", "dp_cp_tp"),
    MegatronGroup("get_embedding_group()", "embedding", {"of": "pp", "pick": ["first", "last"]}),
    MegatronGroup(
        "get_position_embedding_group()", "position_embedding", {"of": "pp", "pick": ["first"]}
    ),
    MegatronGroup("get_expert_model_parallel_group()", "ep"),
    MegatronGroup("get_expert_tensor_parallel_group()", "etp"),
    MegatronGroup("get_expert_tensor_and_model_parallel_group()", "ep_etp"),
    MegatronGroup("get_expert_tensor_model_pipeline_parallel_group()", "pp_ep_etp"),
    MegatronGroup("get_expert_data_parallel_group()", "edp"),
)
"""Every group that Megatron's default initialisation creates. Its `partial_*` variants are
the same groups while there is one distributed-optimizer instance."""


def megatron_names(*, experts: bool) -> dict[str, Any]:
    """`create` and `groups` of a grid that has Megatron's groups and no others.

    Example:
        >>> sorted(megatron_names(experts=False)["groups"])
        ['embedding', 'position_embedding']
    """
    expert = {"ep", "etp", "edp"}
    wanted = [g for g in MEGATRON_GROUPS if experts or expert.isdisjoint(g.name.split("_"))]
    return {
        "create": [group.name for group in wanted if group.entry is None],
        "groups": {group.name: group.entry for group in wanted if group.entry is not None},
    }


def as_text() -> str:
    """The mapping as a table."""
    width = max(len(group.getter) for group in MEGATRON_GROUPS)
    lines = [f"{'megatron.core.parallel_state':{width}}  commgrid"]
    for group in MEGATRON_GROUPS:
        entry = f"  (groups: {{{group.name}: {group.entry}}})" if group.entry else ""
        lines.append(f"{group.getter:{width}}  {group.name}{entry}")
    return "\n".join(lines)
