"""This process's rank, and the number of ranks, as torchrun or SLURM's srun set them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from commgrid.errors import SpecError

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """One process's place in the job.

    Args:
        rank: global rank.
        world_size: number of processes.
        local_rank: its number on its node, which is its device's; None: no launcher said so.
        address: host of the store that all ranks meet at; None for a world of one.
        port: TCP port of that store.
        hosts_store: whether this process serves the store.
        rank_serves: whether rank 0's process does, and not a launcher's.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    address: str | None = None
    port: int = 0
    hosts_store: bool = False
    rank_serves: bool = True

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Launch:
        """Read the launcher's variables: torchrun's (or the same set by hand), then srun's.

        Restarts are not counted: torchrun's TORCHELASTIC_RESTART_COUNT is each agent's own, and
        differs between nodes of one job.

        Raises:
            SpecError: half of torchrun's variables, or one that is no number.
        """
        given = [key for key in _TORCHRUN if key in environ]
        if {"RANK", "WORLD_SIZE"} & set(given):
            missing = [key for key in _TORCHRUN if key not in environ]
            if missing:
                raise SpecError(
                    f"environment: {', '.join(given)} set but not {', '.join(missing)}; start "
                    "with torchrun, set all four, or unset them for a single process"
                )
            return cls._from_torchrun(environ)
        if "SLURM_PROCID" in environ and _slurm_tasks(environ) is not None:
            return cls._from_slurm(environ)
        return cls()

    @classmethod
    def _from_torchrun(cls, environ: Mapping[str, str]) -> Launch:
        rank = _number(environ, "RANK")
        agent_serves = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(
            rank=rank,
            world_size=_number(environ, "WORLD_SIZE"),
            local_rank=_optional(environ, "LOCAL_RANK"),
            address=environ["MASTER_ADDR"],
            port=_number(environ, "MASTER_PORT"),
            hosts_store=rank == 0 and not agent_serves,
            rank_serves=not agent_serves,
        )._checked()

    @classmethod
    def _from_slurm(cls, environ: Mapping[str, str]) -> Launch:
        """srun's variables; MASTER_ADDR and MASTER_PORT override the first node and a port
        made from the job's number, so that jobs sharing a node do not meet. A single task meets
        nobody, and takes no port."""
        rank = _number(environ, "SLURM_PROCID")
        world_size = _slurm_tasks(environ) or 1
        local_rank = _optional(environ, "SLURM_LOCALID")
        if world_size == 1:
            return cls(rank=rank, local_rank=local_rank)._checked()
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "localhost")
        job = _number(environ, "SLURM_JOB_ID", default=0)
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            address=environ.get("MASTER_ADDR") or first_host(nodes),
            port=_number(environ, "MASTER_PORT", default=20000 + job % 10000),
            hosts_store=rank == 0,
        )._checked()

    def _checked(self) -> Launch:
        if not 0 <= self.rank < self.world_size:
            raise SpecError(
                f"environment: rank {self.rank} does not fit a world of {self.world_size}; the "
                "launcher's variables contradict each other"
            )
        return self


def _slurm_tasks(environ: Mapping[str, str]) -> int | None:
    """How many tasks srun has started beside this one; None where srun has started nothing.

    A job step's variables tell. The shell of a batch script has SLURM_PROCID=0 and the job's
    SLURM_NTASKS too, as if it were the first of them, but none that begins with SLURM_STEP; that
    of salloc has no SLURM_PROCID. Where salloc opens a shell on a node
    (LaunchParameters=use_interactive_step), that is a step, number 4294967290, of one task,
    beside the job's SLURM_NTASKS. (Seen with SLURM 22.05.8; srun's manual page, "OUTPUT
    ENVIRONMENT VARIABLES", lists the same for steps.)
    """
    if "SLURM_STEP_NUM_TASKS" in environ:
        return _number(environ, "SLURM_STEP_NUM_TASKS")
    if "SLURM_STEP_ID" in environ and "SLURM_NTASKS" in environ:
        return _number(environ, "SLURM_NTASKS")
    return None


def _number(environ: Mapping[str, str], key: str, default: int | None = None) -> int:
    value = environ.get(key)
    if value is None and default is not None:
        return default
    if value is None or not value.isdecimal():
        raise SpecError(f"environment: {key}={value!r}: expected a number")
    return int(value)


def _optional(environ: Mapping[str, str], key: str) -> int | None:
    return _number(environ, key) if key in environ else None


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list.

    >>> first_host("gpu[007-009,011],cpu1"), first_host("a1,a2"), first_host("rack[1-2]n[3,4]")
    ('gpu007', 'a1', 'rack1n3')
    """
    host = re.sub(r"\[([^],-]+)[^]]*\]", r"\1", nodes)
    return host.split(",")[0]
