"""What the adapter answers otherwise than Megatron-core: its mistakes alone, and each is shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_adapter import SUPPORTED
from tests.megatron_adapter.wheels import on_release
from tests.peers import parallel_state  # noqa: F401  (skips where there is no megatron-core)

ROOT = Path(__file__).parents[2]
HERE = "tests.megatron_adapter.departing"

SHOWN = {
    ("destroy_model_parallel()", "0.15"): "what_destroy_leaves",
    ("get_hybrid_data_context_parallel_groups(group_size)", "0.16"):
        "test_options.py::test_hybrid_groups_have_the_size_they_are_asked_by",
    ("get_hybrid_data_context_parallel_groups(group_size)", "0.19"):
        "hybrid_groups_beside_sharded_weights",
    ("create_all_gather_groups()", "0.18"): "all_gather_groups",
    ("initialize_model_parallel(order)", "0.19"): "an_order_without_tp an_order_in_capitals",
}  # fmt: skip
"""What shows each of them: a function of `departing`, or a test of this folder."""


def test_every_departure_is_shown() -> None:
    page = (ROOT / "docs" / "from_megatron.md").read_text()
    rows = re.findall(r"^\| ([\d.]+) to \d.* \| `(\w+\(\w*\))` \|", page, re.M)
    assert {(function, since) for since, function in rows} == set(SHOWN)
    assert len(rows) == sum(len(names.split()) for names in SHOWN.values())
    for names in SHOWN.values():
        for name in names.split():
            file, _, test = name.rpartition("::")
            text = (ROOT / "tests/megatron_adapter" / (file or "departing.py")).read_text()
            assert f"def {test}(" in text


@pytest.mark.nightly("0.15-*", "0.18-*", "0.19-*")
@pytest.mark.parametrize(
    ("since", "name"),
    [
        (since, name)
        for (_, since), names in SHOWN.items() for name in names.split() if "::" not in name
    ],
)  # fmt: skip
def test_megatron_is_mistaken_and_the_adapter_is_not(since: str, name: str) -> None:
    """On the first release that has the mistake, and on the newest that is on the index."""
    first = next(version for version in SUPPORTED if version.startswith(f"{since}."))
    for version in dict.fromkeys((first, SUPPORTED[-1])):
        on_release(version, HERE, name)
