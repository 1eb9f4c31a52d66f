"""Runs a function on N ranks: forked processes, a timeout for all of them, every traceback.

Ranks are forked from a parent that has torch imported, which takes a fraction of what
spawning takes; with CUDA they are spawned, since CUDA does not survive a fork.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it at their first step: once here, not once in each rank
import torch.distributed as dist

GRACE_SECONDS = 30.0  # what the others get to end by themselves once one rank has failed
MAY_LEAVE = "leave"  # a file that tells the ranks that all have returned, or that one has failed


class RanksFailed(AssertionError):
    """Some ranks raised, died or did not end in time; carries what each of them said."""


class TorchNotStarted(RanksFailed):
    """The first rank that failed did so while torch.distributed started, before its function."""


def tell(what: str) -> None:
    """Lets other ranks know, through the store that torch was started with."""
    dist.distributed_c10d._get_default_store().set(f"told: {what}", "")


def hear(*what: str) -> None:
    """Waits until others have told all of it: a silent rank lives on until nobody needs it."""
    keys = [f"told: {each}" for each in what]
    dist.distributed_c10d._get_default_store().wait(keys, timedelta(seconds=200))


def meet(rank: int, ranks: int) -> None:
    """Until so many ranks have come; the first, which may serve the store, leaves as the last."""
    every = range(ranks)
    tell(f"rank {rank} has come")
    hear(*(f"rank {each} has come" for each in every))
    if rank == 0:
        hear(*(f"rank {each} has heard" for each in every[1:]))
    else:
        tell(f"rank {rank} has heard")


def free_port() -> int:
    """A TCP port on loopback that nobody listens on, below those the kernel gives to clients."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port between 20000 and 32000")


def run_on_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    init: str | None = "gloo",
    launcher: str | None = None,
    per_rank: Sequence[tuple[Any, ...]] | None = None,
    environ: Mapping[str, str] | None = None,
    absent: Sequence[int] = (),
    timeout: float = 240.0,
    method: str = "fork",
) -> list[Any]:
    """Calls `function(*args)` on every rank and returns what each returned, by rank.

    Args:
        function: takes `args`, and after them the rank's entry of `per_rank`.
        world_size: number of ranks.
        init: the backend torch.distributed is started with, over a file; None: not started.
        launcher: "torchrun" or "slurm" sets the variables these set, on a free port.
        environ: further variables for every rank.
        absent: ranks that are never started; their result is None.
        timeout: seconds until all of them are killed: several times what a slow machine needs.
        method: "fork", or "spawn" where the function uses CUDA.

    Raises:
        RanksFailed: with the traceback of every rank that did not return.
    """
    jobs = {}
    for rank in range(world_size):
        if rank not in absent:
            extra = per_rank[rank] if per_rank is not None else ()
            jobs[rank] = (function, (*args, *extra))
    how = (world_size, init, launcher, environ or {}, timeout, method)
    try:
        return _run(jobs, *how)
    except TorchNotStarted as failed:  # gloo may take a stranger: tests/test_lost_connections.py
        print("torch did not start, and is started again:", failed, file=sys.__stderr__)
        return _run(jobs, *how)


def _run(
    jobs: Mapping[int, tuple[Callable[..., Any], tuple[Any, ...]]],
    world_size: int,
    init: str | None,
    launcher: str | None,
    environ: Mapping[str, str],
    timeout: float,
    method: str,
) -> list[Any]:
    context = multiprocessing.get_context(method)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        port = free_port()
        children = {}
        for rank, job in jobs.items():
            variables = {**_launcher_variables(launcher, rank, world_size, port), **environ}
            whole = (*job, rank, len(jobs), world_size, folder, init, variables)
            children[rank] = context.Process(target=_child, args=whole, daemon=False)
            with forking():
                children[rank].start()
        ended = _wait(children, Path(folder), timeout)
        return _collect({rank: children[rank] for rank in ended}, world_size, Path(folder), timeout)


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Within it, a forked child leaves the parent's objects to the parent.

    A child that collects a process group which its parent has dropped, as doctests do, waits for
    that one's threads, which it does not have.
    """
    gc.freeze()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: fork beside threads
            yield
    finally:
        gc.unfreeze()


def _launcher_variables(
    launcher: str | None, rank: int, world_size: int, port: int
) -> dict[str, str]:
    if launcher is None:
        return {}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if launcher == "slurm":
        return {
            **address,
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": str(world_size),
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": str(world_size),
            "SLURM_LOCALID": str(rank),
            "SLURM_JOB_ID": "1",
            "SLURM_JOB_NODELIST": "localhost",
        }
    assert launcher == "torchrun", launcher
    return {
        **address,
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
    }


def _child(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    ranks: int,
    world_size: int,
    folder: str,
    init: str | None,
    variables: Mapping[str, str],
) -> None:
    torch.set_num_threads(1)  # a forked child hangs in a parent's OpenMP threads otherwise
    out = Path(folder) / str(rank)
    stacks = open(out.with_suffix(".stacks"), "w")  # noqa: SIM115 -- faulthandler keeps it
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    os.environ.update(variables)
    started = False
    try:
        if init is not None:
            store = dist.FileStore(f"{folder}/store", world_size)
            dist.init_process_group(init, store=store, rank=rank, world_size=world_size)
            if init == "gloo":  # a rank that is done at once would leave while others connect
                dist.barrier()
        started = True
        result = ("ok", function(*args))
    except BaseException:
        result = ("error" if started else "not started", traceback.format_exc())
    partial = out.with_suffix(".partial")
    partial.write_bytes(pickle.dumps(result))
    partial.rename(out.with_suffix(".result"))
    may_leave = out.parent / MAY_LEAVE
    if result[0] != "ok" or len(list(out.parent.glob("*.result"))) == ranks:
        may_leave.touch()
    if result[0] != "ok":
        os._exit(1)
    if init is not None and dist.is_initialized():
        while not may_leave.exists():  # gloo may still connect others of the group made last
            time.sleep(0.005)
        dist.destroy_process_group()


def _wait(children: Mapping[int, Any], folder: Path, timeout: float) -> list[int]:
    """Until all have ended; once one has failed the others get a grace, then all are killed.

    Returns the ranks as they ended: what the first of them says is most often the cause.
    """
    until = time.monotonic() + timeout
    ended: dict[int, None] = {}
    failed = False
    while time.monotonic() < until and len(ended) < len(children):
        running = [child.sentinel for rank, child in children.items() if rank not in ended]
        # Not for ever: what a rank has started keeps its sentinel open when the rank has ended.
        wait_for_any(running, timeout=0.05)
        ended.update(
            (rank, None) for rank, child in children.items()
            if rank not in ended and not child.is_alive()
        )  # fmt: skip
        left = [rank for rank in ended if not (folder / f"{rank}.result").exists()]
        if not failed and (left or any(children[rank].exitcode for rank in ended)):
            failed = True
            (folder / MAY_LEAVE).touch()
            until = min(until, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.005)
    late = [child for child in children.values() if child.is_alive()]
    for child in late:
        os.kill(child.pid, signal.SIGUSR1)  # writes down where it hangs
    if late:
        time.sleep(0.3)
    for child in late:
        child.kill()
    for child in children.values():
        child.join()
    return [*ended, *(rank for rank in children if rank not in ended)]


def _own(stacks: str) -> str:
    """A rank's stacks without what its parent was doing when it forked."""
    return re.sub(r"(, line \d+ in _child\n)(  File .*\n)*", r"\1", stacks)


def _collect(
    children: Mapping[int, Any], world_size: int, folder: Path, timeout: float
) -> list[Any]:
    results: list[Any] = [None] * world_size
    failures = []
    first = ""
    for rank, child in children.items():
        path = folder / f"{rank}.result"
        kind, value = pickle.loads(path.read_bytes()) if path.exists() else ("lost", "")
        if kind == "ok" and child.exitcode == 0:
            results[rank] = value
            continue
        stacks = folder / f"{rank}.stacks"
        where = _own(stacks.read_text()) if stacks.exists() else ""
        how = f"exit code {child.exitcode}, timeout {timeout:g} s"
        failures.append(f"--- rank {rank} ({how})\n{value if kind != 'ok' else ''}{where}")
        first = first or kind
    if failures:
        kind_of_error = TorchNotStarted if first == "not started" else RanksFailed
        raise kind_of_error(
            "\n".join([f"{len(failures)} of {len(children)} ranks failed", *failures])
        )
    return results
