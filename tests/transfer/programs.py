"""Two programs, each with a torch.distributed of its own, which meet for a transfer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import commgrid
from commgrid.launching.local_ranks import Ranks
from commgrid.launching.process import free_port
from commgrid.tensor_parallel import ColumnParallelLinear
from commgrid.transfer import Transfer

PEERS = {"trainer": "engine", "engine": "trainer"}
ROWS, COLUMNS = 24, 6
Program = Callable[..., Any]
"""A function of `World` and further arguments."""


class World:
    """This process's program.

    Args:
        name: `trainer`, which has the source, or `engine`.
        port: of the store where both meet, which the trainer's rank 0 serves.
        tp: ranks of the program, over which the model is cut.
        how: further arguments of its grid.
    """

    def __init__(self, name: str, port: int, tp: int, **how: Any) -> None:
        self.name, self.grid = name, commgrid.initialize(tp=tp, **how)
        self.rank = dist.get_rank()
        serves = name == "trainer" and self.rank == 0
        self.store = dist.TCPStore("127.0.0.1", port, is_master=serves, wait_for_workers=False)
        if self.grid is not None:
            self.model = ColumnParallelLinear(COLUMNS, ROWS)

    def meet(self, model: nn.Module | None = None, **how: Any) -> Transfer:
        """The transfer of this program's side."""
        sides: list[Any] = [model or self.model, None]
        grids: dict[str, Any] = {"source_grid": self.grid}
        if self.name == "engine":
            sides, grids = sides[::-1], {"target_grid": self.grid}
        given = {"store": self.store, "peer": PEERS[self.name], "timeout": 60.0, **how}
        return Transfer(*sides, **grids, **given)

    def fill(self, version: int) -> None:
        """Give the source's numbers of a version."""
        with torch.no_grad():
            self.model.weight.copy_(self.slice(version))
            assert self.model.bias is not None
            self.model.bias.fill_(version)

    def slice(self, version: int) -> torch.Tensor:
        """This rank's rows of a version of the weight."""
        whole = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS) + 1000.0 * version
        return whole.chunk(self.grid.size("tp"))[self.grid.coordinate["tp"]]

    def await_other(self) -> None:
        """Wait until all ranks of both programs have come here, as one of them serves the store."""
        dist.barrier()
        if self.rank == 0:
            self.store.set(f"{self.name} is done", "")
            self.store.wait([f"{PEERS[self.name]} is done"])

    def holds(self, version: int) -> bool:
        """Whether this rank's model is a version's."""
        return torch.equal(self.model.weight, self.slice(version))


def _run(program: Program, name: str, port: int, tp: int, grid: Any, *args: Any) -> Any:
    torch.set_num_threads(1)
    return program(World(name, port, tp, **grid), *args)


@contextmanager
def started(
    program: Program, name: str, tp: int, port: int, *args: Any, grid: Any = None,
    ranks: int = 0, **how: Any
) -> Iterator[Ranks]:  # fmt: skip
    """The ranks of one program, started as torchrun starts them.

    Args:
        grid: further arguments of their grid.
        ranks: how many there are; 0: `tp`.
    """
    given = (program, name, port, tp, grid or {}, *args)
    with Ranks(_run, ranks or tp, *given, backend=None, launcher="torchrun", **how) as ranks:
        yield ranks


def both(
    trainer: Program, engine: Program, sizes: tuple[int, int] = (2, 2), *args: Any, **how: Any
) -> tuple[list[Any], list[Any]]:
    """The results of two programs that run at once, by rank."""
    port = free_port()
    with (
        started(trainer, "trainer", sizes[0], port, *args, **how) as one,
        started(engine, "engine", sizes[1], port, *args, **how) as other,
    ):
        waiting = threading.Thread(target=one.wait)  # a failed program is not waited for alone
        waiting.start()
        other.wait()
        waiting.join()
        return one.results(), other.results()


def said(call: Callable[[], Any]) -> str:
    """The error of a call; "": none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
