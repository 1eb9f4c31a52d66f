"""A buffer that two modules share, such as a table of rotations: moved and loaded once for both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import commgrid
from commgrid.transfer import Transfer
from tests.ways import WAYS, bring


def built(value: float, shared: bool) -> nn.Module:
    model = nn.ModuleDict({name: nn.Module() for name in "ab"})
    table = torch.full((4,), value)
    for name in "ab":
        model[name].register_buffer("table", table if shared else table.clone())
        model[name].register_buffer("unsaved", table, persistent=False)
    return model


EACH_WAY = pytest.mark.parametrize("way", WAYS)


@EACH_WAY
@pytest.mark.parametrize("shared", [(True, True), (True, False), (False, True), (False, False)])
def test_shared_buffers_are_moved(shared: tuple[bool, bool], way: str, tmp_path: Path) -> None:
    commgrid.initialize()
    source, target = built(3.0, shared[0]), built(0.0, shared[1])
    bring(way, tmp_path, (source,), (target,), verify=True)
    assert [target[name].table.unique().tolist() for name in "ab"] == [[3.0]] * 2
    assert (target["a"].table is target["b"].table) == shared[1]
    commgrid.shutdown()


@EACH_WAY
def test_two_tables_do_not_become_one(way: str, tmp_path: Path) -> None:
    commgrid.initialize()
    source, target = built(3.0, False), built(0.0, True)
    source["b"].table.fill_(4.0)
    with pytest.raises(commgrid.CommGridError, match=r"a.table and \S*b.table are one weight"):
        bring(way, tmp_path, (source,), (target,), verify=True)
    assert target["a"].table.unique().tolist() == [0.0]
    apart = built(0.0, False)
    bring(way, tmp_path / "apart", (source,), (apart,), verify=True)
    assert [apart[name].table.unique().tolist() for name in "ab"] == [[3.0], [4.0]]
    commgrid.shutdown()


def test_a_mapping_of_one_tensor_under_two_names_is_refused() -> None:
    commgrid.initialize()
    grid: Any = commgrid.get_grid()
    table = torch.zeros(4)
    source = {"a": torch.ones(4), "b": torch.ones(4)}
    with pytest.raises(commgrid.TransferError, match="are in one memory"):
        Transfer(source, {"a": table, "b": table}, source_grid=grid, target_grid=grid)
    commgrid.shutdown()
