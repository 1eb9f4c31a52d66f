"""Megatron-core's bridges, MIMO, multi-module schedules and resharding on commgrid's grids."""

from __future__ import annotations

import pytest

from tests.megatron_adapter.wheels import on_release
from tests.peers import parallel_state  # noqa: F401  (skips where there is no megatron-core)


@pytest.mark.full("bridge", "mimo", "reshard", "schedule")
@pytest.mark.parametrize("name", ["bridge", "colocated", "mimo", "schedule", "reshard"])
def test_on_the_adapters_grids_as_on_megatrons(name: str) -> None:
    on_release("0.19.2", "tests.megatron_adapter.modules", name)
