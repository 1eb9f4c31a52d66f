"""Communicator: a live process group, its plan, and the exchange that checks the two."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from commgrid.errors import GridMismatchError
from commgrid.planning.group_row import GroupOptions
from commgrid.planning.plan import PlannedCommunicator
from commgrid.torch_compat import ended_groups
from commgrid.torch_compat import groups as torch_groups
from commgrid.torch_compat import messages as torch_transfers
from commgrid.torch_compat import suspended_groups as torch_suspend
from commgrid.torch_compat import world as torch_world
from commgrid.torch_compat.peer_errors import as_peer_error


@dataclass
class Communicator(torch_groups.CalledGroup):
    """One communicator of a grid.

    Args:
        planned: names, ranks and options as planned.
        group: the torch process group.
        seconds_to_create: what creating it took on this rank.
        seconds_to_connect: what its first exchange took; None if it has not connected at start-up.
        adopted: whether the program made the group, and commgrid did not.
        suspended: whether `grid.suspend` has given it up until `grid.resume`.
    """

    planned: PlannedCommunicator
    group: ProcessGroup
    seconds_to_create: float
    seconds_to_connect: float | None = None
    adopted: bool = False
    suspended: bool = False

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

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
        """Whether the members' connections are known to exist.

        NCCL reports it, except torch 2.14's `nccl2`. A gloo group that the grid made counts as
        connected once its ranks were exchanged, at start-up or by `grid.check`. False while it is
        suspended.
        """
        if self.suspended:
            return False
        by_pairs = not self.adopted and torch_groups.connects_by_pairs(self.group)
        told = None if by_pairs else torch_groups.is_connected(self.group)
        if told is None and not self.adopted:
            return self.seconds_to_connect is not None and self.group.size() > 1
        return told is not False

    @property
    def state(self) -> str:
        """`suspended`, `connected`, or `not connected`; see `connected`."""
        return "suspended" if self.suspended else "connected" if self.connected else "not connected"

    @property
    def memory(self) -> dict[str, int] | None:
        """What NCCL counts of its device memory, in bytes, where torch tells (2.12, NCCL 2.29.7).

        `total`, of which `suspend` is given back by suspending and `persist` is not; `suspended`
        is 1 meanwhile. None on other backends, and before it connects.
        """
        return torch_suspend.memory_of(self.group)

    def describe(self) -> str:
        return f"communicator {','.join(self.names)} of {_short(self.ranks)}"


@dataclass(frozen=True)
class CheckReport:
    """What `grid.check` found: names, size and seconds of every communicator, all of them good.

    Suspended ones are left out.
    """

    rank: int
    rows: tuple[tuple[tuple[str, ...], int, float], ...]
    suspended: tuple[tuple[str, ...], ...] = ()

    def __str__(self) -> str:
        lines = [f"rank {self.rank}: {len(self.rows)} communicators, all with the planned members"]
        lines += [f"  {seconds * 1e3:8.2f} ms  {size:5} ranks  {', '.join(names)}"
                  for names, size, seconds in self.rows]  # fmt: skip
        lines += [f"    suspended, not asked  {', '.join(names)}" for names in self.suspended]
        return "\n".join(lines)


def exchange_ranks(
    communicators: Iterable[Communicator],
    patience: Callable[[], float],
    failed: Callable[[BaseException], object] = lambda error: None,
    lost: Callable[[], str | None] = lambda: None,
) -> list[float]:
    """Connects communicators by exchanging their members' ranks, and compares with the plan.

    The exchanges overlap.

    Args:
        communicators: of this rank, in creation order.
        patience: seconds that are left to wait.
        failed: called with the error, before other ranks see this rank's connections close.
        lost: returns the failure if another rank is known to be gone.

    Returns:
        The seconds that each took.
    """
    exchanges: list[_Exchange] = []
    held = list(communicators)

    def start() -> None:
        for communicator in held:
            exchanges.append(_Exchange.start(communicator))

    def about() -> str:
        return held[min(len(exchanges), len(held) - 1)].describe()

    try:
        torch_groups.connected_by(start, [each.group for each in held], patience(), about, lost)
        return [exchange.finish(patience()) for exchange in exchanges]
    except BaseException as error:
        try:
            failed(error)
        finally:  # also at a second Ctrl-C
            ended_groups.stop_waiting(exchange.communicator.group for exchange in exchanges)
        raise


def check_all(rank: int, communicators: Iterable[Communicator], timeout: float) -> CheckReport:
    """Exchanges members' ranks on every communicator; see `HyperCommGrid.check`."""
    held = list(communicators)
    live = [c for c in held if not c.suspended]
    rows = [(c.names, len(c.ranks), exchange_ranks([c], lambda: timeout)[0]) for c in live]
    return CheckReport(rank, tuple(rows), tuple(c.names for c in held if c.suspended))


@dataclass
class _Exchange:
    """An exchange of the members' ranks over each backend of a communicator, under way."""

    communicator: Communicator
    started: float
    parts: list[tuple[torch.device, torch_transfers.RankExchange]]

    @classmethod
    def start(cls, communicator: Communicator) -> _Exchange:
        """Starts it; on a communicator of one rank, or of none that exists, there is none.

        Raises:
            PeerTimeoutError: a member did not connect in time.
        """
        exchange = cls(communicator, time.perf_counter(), [])
        if communicator.group.size() == 1 or communicator.backend == torch_world.FAKE:
            return exchange
        for device in torch_groups.devices_of(communicator.group):
            try:
                part = torch_transfers.start_exchange(communicator.group, device)
            except RuntimeError as error:
                raise exchange.failure(device, error) from error
            exchange.parts.append((device, part))
        return exchange

    def finish(self, timeout: float) -> float:
        """Waits for all members, notes that they are connected, and returns the seconds it took.

        Raises:
            GridMismatchError: others answered than were planned.
            PeerTimeoutError: a member did not answer within `timeout` seconds.
        """
        communicator = self.communicator
        for device, part in self.parts:
            try:
                ranks = part.wait(timeout)
            except RuntimeError as error:
                raise self.failure(device, error) from error
            if ranks != communicator.ranks:
                raise GridMismatchError(
                    f"{communicator.describe()} answered with {_short(ranks)}; two groups "
                    "have met under one name, or a rank runs another version of commgrid"
                )
        # On the CPU when it was over: until then others may have been waited for.
        over = [part.ended[0] if part.ended else time.perf_counter() for _, part in self.parts]
        seconds = max(over, default=time.perf_counter()) - self.started
        if communicator.seconds_to_connect is None:
            communicator.seconds_to_connect = seconds
        return seconds if self.parts else 0.0

    def failure(self, device: torch.device, error: RuntimeError) -> Exception:
        """What a backend's error means."""
        what = f"{self.communicator.describe()}: the exchange of ranks on {device.type} failed"
        return as_peer_error(what, error)


def _short(ranks: tuple[int, ...]) -> str:
    listed = ", ".join(map(str, ranks[:16]))
    return f"ranks {listed}" + (f", … ({len(ranks)} in all)" if len(ranks) > 16 else "")
