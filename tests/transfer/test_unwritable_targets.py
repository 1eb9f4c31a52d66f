"""Targets that cannot be written are refused before anything changes, by load and by Transfer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commgrid
from commgrid.resharding.item import refuse_unwritable
from commgrid.transfer import Transfer
from tests.ways import WAYS, bring


def holder(first: Tensor, last: Tensor) -> nn.Module:
    model = nn.Module()
    model.register_buffer("first", first)
    model.register_buffer("last", last)
    return model


EACH_WAY = pytest.mark.parametrize("way", WAYS)


@EACH_WAY
@pytest.mark.parametrize("kind", ["expanded", "unfolded", "inference"])
def test_targets_that_cannot_be_written_are_refused_first(
    way: str, kind: str, tmp_path: Path
) -> None:
    commgrid.initialize()
    source = holder(torch.ones(3), torch.ones(4, 2))
    with torch.inference_mode(kind == "inference"):
        last = {
            "expanded": torch.zeros(1, 2).expand(4, 2),
            "unfolded": torch.zeros(5).unfold(0, 2, 1),
            "inference": torch.zeros(4, 2),
        }[kind]
    target = holder(torch.zeros(3), last)
    with pytest.raises(commgrid.CommGridError, match=r"last of shape \(4, 2\) cannot be written"):
        bring(way, tmp_path, (source,), (target,))
    assert not target.first.any()
    commgrid.shutdown()


@EACH_WAY
@pytest.mark.parametrize("kind", ["of one", "transposed", "interleaved", "inference"])
def test_targets_that_can_be_written_are(way: str, kind: str, tmp_path: Path) -> None:
    commgrid.initialize()
    source = holder(torch.ones(3), torch.ones(1, 2) if kind == "of one" else torch.ones(2, 3))
    with torch.inference_mode(kind == "inference"):
        last = {
            "of one": torch.zeros(2).expand(1, 2),
            "transposed": torch.zeros(3, 2).t(),
            "interleaved": torch.zeros(8).as_strided((2, 3), (3, 2)),
            "inference": torch.zeros(2, 3),
        }[kind]
        target = holder(torch.zeros(3), last)
        bring(way, tmp_path, (source,), (target,))
    assert torch.equal(target.last, source.last)
    assert target.first.all()
    commgrid.shutdown()


def test_a_run_outside_of_the_mode_that_the_transfer_was_made_in_is_refused() -> None:
    commgrid.initialize()
    grid: Any = commgrid.get_grid()
    source = holder(torch.ones(3), torch.ones(2))
    with torch.inference_mode():
        target = holder(torch.zeros(3), torch.zeros(2))
        transfer = Transfer(source, target, source_grid=grid, target_grid=grid)
        transfer.run()
    with pytest.raises(commgrid.CommGridError, match=r"made in torch\.inference_mode"):
        transfer.run()
    commgrid.shutdown()


def test_what_overlaps_is_what_writing_says() -> None:
    generator = torch.Generator().manual_seed(0)
    seen = {True: 0, False: 0}
    for _ in range(200):
        shape, stride = (torch.randint(0 if i else 1, 5, (2,), generator=generator).tolist()
                         for i in range(2))  # fmt: skip
        tensor = torch.zeros(64).as_strided(shape, stride)
        places = {i * stride[0] + j * stride[1] for i in range(shape[0]) for j in range(shape[1])}
        right = len(places) < shape[0] * shape[1]
        seen[right] += 1
        if right:
            with pytest.raises(commgrid.SpecError, match="one in memory"):
                refuse_unwritable("x", tensor)
        else:
            refuse_unwritable("x", tensor)
    assert min(seen.values()) > 40
