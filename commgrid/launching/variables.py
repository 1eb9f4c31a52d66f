"""Environment variables of a launcher, for ranks that no launcher started."""

from __future__ import annotations

import contextlib
import random
import socket

LAUNCHERS = ("torchrun", "slurm")


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
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if launcher == "torchrun":
        return {
            **address,
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world_size),
        }
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
    raise ValueError(f"launcher is {launcher!r}; expected one of {', '.join(LAUNCHERS)}, or None")
