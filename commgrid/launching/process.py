"""Process of one rank: launcher variables, start of torch.distributed, one call of a function.

The result is a file in the run's folder. A killed rank leaves none.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import os
import pickle
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAILED = "failed"  # a file of all ranks: one has failed
_SIGNAL_AT_PARENTS_DEATH = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>


@dataclass(frozen=True)
class Task:
    """Work of one rank.

    Args:
        function, args: the call.
        rank, world_size: of this process.
        started: number of ranks that were started; others are absent.
        folder: where all ranks of the run leave their files.
        backend: of WORLD, which is started over a file; None: not started.
        environ: variables set before anything else.
        leftovers: kinds of leftovers that are no error; None: nothing is ended or looked for.
        exits: whether functions registered with atexit run, as at the end of a program.
        output: file to which it prints; None: its parent's.
        parent: process id of the process that started the rank.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    world_size: int
    started: int
    folder: str
    backend: str | None
    environ: Mapping[str, str]
    leftovers: frozenset[str] | None
    exits: bool
    output: Path | None
    parent: int

    def path(self, kind: str) -> Path:
        """File of this rank: its "result", or its "stacks"."""
        return Path(self.folder) / f"{self.rank}.{kind}"

    def all_have(self, kind: str, ranks: int) -> bool:
        """Wait until so many ranks have a file of a kind; False if a rank has failed instead."""
        folder = Path(self.folder)
        while len(list(folder.glob(f"*.{kind}"))) < ranks:
            if (folder / FAILED).exists():
                return False
            time.sleep(0.005)  # between two looks at the folder
        return True


def run_rank(task: Task) -> None:
    """Run a task in this process, which must be fresh: forked or spawned for it."""
    import torch

    atexit._clear()  # functions that the parent registered for its own end
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if task.output is not None:
        _print_to(task.output)
    torch.set_num_threads(1)  # a forked child hangs in the parent's OpenMP threads otherwise
    _lead_a_session(task.parent)
    stacks = task.path("stacks").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    os.environ.update(task.environ)
    try:
        _start_world(task)
        result = pickle.dumps((True, _call(task)))
        failed, code = False, 0
    except BaseException as error:
        failed, told, code = True, _told(error), _exit_code(error)
        result = pickle.dumps((False, told))
        if task.output is not None and code:
            print(told, file=sys.stderr, end="")
    partial = task.path("partial")
    partial.write_bytes(result)
    partial.rename(task.path("result"))
    _end_together(task, failed)
    if task.exits:
        atexit._run_exitfuncs()
    if failed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _exit_code(error: BaseException) -> int:
    """Exit code of a program that this error ends, as Python's."""
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return error.code or 0
    return 1


def _print_to(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    # By lines: a rank that is killed flushes nothing.
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)


def _lead_a_session(parent: int) -> None:
    """Make this process end with its parent, and lead a session.

    Processes that it starts are in its process group, which `Ranks.end` kills.
    """
    with contextlib.suppress(PermissionError):  # leads one already
        os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SIGNAL_AT_PARENTS_DEATH, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _start_world(task: Task) -> None:
    import torch
    import torch.distributed as dist

    if task.backend is None:
        return
    backend = task.backend
    if backend == "nccl":
        torch.cuda.set_device(task.rank)
        backend = "cpu:gloo,cuda:nccl"  # objects and barriers of the CPU go over gloo
    store = dist.FileStore(f"{task.folder}/store", task.world_size)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=task.rank, world_size=task.world_size)
    if backend == "gloo":  # a rank that is done at once would leave while others connect
        dist.barrier()


def _call(task: Task) -> Any:
    import torch.distributed as dist

    from commgrid.launching.leftovers import Snapshot

    if task.leftovers is None:
        return task.function(*task.args)
    store = None
    if task.rank == 0 and dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
    before = Snapshot(store)
    value = task.function(*task.args)
    if "commgrid.runtime.registry" in sys.modules:
        sys.modules["commgrid.runtime.registry"].shutdown()  # as at the end of a program
    if task.rank != 0:
        task.path("done").touch()
    if store is not None and not task.all_have("done", task.started - 1):
        return value  # another rank has failed, and this one's leftovers follow from that
    if left := before.left([*task.leftovers]):
        raise AssertionError("this rank has left behind:\n" + "\n".join(f"- {one}" for one in left))
    return value


def _told(error: BaseException) -> str:
    """Return the traceback without the frames of this file."""
    place = error.__traceback__
    while place is not None and place.tb_frame.f_code.co_filename == __file__:
        place = place.tb_next
    return "".join(traceback.format_exception(type(error), error, place))


def _end_together(task: Task, failed: bool) -> None:
    """Stay until all ranks have returned or one has failed, then leave WORLD.

    gloo may still be connecting other ranks of the group that was made last.
    """
    import torch.distributed as dist

    if task.backend is None:
        return
    if failed:
        (Path(task.folder) / FAILED).touch()
    elif dist.is_initialized():
        task.all_have("result", task.started)
        dist.destroy_process_group()


LAUNCHERS = {
    "torchrun": "RANK={rank} WORLD_SIZE={ranks} LOCAL_RANK={rank} LOCAL_WORLD_SIZE={ranks} "
    "GROUP_RANK=0 GROUP_WORLD_SIZE=1",
    "slurm": "SLURM_PROCID={rank} SLURM_NTASKS={ranks} SLURM_STEP_NUM_TASKS={ranks} "
    "SLURM_STEP_ID=0 SLURM_LOCALID={rank} SLURM_JOB_ID=1 SLURM_JOB_NODELIST=localhost",
}
"""Variables that each launcher sets beside the address of the store."""


def free_port() -> int:
    """Return a TCP port on loopback without a listener, below the kernel's range for clients."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("100 ports between 20000 and 32000 were tried, and none is free")


def launcher_variables(
    launcher: str | None, rank: int, world_size: int, port: int
) -> dict[str, str]:
    """Return what a launcher sets for one rank of a job on this machine.

    Args:
        launcher: "torchrun", "slurm", or None for no variables.
        rank, world_size: of the job.
        port: where rank 0 serves the store, on loopback.

    Raises:
        ValueError: an unknown launcher.
    """
    if launcher is None:
        return {}
    if launcher not in LAUNCHERS:
        raise ValueError(
            f"launcher is {launcher!r}; expected one of {', '.join(LAUNCHERS)}, or None"
        )
    text = f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port} {LAUNCHERS[launcher]}"
    return dict(word.split("=") for word in text.format(rank=rank, ranks=world_size).split())
