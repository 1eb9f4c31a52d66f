"""Ranks that may be killed, without the others being ended for it: each runs in a child of its own.

`run_on_ranks` ends all ranks soon after one has failed, which is what most tests want. Here a rank
that is killed is a result like any other.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from commgrid.runtime import registry
from tests.ranks import RanksFailed, forking, run_on_ranks

KILLED = "killed"

_END_WITH_PARENT = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>


def run_mortal(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    launcher: str | None = "torchrun",
    environ: dict[str, str] | None = None,
    per_rank: Sequence[tuple[Any, ...]] | None = None,
    timeout: float = 200.0,
    method: str = "fork",
) -> list[Any]:
    """What `function(*args)` returned on every rank; KILLED where a signal has ended it.

    Raises:
        RanksFailed: a rank raised, or all were not done in time.
    """
    with tempfile.TemporaryDirectory(prefix="mortal-") as folder:
        return run_on_ranks(
            _guarded, world_size, function, folder, args,
            init=None, launcher=launcher, environ=environ, per_rank=per_rank, timeout=timeout,
            method=method,
        )  # fmt: skip


def _guarded(function: Callable[..., Any], folder: str, args: tuple[Any, ...], *own: Any) -> Any:
    out = Path(folder) / os.environ.get("RANK", "0")
    with forking():
        child = os.fork()
        if child == 0:  # stays within: what other tests have left is not its own to collect
            _child(function, (*args, *own), out)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return KILLED if os.WTERMSIG(status) == signal.SIGKILL else f"signal {status}"
    kind, value = pickle.loads(out.read_bytes())
    if kind == "error":
        raise RanksFailed(value)
    return value


def _child(function: Callable[..., Any], args: tuple[Any, ...], out: Path) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":  # ends with its rank, which is killed where it takes too long
        ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)
    try:
        result = pickle.dumps(("ok", function(*args)))
    except BaseException:
        result = pickle.dumps(("error", traceback.format_exc()))
    try:
        out.write_bytes(result)
        registry._registry.leave()  # what runs at exit
    finally:
        os._exit(0)


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
