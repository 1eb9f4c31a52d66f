"""A program whose grids are watched, and a rank of it that fails somewhere; over gloo and NCCL."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commgrid
from commgrid.bridge import Bridge
from commgrid.failures import named_failures
from commgrid.rendezvous.agreement import Agreement
from commgrid.resharding import transport
from commgrid.testing import RanksFailed, run_on_ranks
from commgrid.torch_compat import groups as torch_groups
from commgrid.transfer import Transfer
from commgrid.transfer.barriers import TransferBarriers
from tests.flags import tell

VICTIM = 2
SIDES = {"source": range(2, 4), "target": range(2)}  # the victim is the source's first rank
FOREVER = 1000.0
"""Seconds that a collective may take, longer than the test: an error came without it."""

GONE = "rank 2 is gone: its process has ended"
CASES: dict[tuple[str, str], tuple[str, str]] = {
    ("killed", "in a step"): ("PeerFailedError", GONE),
    ("left", "in a step"): ("PeerFailedError", GONE),
    ("raised", "in a step"): ("PeerFailedError", "rank 2 failed in step 3: ValueError: bad batch"),
    ("stopped", "in a step"): ("PeerTimeoutError", "rank 2 says nothing for 4 s"),
    ("killed", "while agreeing"): ("PeerFailedError", f"grid 'default': {GONE}"),
    ("killed", "while creating groups"): ("PeerFailedError", f"grid 'default': {GONE}"),
    ("killed", "in a bridge"): ("", GONE),
    ("raised", "before a transfer"): ("", "rank 2 failed in step 3: ValueError: bad batch"),
    ("raised", "before a transfer, and others say so"): (
        "", "rank 2 failed in step 3: ValueError: bad batch"
    ),
    ("stopped", "in a transfer"): ("", "rank 2 says nothing for 4 s"),
}  # fmt: skip
"""What happens to the victim and where; the error that all others get. Between two grids it is one
of several classes."""
Step = Callable[[], object]


def timeout_of(how: str) -> float:
    """Silence is only noticed once a time is over."""
    return {"stopped": 4.0, "slept": 10.0}.get(how, FOREVER)


def fails(how: str, where: str, folder: str, cuda: bool, rank: int) -> None:
    """Runs steps; what each rank was told goes into a file of its own."""
    if cuda:
        from tests.gpu.on_gpus import take_device

        take_device(rank)
        torch.set_default_device("cuda")
    commgrid.join(backend="cpu:gloo,cuda:nccl" if cuda else "gloo")
    Path(folder, f"{rank}.pid").write_text(str(os.getpid()))
    told, kind = "nothing", "nothing"
    try:
        if where.startswith("while"):
            if rank == VICTIM:
                fails_at_start(where, how)
            commgrid.initialize(tp=2, watch=True, startup_timeout=FOREVER)
        else:
            between = where != "in a step"
            grid, step = (of_two_grids if between else of_one_grid)(how, where, rank)
            with named_failures(grid, lambda: "step 3"):
                for number in count():  # until it is known that the victim has failed
                    if rank == VICTIM and number == 2 and where != "in a transfer":
                        misbehave(how)
                    step()
    except BaseException as error:
        told, kind = str(error), type(error).__name__
    seen: dict[str, Any] = {"told": told, "kind": kind}
    if rank != VICTIM and where == "in a step":
        others = [each for each in range(4) if each != VICTIM]
        again = commgrid.initialize(name="again", ranks=others, timeout=60, watch=True)
        y = torch.ones(3)
        dist.all_reduce(y, group=again.get_group("dp"))
        seen["again"] = y.tolist()
        commgrid.destroy()
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))
    end_when_others_have(rank, how, folder)


def of_one_grid(how: str, where: str, rank: int) -> tuple[commgrid.HyperCommGrid, Step]:
    grid = commgrid.initialize(tp=2, timeout=timeout_of(how), watch=True)
    x = torch.zeros(1 << 16)

    def step() -> None:
        for name in ("tp", "dp", "dp_tp"):
            dist.all_reduce(x, group=grid.get_group(name))
            x.sum().item()

    return grid, step


def of_two_grids(how: str, where: str, rank: int) -> tuple[commgrid.HyperCommGrid, Step]:
    """One of them is watched, which is enough to watch what is between them."""
    timeout = timeout_of(how)
    grids: dict[str, Any] = {
        side: commgrid.initialize(name=side, ranks=ranks, timeout=timeout, watch=side == "source")
        for side, ranks in SIDES.items()
    }
    if rank == 0 and "others" in where:  # what it hears of at a gate, before its own watch
        TransferBarriers.interrupt = lambda *_: None  # type: ignore[method-assign]
    own = next(grid for grid in grids.values() if grid)
    if where == "in a bridge":
        bridge = Bridge(grids["source"], grids["target"], startup_timeout=60)
        return own, lambda: bridge(torch.ones(3, 4) if grids["source"] else None)
    model = nn.Linear(256, 256)
    transfer = Transfer(
        model if grids["source"] else None,
        model if grids["target"] else None,
        source_grid=grids["source"],
        target_grid=grids["target"],
        timeout=timeout,
        copies="any",
    )
    if rank == VICTIM and where == "in a transfer":
        fails_in_a_run(3, how)
    return own, transfer.run


def fails_at_start(where: str, how: str) -> None:
    """From now on this rank fails once it has come to compare, or when it makes a group."""

    def failing(*_: Any, **__: Any) -> Any:
        misbehave(how)

    if where == "while agreeing":
        Agreement._decision = failing  # type: ignore[method-assign]
    else:
        torch_groups.create_group = failing


def fails_in_a_run(number: int, how: str) -> None:
    """In a transfer's so many-th run this rank fails when all have come to it."""
    before, runs = transport.Carrier.carry, []

    def carrying(carrier: transport.Carrier) -> None:
        runs.append(how)
        if len(runs) == number:
            misbehave(how)
        before(carrier)

    transport.Carrier.carry = carrying  # type: ignore[assignment, method-assign]


def end_when_others_have(rank: int, how: str, folder: str) -> None:
    """Ends this rank's process; the one that serves the store goes last, with the victim."""
    tell(f"rank {rank} is done")
    if rank == 0:
        keys = [f"told: rank {each} is done" for each in (1, 3)]
        dist.distributed_c10d._get_default_store().wait(keys)
        if how in ("stopped", "slept"):
            os.kill(int(Path(folder, f"{VICTIM}.pid").read_text()), signal.SIGKILL)
    os._exit(0)


def misbehave(how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "left":
        os._exit(0)
    if how == "raised":
        raise ValueError("bad batch")
    if how == "slept":
        time.sleep(1000)  # until it is killed


def what_survivors_see(how: str, where: str, folder: Path, cuda: bool) -> list[dict[str, Any]]:
    """Of ranks 0, 1 and 3, where rank 2 has failed."""
    more: dict[str, Any] = {}
    if cuda:
        from tests.gpu.on_gpus import nccl_variables

        more = {"method": "spawn", "environ": nccl_variables}
    with pytest.raises(RanksFailed) as ended:  # none of them returns
        run_on_ranks(
            fails, 4, how, where, str(folder), cuda, per_rank=[(rank,) for rank in range(4)],
            backend=None, launcher="torchrun", timeout=400, **more,
        )  # fmt: skip
    for rank in (0, 1, 3):
        assert (folder / f"{rank}.json").exists(), (
            f"rank {rank} ended without a word: {ended.value}"
        )
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1, 3)]


def check(how: str, where: str, folder: Path, cuda: bool = False) -> None:
    """Everybody is told the same, and where it was itself; after a step they go on together."""
    kind, text = CASES[how, where]
    kinds = [kind] if kind else ["PeerFailedError", "PeerTimeoutError", "TransferError"]
    for each in what_survivors_see(how, where, folder, cuda):
        assert each["kind"] in kinds, each
        assert text in each["told"], each
        if where == "in a step":
            assert each["again"] == [3.0] * 3, each
        if not where.startswith("while"):
            what = "bridge 'bridge'" if where == "in a bridge" else "transfer 'default'"
            assert what in each["told"] or "was in step 3" in each["told"], each
