"""Meaning of torch's errors: a peer that is gone or silent, a lost store, or another failure."""

from __future__ import annotations

import re
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from commgrid.errors import CommGridError, PeerTimeoutError
from commgrid.store.client import served
from commgrid.store.search import CANNOT_SERVE, first_line


def as_peer_error(what: str, error: BaseException, asked: Any = None) -> CommGridError:
    """Return commgrid's error for torch's: an absent or silent peer, a lost store, or another.

    Args:
        what: the subject of its message.
        error: torch's.
        asked: the store that was asked; None: WORLD's.
    """
    if isinstance(error, CommGridError):
        return error
    text = first_line(error)
    if is_store_gone(error):
        return PeerTimeoutError(
            f"{what}: the store{address_of(asked)} has ended or does not answer ({text}); is "
            "the process that serves it, rank 0's or the launcher's, still running?"
        )
    if is_peer_failure(error):
        return PeerTimeoutError(f"{what}: a member is gone, or did not answer in time ({text})")
    return CommGridError(f"{what}: {text}")


def address_of(store: Any) -> str:
    """Return the address of a store, None for WORLD's, as ` at host:port`; empty if not known."""
    if store is None and dist.is_initialized():
        store = c10d._get_default_store()
    store = None if store is None else served(store)
    return f" at {store.host}:{store.port}" if hasattr(store, "host") else ""


def is_peer_failure(error: BaseException) -> bool:
    """Whether torch raised it because another rank, or the store's server, is gone or silent."""
    if isinstance(error, CommGridError) or not isinstance(error, RuntimeError):
        return False
    said = str(error)
    if isinstance(error, dist.DistNetworkError):  # of the store, or of a port to serve one at
        return not CANNOT_SERVE.search(said)
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
    return isinstance(error, dist.DistNetworkError) and not CANNOT_SERVE.search(str(error))


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
