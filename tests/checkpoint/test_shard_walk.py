"""Walk of one shard: functions of ours that save, load, keep, recover and a transfer of it enter.

Of a `Linear` with AdamW on one rank. `pytest -s` prints the walks.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import commgrid
from commgrid import checkpoint
from commgrid.runtime.grid import HyperCommGrid
from commgrid.transfer import Transfer
from tests.walked import report, walked

MOST = {
    "save": 185,
    "load": 243,
    "keep": 134,
    "recover": 246,
    "make a transfer": 347,
    "run a transfer": 243,
}


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.ranks(1)
def test_a_shard_walks_through_few_functions(grid: HyperCommGrid, tmp_path: Path) -> None:
    (model, optimizer), (other, others) = trained(), trained()
    transfers: list[Transfer] = []

    def make() -> None:
        transfers.append(Transfer(model, other, optimizer=(optimizer, others)))

    steps: dict[str, Callable[[], object]] = {
        "save": lambda: checkpoint.save(tmp_path, 1, model, optimizer, progress=False),
        "load": lambda: checkpoint.load(tmp_path, model, optimizer, progress=False),
        "keep": lambda: checkpoint.keep(1, model, optimizer),
        "recover": lambda: commgrid.recover(None, model, optimizer),
        "make a transfer": make,
        "run a transfer": lambda: transfers[0].run(),
    }
    found = {}
    for what, step in steps.items():
        seen: Counter[str] = Counter()
        with walked(seen):
            step()
        found[what] = report(what, seen)
    transfers[0].close()
    assert {what: count for what, count in found.items() if count > MOST[what]} == {}
    assert torch.equal(next(model.parameters()), next(other.parameters()))
