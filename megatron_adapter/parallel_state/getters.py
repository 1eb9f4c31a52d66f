"""Megatron-core's getters as a table: a row for each group, from which its functions are made.

A row `context_parallel` makes `get_context_parallel_group`, `_rank`, `_world_size` and
`_global_ranks`. Functions with a rule of their own are in `oddities`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from commgrid.torch_compat.world import is_initialized as is_up
from megatron_adapter.parallel_state.access import peek, read, write


@dataclass(frozen=True)
class Row:
    """A group, and which functions Megatron-core has for it.

    Args:
        name: within the functions' names.
        group: commgrid's, for docstrings.
        what: the group, in errors.
        variable: where the group is.
        sizes: whether there are `_rank` and `_world_size`, and what they say without the group:
            an error; an error only where torch.distributed is up, else 0; or 0.
        is_set: whether a program may set what they say.
        ranks: where its global ranks are; "": no function returns any.
        returns: all of its ranks, or the first.
        ending: of the function that returns it.
    """

    name: str
    group: str
    what: str
    variable: str
    sizes: Literal["", "group", "0 without torch", "0 without group"] = ""
    is_set: bool = False
    ranks: str = ""
    returns: Literal["all", "first"] = "all"
    ending: str = "_group"

    @property
    def overrides(self) -> tuple[str, str]:
        """Where what a program has set as world size and rank is kept."""
        return f"_MPU_{self.name.upper()}_WORLD_SIZE", f"_MPU_{self.name.upper()}_RANK"


TP = Row(
    "tensor_model_parallel", "tp", "tensor model parallel group", "_TENSOR_MODEL_PARALLEL_GROUP",
    "group", True, "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS", "first",
)  # fmt: skip
ETP = Row(
    "expert_tensor_parallel", "etp", "expert tensor parallel group", "_EXPERT_TENSOR_PARALLEL_GROUP"
)
ROWS = (
    TP,
    Row(
        "model_parallel", "pp_tp", "model parallel group", "_MODEL_PARALLEL_GROUP", "group",
        ranks="_MODEL_PARALLEL_GLOBAL_RANKS", returns="first",
    ),
    Row(
        "pipeline_model_parallel", "pp", "pipeline model parallel group",
        "_PIPELINE_MODEL_PARALLEL_GROUP", "group", True,
    ),
    Row(
        "context_parallel", "cp", "context parallel group", "_CONTEXT_PARALLEL_GROUP",
        "0 without torch", ranks="_CONTEXT_PARALLEL_GLOBAL_RANKS",
    ),
    Row(
        "hierarchical_context_parallel", "cp of each level, innermost first,",
        "hierarchical context parallelism", "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS",
        ending="_groups",
    ),
    Row(
        "tensor_and_context_parallel", "cp_tp", "tensor and context parallel group",
        "_TENSOR_AND_CONTEXT_PARALLEL_GROUP", "0 without torch",
    ),
    Row(
        "gtp_weight_remat", "gtp", "group of sharded weights", "_GTP_WEIGHT_REMAT_GROUP",
        "0 without group", ranks="_GTP_WEIGHT_REMAT_GLOBAL_RANKS",
    ),
    Row("embedding", "embedding", "embedding group", "_EMBEDDING_GROUP"),
    Row(
        "position_embedding", "position_embedding", "position embedding group",
        "_POSITION_EMBEDDING_GROUP",
    ),
    Row(
        "expert_model_parallel", "ep", "expert model parallel group",
        "_EXPERT_MODEL_PARALLEL_GROUP", "0 without torch", True, "_EXPERT_MODEL_PARALLEL_RANKS",
        "first",
    ),
    ETP,
    Row(
        "expert_tensor_and_model_parallel", "ep_etp", "expert tensor and model parallel group",
        "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "0 without torch",
    ),
    Row(
        "expert_gtp_weight_remat", "egtp", "group of experts' sharded weights",
        "_EXPERT_GTP_WEIGHT_REMAT_GROUP", "0 without group",
        ranks="_EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS",
    ),
    Row(
        "intra_distributed_optimizer_instance", "intra_dist_opt",
        "intra distributed optimizer instance group",
        "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
    ),
    Row(
        "inter_distributed_optimizer_instance", "inter_edp",
        "inter distributed optimizer instance group", "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
    ),
)  # fmt: skip

Made = Callable[..., Any]


def _functions(row: Row) -> dict[str, tuple[Made, str]]:
    """The functions of a row by name, each with its docstring."""
    group = f"`{row.group}`"
    found: dict[str, tuple[Made, str]] = {
        f"get_{row.name}{row.ending}": (_reads(row.variable, row.what), f"The group {group}.")
    }
    if row.sizes:
        rule = ", or what it was set to" * row.is_set + _RULES[row.sizes]
        size, rank = row.overrides if row.is_set else ("", "")
        for ending, method, override, said in (
            ("world_size", "size", size, f"The size of {group}{rule}."),
            ("rank", "rank", rank, f"This rank's place in {group}{rule}."),
        ):
            found[f"get_{row.name}_{ending}"] = _asks(row, method, override), said
    if row.is_set:
        for what, variable in zip(("world_size", "rank"), row.overrides, strict=True):
            found[f"set_{row.name}_{what}"] = set_to(variable, row.name, what)
    if row.ranks and row.returns == "all":
        ranks = _reads(row.ranks, row.what)
        found[f"get_{row.name}_global_ranks"] = ranks, f"The global ranks of {group}, as a list."
    elif row.ranks:
        first = _first(row.ranks, row.what)
        found[f"get_{row.name}_src_rank"] = first, f"The global rank of the first in {group}."
    return found


_RULES = {
    "group": "", "0 without torch": "; 0 without torch.distributed",
    "0 without group": "; 0 where there is none",
}  # fmt: skip


def _reads(variable: str, what: str) -> Made:
    def get(check_initialized: bool = True) -> Any:
        return read(variable, what, check_initialized)

    return get


def _first(variable: str, what: str) -> Made:
    def get() -> int:
        first: int = read(variable, what)[0]
        return first

    return get


def _asks(row: Row, method: str, override: str) -> Made:
    is_strict = row.sizes != "0 without group"

    def get() -> int:
        said: int | None = peek(override) if override else None
        if said is not None:
            return said
        if row.sizes != "group" and not is_up():
            return 0
        group = read(row.variable, row.what, is_strict)
        asked: int = 0 if group is None else getattr(group, method)()
        return asked

    return get


def set_to(variable: str, name: str, what: str) -> tuple[Made, str]:
    """A function that sets what a getter says."""
    said = f"Makes `get_{name}_{what}` say this; None: the group's again."
    if what == "rank":

        def set_rank(rank: int | None) -> None:
            write(variable, rank)

        return set_rank, said

    def set_size(world_size: int | None) -> None:
        write(variable, world_size)

    return set_size, said


def _publish() -> list[str]:
    made = {name: both for row in ROWS for name, both in _functions(row).items()}
    for what, variable in zip(("world_size", "rank"), ETP.overrides, strict=True):
        made[f"set_{ETP.name}_{what}"] = set_to(variable, ETP.name, what)
    made["set_data_parallel_rank"] = set_to("_MPU_DATA_PARALLEL_RANK", "data_parallel", "rank")
    for name, (function, said) in made.items():
        function.__name__ = function.__qualname__ = name
        function.__doc__ = said
        globals()[name] = function
    return sorted(made)


__all__ = _publish()


if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
