"""An ensemble along an axis of the user's own: no member gets another's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import commgrid
from commgrid import checkpoint
from commgrid.data_parallel import GradientReducer
from commgrid.tensor_parallel import ColumnParallelLinear
from commgrid.testing import run_on_ranks
from commgrid.transfer import Transfer

ORDER = "tp-cp-ep-dp-pp-member"


def brought(folder: str, way: str, differ: str) -> str:
    """The error of bringing an ensemble's weights somewhere; "": none, and all is there."""
    grid = commgrid.initialize(dp=1, order=ORDER, member=2)
    torch.manual_seed(grid.rank if differ == "weights" else 0)
    if differ == "sliced":  # along the axis, so that ranks have one model
        torch.manual_seed(0)
        model: nn.Module = ColumnParallelLinear(4, 4, group="member")
    else:
        model = nn.Linear(4, 4)
        model.register_buffer("seen", torch.tensor(grid.rank * (differ == "buffers")))
    if differ == "summed":  # by a reducer that names the axis
        reducer = GradientReducer(model, group="dp_member")
        model.seen.fill_(grid.rank)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.5)
    if differ == "moments":
        model(torch.full((1, 4), 1.0 + grid.rank)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model.weight.zero_()
            model.bias.zero_()
    told = ""
    try:
        if way == "save":
            checkpoint.save(folder, 1, model, optimizer, copies="first", progress=False)
        elif way == "keep":
            checkpoint.keep(1, model, optimizer)
        else:
            sides = {"source_grid": grid, "target_grid": grid}
            other = nn.Linear(4, 4)
            if differ == "sliced":
                other = ColumnParallelLinear(4, 4, group="member")
            else:
                other.register_buffer("seen", torch.tensor(0))
            Transfer(model, other, **sides, copies="any", timeout=30).run()
    except commgrid.CommGridError as error:
        told = str(error)
    if differ == "summed":
        reducer.close()
    commgrid.shutdown()
    return told


@pytest.mark.parametrize(
    ("way", "differ"),
    [(way, differ) for way in ("save", "keep", "transfer") for differ in ("weights", "buffers")]
    + [("save", "moments"), ("keep", "moments")],
)
def test_members_of_an_ensemble_are_not_taken_for_copies(
    way: str, differ: str, tmp_path: Path
) -> None:
    for told in run_on_ranks(brought, 2, str(tmp_path), way, differ, check=False):
        assert "differs between rank 0 and rank 1" in told, told
        assert "along an axis of your own, member" in told
    assert checkpoint.steps(tmp_path) == []


@pytest.mark.parametrize("way", ["save", "keep", "transfer"])
@pytest.mark.parametrize("differ", ["nothing", "sliced", "summed"])
def test_equal_members_and_one_model_along_the_axis_pass(
    differ: str, way: str, tmp_path: Path
) -> None:
    assert run_on_ranks(brought, 2, str(tmp_path), way, differ) == ["", ""]
