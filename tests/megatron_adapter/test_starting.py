"""megatron.training and Megatron-Bridge start on commgrid's groups with one line added."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron_adapter.wheels import on_release
from tests.peers import parallel_state  # noqa: F401  (skips where there is no megatron-core)

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly("*0.1[78]*")
@pytest.mark.full("*0.19*")
@pytest.mark.parametrize("version", ["0.17.1", "0.18.2", "0.19.2"])
@pytest.mark.parametrize("name", ["training", "bridge", "decentralized"])
def test_one_line_is_added(name: str, version: str) -> None:
    on_release(version, "tests.megatron_adapter.starting", name)


def test_the_line_is_documented() -> None:
    page = (ROOT / "docs" / "from_megatron.md").read_text()
    for line in (
        "megatron_adapter.install()",
        'megatron_adapter.install(commgrid.initialize(config="grid.yaml"))',
        "megatron.bridge.training.initialize.HyperCommGrid = megatron_adapter.HyperCommGrid",
    ):
        assert line in page
