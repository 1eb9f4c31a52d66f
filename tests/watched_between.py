"""Two watched grids with a transfer and a bridge between them, and a rank that fails in one."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import commgrid
from commgrid.bridge import Bridge
from commgrid.failures import named_failures
from commgrid.testing import RanksFailed, run_on_ranks
from commgrid.transfer import Transfer, carry
from commgrid.transfer.gate import Gates
from tests.watched import VICTIM, end_when_others_have, misbehave

RANKS = {"source": range(2, 4), "target": range(2)}  # the victim is the source's first rank
CASES = (
    ("killed", "in a bridge"),
    ("raised", "before a transfer"),
    ("raised", "before a transfer, and others say so"),
    ("stopped", "in a transfer"),
)
TEXTS = {
    "killed": "rank 2 is gone: its process has ended",
    "raised": "rank 2 failed in training: ValueError: bad batch",
    "stopped": "rank 2 says nothing for 4 s",
}


def fails(how: str, where: str, timeout: float, folder: str, cuda: bool, rank: int) -> None:
    """Moves weights or activations a few times; what each rank was told goes into its file."""
    if cuda:
        from tests.gpu.on_gpus import take_device

        take_device(rank)
        torch.set_default_device("cuda")
    commgrid.join(backend="cpu:gloo,cuda:nccl" if cuda else "gloo")
    # One of them is watched, which is enough to watch what is between them.
    grids = {
        side: commgrid.initialize(
            name=side, ranks=RANKS[side], timeout=timeout, watch=side == "source"
        )
        for side in RANKS
    }
    own = next(grid for grid in grids.values() if grid)
    if rank == 0 and "others" in where:  # what it hears of at a gate, before its own watch
        Gates.interrupt = lambda *_: None  # type: ignore[method-assign]
    step = bridging(grids) if where == "in a bridge" else transferring(grids, timeout)
    if rank == VICTIM and where == "in a transfer":
        fails_in_a_run(3, how)
    started, told, kind = time.monotonic(), "nothing", "nothing"
    try:
        with named_failures(own, lambda: "training"):
            for number in range(1000):  # until somebody says that it is over
                if rank == VICTIM and number == 2:
                    Path(folder, "victim").write_text(str(os.getpid()))
                    if where != "in a transfer":
                        misbehave(how)
                if number == 2:
                    started = time.monotonic()
                step()
    except BaseException as error:
        told, kind = str(error), type(error).__name__
    seen: dict[str, Any] = {"told": told, "kind": kind, "seconds": time.monotonic() - started}
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))
    end_when_others_have(rank, how, folder)


def fails_in_a_run(number: int, how: str) -> None:
    """From a transfer's so many-th run on, this rank fails when all have come to it."""
    before, runs = carry.Carrier.carry, []

    def carrying(carrier: carry.Carrier) -> None:
        runs.append(how)
        if len(runs) == number:
            misbehave(how)
        before(carrier)

    carry.Carrier.carry = carrying  # type: ignore[assignment, method-assign]


def transferring(grids: dict[str, Any], timeout: float) -> Callable[[], object]:
    model = nn.Linear(256, 256)
    transfer = Transfer(
        model if grids["source"] else None,
        model if grids["target"] else None,
        source_grid=grids["source"],
        target_grid=grids["target"],
        timeout=timeout,
        copies="any",
    )
    return transfer.run


def bridging(grids: dict[str, Any]) -> Callable[[], object]:
    bridge = Bridge(grids["source"], grids["target"], startup_timeout=60)
    return lambda: bridge(torch.ones(3, 4) if grids["source"] else None)


def what_survivors_see(
    how: str, where: str, timeout: float, folder: Path, cuda: bool
) -> dict[int, dict[str, Any]]:
    """Of ranks 0, 1 and 3, where rank 2 has failed."""
    with pytest.raises(RanksFailed):  # none of them returns
        run_on_ranks(
            fails, 4, how, where, timeout, str(folder), cuda,
            per_rank=[(rank,) for rank in range(4)], backend=None, launcher="torchrun", timeout=400,
            method="spawn" if cuda else "fork",
        )  # fmt: skip
    return {rank: json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1, 3)}


def check(how: str, where: str, seen: dict[int, dict[str, Any]]) -> None:
    """Everybody was told who, and what they were at, in time."""
    for rank, each in seen.items():
        assert each["kind"] in ("PeerFailedError", "PeerTimeoutError", "TransferError"), each
        assert TEXTS[how] in each["told"], (rank, each)
        what = "bridge 'bridge'" if where == "in a bridge" else "transfer 'default'"
        assert what in each["told"] or "was in training" in each["told"], (rank, each)
        assert each["seconds"] < 60, (rank, each)
