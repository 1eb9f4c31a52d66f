"""The group argument of a bridge."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import commgrid
from commgrid import GridDestroyedError, SpecError
from commgrid.bridge import Bridge


@pytest.mark.parametrize("group", [None, 7, ("dp", "tp", "pp")])
def test_a_bridge_over_no_group_is_refused(group: Any) -> None:
    grid = commgrid.initialize()
    with pytest.raises(SpecError, match=r"^group=.*: expected a name, or the source's and the"):
        Bridge(grid, grid, group=group)
    commgrid.shutdown()


@pytest.mark.parametrize("group", ["dp", ("dp", "tp"), ["dp", "dp"]])
def test_a_bridge_over_a_name_or_two_is_made(group: Any) -> None:
    grid = commgrid.initialize()
    bridge = Bridge(grid, grid, group=group)
    x = torch.arange(6.0).view(2, 3)
    crossed = bridge(x)
    assert crossed is not None
    assert torch.equal(crossed, x)
    for _ in range(2):  # a second call does nothing
        bridge.destroy()
    with pytest.raises(GridDestroyedError, match="was destroyed"):
        bridge(x)
    commgrid.shutdown()
