"""A program whose grid is watched, and a rank of it that fails in some way; over gloo and NCCL."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid.failures import named_failures
from commgrid.testing import RanksFailed, run_on_ranks
from tests.flags import tell

VICTIM = 2


def fails(how: str, timeout: float, folder: str, cuda: bool, rank: int) -> None:
    """Trains a little; what each rank was told, and how soon, goes into a file of its own."""
    device = "cpu"
    if cuda:
        from tests.gpu.on_gpus import take_device

        take_device(rank)
        device = "cuda"
    commgrid.join(backend="cpu:gloo,cuda:nccl" if cuda else "gloo")
    grid = commgrid.initialize(tp=2, timeout=timeout, watch=True)
    x = torch.ones(1 << 16, device=device)
    names = ("tp", "dp", "dp_tp")
    for name in names:
        dist.all_reduce(x, group=grid.get_group(name))
    x.fill_(1.0)
    grid.check()
    started, told, kind = time.monotonic(), "nothing", "nothing"
    try:
        with named_failures(grid, lambda: "step 3"):
            if rank == VICTIM:
                Path(folder, "victim").write_text(str(os.getpid()))
                misbehave(how)
            for name in names:
                dist.all_reduce(x, group=grid.get_group(name))
                x.sum().item()
    except BaseException as error:
        told, kind = str(error), type(error).__name__
    seen: dict[str, Any] = {"told": told, "kind": kind, "seconds": time.monotonic() - started}
    if rank != VICTIM:
        others = [each for each in range(4) if each != VICTIM]
        again = commgrid.initialize(name="again", ranks=others, timeout=60, watch=True)
        y = torch.ones(3, device=device)
        dist.all_reduce(y, group=again.get_group("dp"))
        seen["again"] = y.tolist()
        commgrid.destroy()
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))
    end_when_others_have(rank, how, folder)


def end_when_others_have(rank: int, how: str, folder: str) -> None:
    """Ends this rank's process; the one that serves the store goes last, with the victim."""
    tell(f"rank {rank} is done")
    if rank == 0:  # whose process is the store's
        keys = [f"told: rank {each} is done" for each in (1, 3)]
        dist.distributed_c10d._get_default_store().wait(keys)
        if how in ("stopped", "slept"):
            os.kill(int(Path(folder, "victim").read_text()), signal.SIGKILL)
        time.sleep(0.5)
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
        time.sleep(1000)


def what_survivors_see(how: str, timeout: float, folder: Path, cuda: bool) -> list[dict[str, Any]]:
    """Of ranks 0, 1 and 3, where rank 2 has failed."""
    with pytest.raises(RanksFailed):  # none of them returns
        run_on_ranks(
            fails, 4, how, timeout, str(folder), cuda, per_rank=[(rank,) for rank in range(4)],
            backend=None, launcher="torchrun", method="spawn" if cuda else "fork",
        )  # fmt: skip
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1, 3)]


EXPECTED = {
    "killed": ("PeerFailedError", "rank 2 is gone: its process has ended", 0.0),
    "left": ("PeerFailedError", "rank 2 is gone: its process has ended", 0.0),
    "raised": ("PeerFailedError", "rank 2 failed in step 3: ValueError: bad batch", 0.0),
    "stopped": ("PeerTimeoutError", "rank 2 says nothing for 4 s", 4.0),
}


def check(how: str, seen: list[dict[str, Any]]) -> None:
    """Everybody was told the same in time, and goes on with the others."""
    kind, text, after = EXPECTED[how]
    for each in seen:
        assert (each["kind"], each["again"]) == (kind, [3.0] * 3), each
        assert text in each["told"], each
        assert "was in step 3" in each["told"]
        # Silence counts from the last beat before it; much more would be a hang.
        assert after / 2 <= each["seconds"] < after + 60
