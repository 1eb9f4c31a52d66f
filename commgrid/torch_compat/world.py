"""Starting and stopping torch.distributed, the store its ranks meet at, and what its errors mean.

`docs/torch_versions.md` lists the names that are private to torch, and says what to do when one is
removed.
"""

from __future__ import annotations

import re
import socket
import time
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import wait as wait_for_futures
from contextlib import nullcontext, suppress
from datetime import timedelta
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d

from commgrid.errors import CommGridError, PeerTimeoutError, SpecError
from commgrid.layout.axis_names import nearest
from commgrid.planning.group_row import GroupOptions
from commgrid.torch_compat import nccl as torch_nccl
from commgrid.torch_compat.addresses import address_towards, outward_address
from commgrid.torch_compat.patient import Asked, served
from commgrid.version import VERSION

if TYPE_CHECKING:
    from commgrid.runtime.launch import Launch

FAKE = "fake"


def is_initialized() -> bool:
    """Whether torch.distributed is up."""
    return dist.is_available() and bool(dist.is_initialized())


def world_rank() -> int:
    return dist.get_rank()


def world_size() -> int:
    return dist.get_world_size()


def world_backend() -> str:
    """Return the name of WORLD's backend, such as `gloo`, `cpu:gloo,cuda:nccl` or `fake`."""
    world = c10d._get_default_group()
    backend: str = c10d._world.pg_map[world][0]
    if backend == c10d.Backend.UNDEFINED:  # none was given: what torch chose, a device each
        backend = c10d._world.pg_backend_config[world]
    return backend


def world_store() -> Any:
    """The store that WORLD met at."""
    return c10d._get_default_store()


def own_address() -> str:
    """Return this host's address for other hosts: the one from which it reaches the store."""
    store = served(world_store())
    found = address_towards(store.host, store.port) if hasattr(store, "host") else None
    return outward_address() if found is None else found


def group_timeout(limit: float | None) -> float:
    """Return the seconds that collectives of a grid may take.

    Args:
        limit: the grid's `timeout`; None: torch's default for WORLD's backend.
    """
    if limit is not None:
        return limit
    backend = world_backend()
    kind = "nccl" if "nccl" in backend else backend.partition(",")[0].rpartition(":")[2]
    return float(c10d._get_default_timeout(c10d.Backend(kind)).total_seconds())


def default_backend() -> str:
    """Return the backend with which commgrid starts torch.distributed: NCCL with CUDA, else gloo.

    Gloo beside NCCL would connect every rank with every other rank.
    """
    return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def take_device(launch: Launch, backend: str) -> None:
    """Make the CUDA device with this rank's local rank the current one.

    A current device other than 0 was chosen by the program, and stays. Device 0 is also current
    after any first use of CUDA, so a launcher's number replaces it.

    Raises:
        SpecError: NCCL among several ranks and devices, and nothing says which is this one's.
    """
    if not torch.cuda.is_available():
        return
    touched, count = torch.cuda.is_initialized(), torch.cuda.device_count()  # type: ignore[no-untyped-call]
    if touched and torch.cuda.current_device() != 0:
        return
    if launch.local_rank is not None:
        torch.cuda.set_device(launch.local_rank % count)
    elif not touched and count > 1 and launch.world_size > 1 and "nccl" in backend:
        raise SpecError(
            f"rank {launch.rank} sees {count} CUDA devices, and neither LOCAL_RANK nor "
            "SLURM_LOCALID says which is its own; start with torchrun or srun, set LOCAL_RANK, or "
            "call torch.cuda.set_device before commgrid.initialize"
        )


def versions() -> dict[str, str]:
    """Return the versions that all ranks must share: of commgrid, torch, and NCCL with CUDA."""
    found = {"commgrid": VERSION, "torch": str(torch.__version__)}
    if torch.cuda.is_available() and dist.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found


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
    search = _StoreSearch(launch, time.monotonic() + left)
    Asked(search.run)
    store = search.wait(left)
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


def pause_between_probes(world_size: int) -> float:
    """Return the seconds between two attempts of a rank to reach the store's port.

    All ranks look until rank 0 serves it, and then all connect at once: a server accepts some
    20,000 connections a second.

    >>> pause_between_probes(8), pause_between_probes(16_384)
    (0.05, 0.8192)
    """
    return max(0.05, world_size / 20_000)


class _StoreSearch:
    """Connecting to a launch's store, in a thread of its own.

    Torch's client waits in C++, for ever where something listens that never answers, and so may
    looking up a host's name: there neither a time limit nor Ctrl-C would reach the main thread.

    Args:
        launch: whose store.
        deadline: `time.monotonic()` at which to give up.
    """

    def __init__(self, launch: Launch, deadline: float) -> None:
        assert launch.address is not None
        self._launch, self._deadline = launch, deadline
        self._address, self._port = launch.address, launch.port
        self._where = f"{launch.address}:{launch.port}"
        self._found: Future[Any] = Future()
        # For the error.
        self._listens = launch.hosts_store
        self._last = "no answer"

    def wait(self, seconds: float) -> Any:
        """Wait for the store, on the main thread."""
        try:
            wait_for_futures([self._found], seconds)
        except BaseException:  # Ctrl-C
            self._found.cancel()
            raise
        if self._found.cancel():
            raise PeerTimeoutError(self._why(seconds))
        return self._found.result()

    def run(self) -> None:
        """Try until the store is reached or the main thread has given up."""
        # A first connection can get lost where many ranks connect at once: short tries, then
        # longer. The rank that serves the store tries once: torch ends its server with a try that
        # fails, and clients that have connected to it lose it.
        patience = float("inf") if self._launch.hosts_store else 1.0
        while not self._found.cancelled():
            left = max(self._deadline - time.monotonic(), 0.1)
            try:
                if not self._launch.hosts_store and not self._is_served(min(left, 1.0)):
                    time.sleep(pause_between_probes(self._launch.world_size))
                    continue
                self._listens = True
                self._finish(self._connect(min(patience, left)))
                return
            except RuntimeError as error:
                self._last = first_line(error)
                if _CANNOT_SERVE.search(self._last):
                    self._finish(self._cannot_serve(error))
                    return
                patience *= 2
            except Exception as error:
                self._finish(error)
                return

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

    def _finish(self, outcome: Any) -> None:
        with suppress(InvalidStateError):  # the main thread has given up
            if isinstance(outcome, BaseException):
                self._found.set_exception(outcome)
            else:
                self._found.set_result(outcome)

    def _cannot_serve(self, error: RuntimeError) -> CommGridError:
        why = self._last
        if "EADDRINUSE" in why:
            why = f"another process there listens on port {self._port} already"
        failed = CommGridError(
            f"rank {self._launch.rank} on {socket.gethostname()} cannot serve the store at "
            f"{self._where}: {why}; end that process, as where it is left of an earlier job, or "
            "set MASTER_PORT to a free port on every rank"
        )
        failed.__cause__ = error
        return failed

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


def start_world(
    launch: Launch,
    store: Any,
    incarnation: str,
    backend: str,
    startup_timeout: float,
    watched: bool = False,
) -> None:
    """Start torch.distributed on a store, with keys that no earlier start has used.

    Args:
        launch: this process's place.
        store: of all ranks.
        incarnation: prefix of the keys.
        backend: of WORLD.
        startup_timeout: seconds in which the ranks must connect.
        watched: whether grids are watched, so that survivors of a timeout live on.

    Raises:
        PeerTimeoutError: the ranks could not connect within `startup_timeout` seconds.
        SpecError: nothing says which CUDA device is this rank's.
    """
    take_device(launch, backend)
    limit = c10d._get_default_timeout(c10d.Backend(backend))
    patience = timedelta(seconds=startup_timeout) if "gloo" in backend else limit
    kinds = set(c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map().values())
    lives_on = torch_nccl.dumps_nothing() if watched else nullcontext()
    try:
        with lives_on:
            dist.init_process_group(
                backend,
                store=PrefixStore(f"world/{incarnation}", store),
                rank=launch.rank,
                world_size=launch.world_size,
                timeout=patience,
                device_id=torch_nccl.device_for(kinds),
                pg_options=torch_nccl.make_options(GroupOptions(), kinds, patience),
            )
    except RuntimeError as error:
        raise as_peer_error("torch.distributed cannot be started", error) from error
    if "gloo" in backend:
        set_timeout(c10d._get_default_group(), limit)


def start_fake_world(rank: int, world_size: int) -> None:
    """Make this process one rank of a world without other processes, in which nothing is sent.

    `init_process_group` does nothing from then on, so that a program can call it.

    Args:
        rank, world_size: what torch.distributed says from now on.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(FAKE, store=FakeStore(), rank=rank, world_size=world_size)
    everywhere: Any = dist
    everywhere.init_process_group = lambda *_, **__: None


def set_timeout(group: dist.ProcessGroup, limit: timedelta) -> None:
    """Set the time limit of a group's collectives, on each of its backends."""
    if hasattr(dist, "set_timeout"):  # torch 2.14
        dist.set_timeout(limit, group)
        return
    # The one before leaves out what is in torch's wrapper for debugging, and warns.
    for device in group._device_types:
        backend = unwrapped(group._get_backend(device))
        if hasattr(backend, "_set_default_timeout"):
            backend._set_default_timeout(limit)


def unwrapped(backend: Any) -> Any:
    """Return the backend within torch's wrapper for debugging."""
    return getattr(backend, "wrapped_pg", backend)


def stop_world() -> None:
    """End torch.distributed if it is started."""
    if is_initialized():
        dist.destroy_process_group()


def as_peer_error(what: str, error: RuntimeError) -> CommGridError:
    """Return commgrid's error for torch's: an absent or silent peer, a lost store, or another."""
    if isinstance(error, CommGridError):
        return error
    text = first_line(error)
    if is_store_gone(error):
        return PeerTimeoutError(
            f"{what}: the store{_store_address()} has ended or does not answer ({text}); is the "
            "process that serves it, rank 0's or the launcher's, still running?"
        )
    if is_peer_failure(error):
        return PeerTimeoutError(f"{what}: a member is gone, or did not answer in time ({text})")
    return CommGridError(f"{what}: {text}")


def _store_address() -> str:
    """Return the address of WORLD's store as ` at host:port`; empty if it is not known."""
    store: Any = served(world_store()) if is_initialized() else None
    return f" at {store.host}:{store.port}" if hasattr(store, "host") else ""


def is_peer_failure(error: BaseException) -> bool:
    """Whether torch raised it because another rank, or the store's server, is gone or silent."""
    if isinstance(error, CommGridError) or not isinstance(error, RuntimeError):
        return False
    said = str(error)
    if isinstance(error, dist.DistNetworkError):  # of the store, or of a port to serve one at
        return not _CANNOT_SERVE.search(said)
    if isinstance(error, dist.DistBackendError) and _NCCL_PEER.search(said):
        return True
    return any(pattern.search(said) for pattern in _PEER_ERRORS)


def lost_by_gloo(error: BaseException) -> bool:
    """Return whether an error of `as_peer_error` is about a connection that gloo had and lost.

    The rank on its other side may be alive. gloo accepts any process that connects and gives the
    expected rank, such as one of another job whose peer had this port before.
    """
    return _LOST_BY_GLOO.search(str(error.__cause__)) is not None


def is_store_gone(error: BaseException) -> bool:
    """Return whether a call of the store failed because its server has ended."""
    return isinstance(error, dist.DistNetworkError) and not _CANNOT_SERVE.search(str(error))


_ADVICE = ". This is typically caused by a remote worker"  # what gloo adds
_IN_GLOO = re.compile(r"^\[\S+\.cc:\d+\] ")

# Errors of torch 2.11 to 2.15 about a peer that is gone or silent. A test provokes each but NCCL's,
# which need GPUs, and have not been seen yet.
_GONE = (
    "connection (closed by|reset by|refused|timed out|aborted)|broken pipe|no route to host"
    "|network is (unreachable|down)|host is (unreachable|down)|endpoint is not connected"
)
_PEER_ERRORS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"gloo/transport/\S+:\d+\] .*({_GONE})",
        r"gloo/transport/\S+:\d+\] timed out waiting \d+ms for (recv|send) operation",
        r"gloo/transport/\S+:\d+\] (connect|accept) timeout",
        rf"^gloo connectFullMesh failed with .*(timed out|timeout|{_GONE})",
        r"^application timeout caused pair closure$",
        r"^operation timed out!$",  # of work.wait(timeout)
        r"^wait timeout$",  # gloo's, for a key of the store
        r"\bwait timeout after \d+ms, keys: ",  # TCPStore's, also within NCCL's about its id
        r"^timeout waiting for key: .* after \d+ ms",  # FileStore's
        r"^timed out initializing process group in store based barrier on rank \d",
        r"^\[rank \d+\]: ranks? .*(failed to pass|reached) monitoredBarrier",
    )
)
_LOST_BY_GLOO = re.compile(r"gloo/transport/\S+:\d+\] .*(closed by|reset by) peer", re.IGNORECASE)
_NCCL_PEER = re.compile(
    r"ncclRemoteError|remote process exited|closed by remote peer|was aborted on rank"
    rf"|watchdog caught|NCCL timeout in|{_GONE}",
    re.IGNORECASE,
)
_CANNOT_SERVE = re.compile(r"^The server socket has failed to (listen|bind)")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without gloo's additions."""
    lines = _IN_GLOO.sub("", str(error)).partition(_ADVICE)[0].splitlines()
    return lines[0] if lines else type(error).__name__


def check_backend(key: str, backend: str | None) -> None:
    """Raise SpecError if this torch has no such `backend` (`gloo`, `cpu:gloo,cuda:nccl`)."""
    # MPI makes groups of all ranks only, and fake stands for a whole world or not at all.
    never = ("undefined", "mpi", FAKE)
    for pair in (backend or "gloo").split(","):
        kind = pair.rpartition(":")[2].lower()
        torch_nccl.check_device(key, backend or "gloo", kind)
        if kind in never or not _is_available(kind):
            known = [name for name in _backend_names() if name not in never]
            raise SpecError(
                f"{key}={backend!r}: there is no backend {kind!r} for a grid; expected one of "
                f"{', '.join(known)}, or as cpu:gloo,cuda:nccl{nearest(kind, known)}"
            )
    devices = [pair.partition(":")[0] for pair in (backend or "").split(",") if ":" in pair]
    if len(set(devices)) < len(devices) or not set(devices) <= {"cpu", "cuda", "xpu"}:
        raise SpecError(f"{key}={backend!r}: expected each device once, as in cpu:gloo,cuda:nccl")


def _is_available(kind: str) -> bool:
    """Return whether torch has a backend, or a package that registers it on demand."""
    if not kind.replace("-", "_").isidentifier():
        return False
    try:
        return bool(dist.is_backend_available(kind))
    except (RuntimeError, TypeError):  # such a package, but it does not load
        return False


def _backend_names() -> list[str]:
    """Return the names of torch's backends, with those that it registers on demand (2.14)."""
    asked = {entry.name.lower() for entry in entry_points(group="torch.distributed.backends")}
    return sorted({*c10d.Backend.backend_list, *asked})
