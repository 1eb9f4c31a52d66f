"""Communicator: a live process group, what was planned of it, and the proof that they agree."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from commgrid.errors import GridMismatchError
from commgrid.planning.groups import GroupOptions
from commgrid.planning.plan import PlannedCommunicator
from commgrid.runtime import torch_groups, torch_transfers, torch_world

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass
class Communicator:
    """One communicator of a grid.

    Args:
        planned: names, ranks and options as planned.
        group: the torch process group.
        seconds_to_create: what creating it took on this rank.
        seconds_to_connect: what its first exchange took; None if it has not connected at start-up.
    """

    planned: PlannedCommunicator
    group: ProcessGroup
    seconds_to_create: float
    seconds_to_connect: float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Every group name it answers to."""
        return self.planned.names

    @property
    def ranks(self) -> tuple[int, ...]:
        """Its members' global ranks, in the group's order."""
        return self.planned.ranks

    @property
    def options(self) -> GroupOptions:
        """The options the groups table gave it."""
        return self.planned.options

    @property
    def backend(self) -> str:
        """torch's name for what it runs on."""
        return torch_groups.backend_of(self.group)

    @property
    def connected(self) -> bool:
        """Whether the members' connections exist: gloo's from creation, NCCL's from first use."""
        return torch_groups.is_connected(self.group)

    def describe(self) -> str:
        return f"communicator {','.join(self.names)} of {_short(self.ranks)}"


@dataclass(frozen=True)
class CheckReport:
    """What `grid.check` found: names, size and seconds of every communicator, all of them good."""

    rank: int
    rows: tuple[tuple[tuple[str, ...], int, float], ...]

    def __str__(self) -> str:
        lines = [f"rank {self.rank}: {len(self.rows)} communicators, all with the planned members"]
        lines += [f"  {seconds * 1e3:8.2f} ms  {size:5} ranks  {', '.join(names)}"
                  for names, size, seconds in self.rows]  # fmt: skip
        return "\n".join(lines)


def exchange_ranks(communicators: Iterable[Communicator], patience: Callable[[], float]) -> None:
    """Connects communicators by exchanging their members' ranks, and compares with the plan."""
    for communicator in communicators:
        communicator.seconds_to_connect = verify(communicator, patience())


def check_all(rank: int, communicators: Iterable[Communicator], timeout: float) -> CheckReport:
    """Exchanges members' ranks on every communicator; see `HyperCommGrid.check`."""
    rows = [(c.names, len(c.ranks), verify(c, timeout)) for c in communicators]
    return CheckReport(rank, tuple(rows))


def verify(communicator: Communicator, timeout: float) -> float:
    """Gathers the members' ranks over each backend of a communicator; returns the seconds it took.

    Raises:
        GridMismatchError: others answered than were planned.
        PeerTimeoutError: a member did not answer within `timeout` seconds.
    """
    started = time.perf_counter()
    if len(communicator.planned.members) == 1 or communicator.backend == torch_world.FAKE:
        return 0.0
    for device in torch_groups.devices_of(communicator.group):
        try:
            work, heard = torch_transfers.gather_ranks(communicator.group, device)
            work.wait(timedelta(seconds=timeout))
            ranks = tuple(int(rank) for rank in heard)
        except RuntimeError as error:
            what = f"{communicator.describe()}: the exchange of ranks on {device.type} failed"
            raise torch_world.as_peer_error(what, error) from error
        if ranks != communicator.ranks:
            raise GridMismatchError(
                f"{communicator.describe()} answered with ranks {_short(ranks)}; two groups "
                "have met under one name, or a rank runs another version of commgrid"
            )
    return time.perf_counter() - started


def _short(ranks: tuple[int, ...]) -> str:
    listed = ", ".join(map(str, ranks[:16]))
    return f"ranks {listed}" + (f", … ({len(ranks)} in all)" if len(ranks) > 16 else "")
