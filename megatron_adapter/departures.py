"""Answers of the adapter that differ from Megatron-core's by release, all of them its mistakes.

`python -m megatron_adapter departures` prints it.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_adapter.releases import RELEASES


class Departure(NamedTuple):
    """One answer that differs.

    Args:
        function: of `megatron.core.parallel_state`.
        since: the first series that has it.
        megatron: what Megatron does.
        adapter: what the adapter does.
    """

    function: str
    since: str
    megatron: str
    adapter: str


DEPARTURES = (
    Departure(
        "destroy_model_parallel()", "0.15",
        "leaves its groups registered in torch, and on gloo their threads and files; the next "
        "initialization finds variables of the one before",
        "destroys every group, and leaves the variables as they were",
    ),
    Departure(
        "get_hybrid_data_context_parallel_groups(group_size)", "0.16",
        "where a size does not divide dp · cp, the smaller rest stands under that size",
        "a group of that size, or a KeyError",
    ),
    Departure(
        "get_hybrid_data_context_parallel_groups(group_size)", "0.19",
        "with gtp_remat, dp_cp answers to the size of dp_cp · gtp, and its own is a KeyError",
        "dp_cp for its own size",
    ),
    Departure(
        "create_all_gather_groups()", "0.18",
        "takes the order tp-cp-ep-dp-pp and the ranks from 0, whatever the state has: its groups "
        "are not those of dp_cp and of the experts' data parallelism",
        "the ranks of dp_cp and edp, in any order and from any rank",
    ),
    Departure(
        "initialize_model_parallel(order)", "0.19",
        "an order that leaves out tp, of size 1, is a ValueError, since `gtp_remat` contains it",
        "the groups of that order, as before 0.19",
    ),
    Departure(
        "initialize_model_parallel(order)", "0.19",
        "in an order in capitals gtp_remat is the fastest axis, before tp",
        "it stands behind tp, and for experts behind ep, as in small letters",
    ),
)  # fmt: skip
"""In the order of the releases that brought them; each lasts to the newest."""


def as_markdown() -> str:
    """The table, a row each."""
    newest = RELEASES[-1].series
    lines = ["| releases | function | Megatron-core | the adapter |", "|---|---|---|---|"]
    lines += [
        f"| {one.since} to {newest} | `{one.function}` | {one.megatron} | {one.adapter} |"
        for one in DEPARTURES
    ]
    return "\n".join(lines)
