"""Tensors without elements beside others in a transfer: nothing of them moves, the others do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import commgrid
from commgrid.testing import run_on_ranks
from commgrid.transfer import Transfer

SHAPES = [(0,), (0, 4), (4, 0), (2, 0, 3)]


class Holder(nn.Module):
    """Parameters and buffers without elements, and some with a number in each."""

    def __init__(self, number: float) -> None:
        super().__init__()
        for place, shape in enumerate(SHAPES):
            self.register_parameter(f"p{place}", nn.Parameter(torch.ones(shape)))
            self.register_buffer(f"b{place}", torch.ones(shape))
        self.y = nn.Parameter(torch.full((3,), number))


def moved(copies: str) -> dict[str, list[float]]:
    grid = commgrid.initialize()
    sides: dict[str, Any] = {"source_grid": grid, "target_grid": grid, "timeout": 30}
    found = {}
    for name in ("modules", "mapping", "staged", "verified"):
        source, target = Holder(0.5), Holder(0.0)
        pair: Any = source, target
        if name == "mapping":
            pair = source, dict(target.state_dict())
        moves = Transfer(*pair, **sides, copies=copies, staged=name == "staged")
        moves.run(verify=name == "verified")
        moves.close()
        found[name] = target.y.tolist()
    one, other = Holder(0.5), Holder(0.0)
    one.q0, other.q0 = one.p0, other.p0  # tied
    Transfer(one, other, **sides, copies=copies).run()
    found["tied"] = other.y.tolist()
    commgrid.shutdown()
    return found


@pytest.mark.parametrize("copies", ["compare", pytest.param("any", marks=pytest.mark.full)])
def test_tensors_without_elements_do_not_stop_a_transfer(copies: str) -> None:
    names = ("modules", "mapping", "staged", "verified", "tied")
    assert run_on_ranks(moved, 2, copies) == [dict.fromkeys(names, [0.5] * 3)] * 2


def misshapen() -> str:
    grid = commgrid.initialize()
    source, target = nn.ParameterDict({"x": torch.ones(0, 4)}), nn.ParameterDict()
    target["x"] = torch.ones(0, 5)
    with pytest.raises(commgrid.CommGridError) as error:
        Transfer(source, target, source_grid=grid, target_grid=grid, timeout=30)
    commgrid.shutdown()
    return str(error.value)


def test_their_shapes_are_compared_too() -> None:
    for told in run_on_ranks(misshapen, 2, check=False):
        assert "x" in told
        assert "(0, 5)" in told
