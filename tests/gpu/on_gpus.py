"""Ranks on GPUs over NCCL, several on one GPU if need be; emulated, over gloo on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid.testing import Ranks

LIMIT = 70.0
"""Seconds until the ranks of a test are killed."""
HEARTBEAT_SECONDS = 15
"""Limit of NCCL's heartbeat monitor, which ends a process that it takes for stuck."""
MIB = 2**20


@dataclass(frozen=True)
class Where:
    """Place of a test that also runs without a GPU.

    Args:
        emulated: over gloo on the CPU, with shorter waits.
    """

    emulated: bool

    @property
    def device(self) -> str:
        return "cpu" if self.emulated else "cuda"

    @property
    def backend(self) -> str:
        return "gloo" if self.emulated else "nccl"

    @property
    def method(self) -> str:
        """How ranks start: CUDA does not survive a fork."""
        return "fork" if self.emulated else "spawn"

    def of(self, real: float, emulated: float) -> float:
        """Seconds, or a count."""
        return emulated if self.emulated else real

    def ones(self, count: int = 4) -> torch.Tensor:
        return torch.ones(count, device=self.device)

    def take_device(self, rank: int) -> None:
        if not self.emulated:
            take_device(rank)

    def wait(self) -> None:
        """Wait for the device."""
        if not self.emulated:
            torch.cuda.synchronize()

    def memory(self) -> float:
        """MiB in use: of the device, by the driver's count, or of this process."""
        if not self.emulated:
            free, total = torch.cuda.mem_get_info()
            return (total - free) / MIB
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * 4096 / MIB


ON_GPUS = Where(emulated=False)


def nccl_variables(rank: int) -> dict[str, str]:
    """Environment of a rank that shares its GPU: NCCL refuses two ranks of a host on one device.

    Each says that it is on a host of its own, and NCCL talks over sockets on loopback. On a machine
    with several GPUs nothing is set, and tests with more ranks than GPUs are skipped.
    """
    if torch.cuda.device_count() > 1:
        return {}
    return {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo"}


def take_device(rank: int) -> None:
    """Choose a GPU for this rank."""
    torch.cuda.set_device(rank % torch.cuda.device_count())


def on_gpus(
    function: Callable[..., Any], world: int, *args: Any, bound: bool = False,
    timeout: float = LIMIT,
) -> list[Any]:  # fmt: skip
    """Call `function(*args)` on ranks with a device each, and WORLD started.

    Args:
        function, args: as `run_on_ranks` takes them.
        world: how many ranks.
        bound: whether WORLD is bound to its device, so that NCCL connects at once.
        timeout: seconds until all ranks are killed.
    """
    return programs_on_gpus(_with_world, world, function, bound, args, timeout=timeout)


def _with_world(function: Callable[..., Any], bound: bool, args: tuple[Any, ...], rank: int) -> Any:
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device if bound else None)
    found = function(*args)
    commgrid.shutdown()
    return found


def programs_on_gpus(function: Callable[..., Any], world: int, *args: Any, **how: Any) -> list[Any]:
    """Call `function(*args, rank)` on ranks with a device each, which start WORLD themselves.

    Args:
        function, world, args, how: of `ranks_on_gpus`.
    """
    with ranks_on_gpus(function, world, *args, **how) as ranks:
        return ranks.results()


def ranks_on_gpus(
    function: Callable[..., Any], world: int, *args: Any, where: Where = ON_GPUS, **how: Any
) -> Ranks:
    """Return `Ranks` for `programs_on_gpus`.

    Args:
        function, args: as `Ranks` takes them.
        world: how many ranks.
        where: on GPUs, or emulated.
        how: of `Ranks`; `environ` by rank is that of `nccl_variables` unless given.
    """
    chosen = {
        "backend": None, "launcher": "torchrun", "method": where.method, "timeout": LIMIT,
        "environ": nccl_variables, **how,
    }  # fmt: skip
    if not where.emulated and 1 < torch.cuda.device_count() < world:
        pytest.skip(f"{world} ranks on {torch.cuda.device_count()} GPUs: needs one GPU, or as many")
    ranks = [(rank,) for rank in range(world)]
    return Ranks(_with_device, world, where, function, args, per_rank=ranks, **chosen)


def _with_device(
    where: Where, function: Callable[..., Any], args: tuple[Any, ...], rank: int
) -> Any:
    where.take_device(rank)
    return function(*args, rank)
