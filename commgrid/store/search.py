"""Search for a launch's store: connecting to it, and why it was not found."""

from __future__ import annotations

import re
import socket
import time
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d

from commgrid.errors import CommGridError, PeerTimeoutError
from commgrid.store.client import Asked
from commgrid.store.launch import Launch


def connect_store(launch: Launch, left: float) -> Any:
    """Connect to the store that all ranks of a launch share; a world of one has its own.

    Args:
        launch: whose store.
        left: seconds until startup_timeout is over; it may be over already.

    Raises:
        PeerTimeoutError: no process serves it in time; names its address. Or no time was left to
            ask, through no fault of others.
        CommGridError: this rank should serve it and cannot, since the port is taken.
    """
    if launch.address is None:
        return HashStore()
    if left <= 0:
        raise PeerTimeoutError(
            f"startup_timeout was over {-left:.3g} s before rank {launch.rank} came to ask for the "
            "store: its own start took the time (importing modules, starting CUDA, planning, a "
            "stopped process), no peer did; find out what did on this rank, or raise "
            "startup_timeout"
        )
    store = _StoreSearch(launch, time.monotonic() + left).found_within(left)
    # Under torchrun the agent serves the store and keeps it over restarts, with the keys of earlier
    # attempts. TORCHELASTIC_RESTART_COUNT is no name for an attempt: each agent counts its own.
    return PrefixStore("commgrid", store)


def follow_timeout(store: Any, timeout: float | None, backend: str) -> None:
    """Give a store the time limit of collectives; a communicator's first use waits at the store.

    Args:
        store: what `connect_store` returned.
        timeout: of collectives, in seconds; None: torch's default for the backend.
        backend: what they run on.
    """
    limit = c10d._get_default_timeout(c10d.Backend(backend))
    store.set_timeout(limit if timeout is None else timedelta(seconds=timeout))


class _StoreSearch:
    """Connecting to a launch's store, in a thread of its own.

    Torch's client waits in C++, for ever where something listens that never answers, and so may
    looking up a host's name: there neither a time limit nor Ctrl-C would reach the main thread.
    """

    def __init__(self, launch: Launch, deadline: float) -> None:
        assert launch.address is not None
        self._launch, self._deadline = launch, deadline
        self._address, self._port = launch.address, launch.port
        self._where = f"{launch.address}:{launch.port}"
        self._given_up = False
        # For the error.
        self._listens = launch.hosts_store
        self._last = "no answer"

    def found_within(self, seconds: float) -> Any:
        """Wait for the store, on the main thread."""
        try:
            asked = Asked(self._run)
            if not asked.is_over(seconds):
                raise PeerTimeoutError(self._why(seconds))
        finally:
            self._given_up = True  # also by Ctrl-C
        return asked.answer()

    def _run(self) -> Any:
        """Try until the store is reached or the main thread has given up."""
        # A first connection can get lost where many ranks connect at once: short tries, then
        # longer. The rank that serves the store tries once: torch ends its server with a try that
        # fails, and clients that have connected to it lose it.
        patience = float("inf") if self._launch.hosts_store else 1.0
        while not self._given_up:
            left = max(self._deadline - time.monotonic(), 0.1)
            try:
                if not self._launch.hosts_store and not self._is_served(min(left, 1.0)):
                    # Then all ranks connect at once: a server accepts some 20,000 a second.
                    time.sleep(max(0.05, self._launch.world_size / 20_000))
                    continue
                self._listens = True
                return self._connect(min(patience, left))
            except RuntimeError as error:
                self._last = first_line(error)
                if CANNOT_SERVE.search(self._last):
                    raise self._cannot_serve() from error
                patience *= 2
        return None

    def _connect(self, seconds: float) -> Any:
        return TCPStore(
            self._address,
            self._port,
            is_master=self._launch.hosts_store,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )

    def _is_served(self, seconds: float) -> bool:
        """Return whether a process listens there; torch's client tries on past its timeout."""
        try:
            with socket.create_connection((self._address, self._port), seconds) as probe:
                # If no process listens on a port, a socket may get that port and connect to itself.
                return bool(probe.getsockname() != probe.getpeername())
        except OSError as error:
            self._last = error.strerror or str(error)
            return False

    def _cannot_serve(self) -> CommGridError:
        why = self._last
        if "EADDRINUSE" in why:
            why = f"another process there listens on port {self._port} already"
        return CommGridError(
            f"rank {self._launch.rank} on {socket.gethostname()} cannot serve the store at "
            f"{self._where}: {why}; end that process, as where it is left of an earlier job, or "
            "set MASTER_PORT to a free port on every rank"
        )

    def _why(self, seconds: float) -> str:
        when = f"within startup_timeout ({seconds:.3g} s of it were left; {self._last})"
        if not self._listens:
            return (
                f"nobody serves the store at {self._where} {when}; is rank 0's process, or the "
                "launcher there, running and reachable?"
            )
        if self._launch.hosts_store:
            return (
                f"rank {self._launch.rank} on {socket.gethostname()} serves the store but does not "
                f"reach it at {self._where} {when}; is MASTER_ADDR this machine's?"
            )
        return (
            f"what listens at {self._where} did not answer as a store {when}; is it another "
            "program's port, or rank 0's process stopped?"
        )


_ADVICE = ". This is typically caused by a remote worker"  # what gloo adds
_IN_GLOO = re.compile(r"^\[\S+\.cc:\d+\] ")
CANNOT_SERVE = re.compile(r"^The server socket has failed to (listen|bind)")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without gloo's additions."""
    lines = _IN_GLOO.sub("", str(error)).partition(_ADVICE)[0].splitlines()
    return lines[0] if lines else type(error).__name__
