"""Standby stores: used for rendezvous once WORLD's store is gone.

Where no launcher serves the store, a rank does, and it dies with that rank. So the first, the
middle and the last of the other ranks each serve another one, empty, and when torch.distributed
starts all ranks learn the three addresses. A store that does not answer may be gone, in which case
its machine refuses connections at once, or silent, as behind a cut network or in a stopped process.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any
from uuid import uuid4

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d

from commgrid.rendezvous.op import Get, Put, StoreLostError, single
from commgrid.rendezvous.timeouts import timeouts
from commgrid.store.client import Asked, served
from commgrid.store.driver import StoreDriver
from commgrid.store.hosts import address_towards

_KEPT, _WORLD = "commgrid", "world"  # prefixes in a standby store
_TOKEN = "standby"


class Answer(Enum):
    """Result of asking a store."""

    HERE = "it answers"
    GONE = "no process serves it any more"
    SILENT = "it does not answer, and may be alive for others"


@dataclass(frozen=True)
class Standby:
    """A store served by this process until it is closed, or the process ends.

    Args:
        server: torch's; it ends with the last reference to it.
        address: what `connect` takes, on any rank.
    """

    server: Any
    address: str


def chosen(ranks: Sequence[int]) -> list[int]:
    """Ranks that serve a standby: the first, the middle and the last, likely on several hosts.

    >>> chosen(range(1, 8)), chosen([5]), chosen([])
    ([1, 4, 7], [5], [])
    """
    return sorted({ranks[0], ranks[len(ranks) // 2], ranks[-1]}) if ranks else []


def serve(towards: tuple[str, int] | None) -> Standby | None:
    """Serves an empty store on a free port of this machine; None: it cannot.

    Args:
        towards: a host and port that all ranks reach. The store's address is the one from which
            this machine reaches it. None: loopback.
    """
    try:
        server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        token = uuid4().hex
        StoreDriver(server, 1).run(single(Put(_TOKEN, token.encode())))
    except RuntimeError:
        return None
    own = None if towards is None else address_towards(*towards)
    return Standby(server, json.dumps([own or "127.0.0.1", server.port, token]))


def connect(address: str, own: Standby | None) -> tuple[Any, Answer]:
    """The standby store of an address.

    Args:
        address: of a `Standby`.
        own: what this process serves.
    """
    if own is not None and own.address == address:
        return own.server, Answer.HERE
    host, port, token = json.loads(address)
    unheard = _look(host, port)
    if unheard is not None:
        return None, unheard

    def meet() -> Any:
        limit = timedelta(seconds=timeouts().connect)
        store = TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)
        (found,) = StoreDriver(store, 1).run(single(Get((_TOKEN,))))
        return store if found == token.encode() else None

    asked = Asked(meet)
    if not asked.is_over(timeouts().connect):  # torch cannot cancel it
        return None, Answer.SILENT
    with suppress(RuntimeError, ValueError):
        if (store := asked.answer()) is not None:
            return store, Answer.HERE
    return None, Answer.GONE  # or another store, on the port that has become free


def _look(host: str, port: int) -> Answer | None:
    """Why no process listens at a port: its store is gone or silent; None: one listens.

    All ranks look at once, and a server with a full queue takes a second attempt of the kernel's. A
    rank that did not wait for it would go to another store than the others.
    """
    try:
        socket.create_connection((host, port), timeouts().connect).close()
    except ConnectionRefusedError:
        return Answer.GONE
    except OSError:
        return Answer.SILENT
    return None


def ask(store: Any) -> Answer:
    """Whether a store answers."""
    try:
        StoreDriver(store, 1).run(single(Get((_TOKEN,))))
        return Answer.HERE
    except StoreLostError as lost:
        if lost.silent:
            return Answer.SILENT
    store = served(store)
    if hasattr(store, "host"):  # perhaps only the connection is gone, where a network was cut
        return _look(store.host, store.port) or Answer.SILENT
    return Answer.GONE


def move_world(left: Any, store: Any) -> Any:
    """Has WORLD, and all groups made from now on, meet at another store.

    Args:
        left: WORLD's store until now.
        store: where it meets from now on.

    Returns:
        The store as commgrid keeps it.
    """
    kept = PrefixStore(_KEPT, store)
    kept.set_timeout(left.timeout)
    world = c10d._get_default_group()
    backend, _ = c10d._world.pg_map[world]
    c10d._world.pg_map[world] = (backend, PrefixStore(_WORLD, kept))
    return kept


def world_in(store: Any) -> Any:
    """WORLD's store of ranks that have moved to a standby store."""
    return PrefixStore(_WORLD, PrefixStore(_KEPT, store))
