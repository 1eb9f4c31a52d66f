"""Leaving a gloo group of which not all ranks have connected.

Of two ranks one connects to the other, and first says its number in the group; the other one waits
for that. gloo ends such a wait by an error on all pairs of the group, and ends the process if one
of those pairs connects later (`GLOO_ENFORCE(ex_ == nullptr)` in its `Pair::handleEvents`). So this
rank makes the connections itself, in place of the rank that should, and hangs up when gloo answers,
which is as if that rank had ended just then:

    this rank should connect ──► the other one's listener: the other one waits no more
    the other one should     ──► this rank's own listener: this rank waits no more

If a rank does not answer, it is not waiting, or its wait has failed and its pair has an error. Then
the connection stays open until gloo closes it. Where two ranks have talked, their connection is
shut down.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from commgrid.rendezvous.op import Get, single
from commgrid.rendezvous.timeouts import timeouts
from commgrid.store.client import Asked, NoThreadError
from commgrid.store.driver import StoreDriver
from commgrid.torch_compat import gloo as torch_gloo

_SILENT = 16
"""Bytes on a connection over which no message has gone, at most: the number's 8, and one or two
that Linux counts for the connection itself. gloo's shortest message has 40."""
_COUNTS = struct.Struct("QQ")  # of Linux's `tcp_info`: bytes acknowledged, bytes received
_COUNTS_AT = 120


class _Address(NamedTuple):
    """Where a rank listens. Of two ranks the one with the greater address connects.

    gloo compares the ports as they are in memory: with their bytes in the network's order.
    """

    host: bytes
    port_in_memory: int
    flow_and_scope: tuple[int, ...] = ()  # IPv6

    @classmethod
    def read(cls, value: bytes) -> _Address:
        """Read what gloo writes to the store: the host's name, and a `sockaddr_storage`.

        Each comes after its length, of 8 bytes.
        """
        (length,) = struct.unpack_from("Q", value)
        raw = value[16 + length :]
        family, port = struct.unpack_from("HH", raw)
        if family == socket.AF_INET:
            return cls(raw[4:8], port)
        (flow,), (scope,) = struct.unpack_from("!I", raw, 4), struct.unpack_from("I", raw, 24)
        return cls(raw[8:24], port, (flow, scope))

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if self.flow_and_scope else socket.AF_INET

    @property
    def for_socket(self) -> tuple[Any, ...]:
        host, port = socket.inet_ntop(self.family, self.host), socket.ntohs(self.port_in_memory)
        return (host, port, *self.flow_and_scope)


def leave(group: dist.ProcessGroup, wait: float, wake_others: bool = True) -> None:
    """End this rank's waits for others to connect, and theirs for this rank.

    Also waits that begin later. It does not end attempts to connect to a host that does not answer.

    Args:
        group: gloo's, whose ranks connect when they first talk.
        wait: seconds that hosts are given, at most, to take this rank's connections.
        wake_others: whether waits of other ranks are ended.
    """
    opened: list[_Connection] = []
    for own, others in _listeners(group):
        for rank, other in others.items():
            if other is None or own < other:
                opened.append(_OPEN.connect(own, rank))
            elif wake_others:
                opened.append(_OPEN.connect(other, group.rank()))
    until = time.monotonic() + wait
    for connection in opened:
        connection.made.wait(max(until - time.monotonic(), 0.0))


def _listeners(group: dist.ProcessGroup) -> Iterator[tuple[_Address, dict[int, _Address | None]]]:
    """Of each of a group's devices: where this rank listens, and where each of the others does.

    None for a rank that has destroyed the group, and deleted its address.
    """
    driver = StoreDriver(c10d._world.pg_map[group][1], group.size())
    for keys in zip(*(torch_gloo.addresses(group, of) for of in range(group.size())), strict=True):
        values = driver.run(single(Get(keys)))
        found = {
            rank: None if value is None else _Address.read(value)
            for rank, value in enumerate(values)
        }
        if own := found.pop(group.rank()):
            yield own, found


def shut_down(group: dist.ProcessGroup) -> None:
    """Shut down a group's connections over which messages have gone, as if other ranks had ended.

    Over any other connection no call waits for an answer, and its pair may have an error. gloo ends
    no wait for a message of which it has sent or received a part, nor for one that it begins to
    send after the connection was shut down and before its thread has seen that. So messages under
    way arrive first, and then gloo reads an end before a write fails.
    """
    with _talking(group) as connections:
        _wait_for_messages(connections)
        _end(connections, socket.SHUT_RD)
        if connections:
            time.sleep(timeouts().moment)
        _end(connections, socket.SHUT_RDWR)


def _end(connections: Iterable[socket.socket], way: int) -> None:
    for each in connections:
        with suppress(OSError):  # gloo has closed it
            each.shutdown(way)


@contextmanager
def _talking(group: dist.ProcessGroup) -> Iterator[list[socket.socket]]:
    """A group's connections over which messages have gone, each by a descriptor of its own."""
    own: set[tuple[Any, ...]] = set()
    theirs: set[tuple[Any, ...]] = set()
    for listener, others in _listeners(group):
        own.add(listener.for_socket)
        theirs.update(other.for_socket for other in others.values() if other is not None)
    with ExitStack() as held:
        found: list[socket.socket] = []
        for connection in _sockets():
            with suppress(OSError):  # it has no other end
                there = connection.getpeername()
                is_ours = there in theirs or connection.getsockname() in own
                if is_ours and _bytes_of(connection) > _SILENT:
                    copy = socket.socket(fileno=os.dup(connection.fileno()))  # `dup` has it block
                    found.append(held.enter_context(copy))
        yield found


def _wait_for_messages(connections: list[socket.socket]) -> None:
    """Wait until for a moment no byte goes over connections, for `Timeouts.leave` at most."""
    until, before = time.monotonic() + timeouts().leave, [0] * len(connections)
    while (now := [_bytes_of(each) for each in connections]) != before and time.monotonic() < until:
        before = now
        time.sleep(timeouts().moment)


def _sockets() -> Iterator[socket.socket]:
    """This process's sockets for the internet, each by a descriptor of its own."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it was closed meanwhile
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            copy = os.dup(int(name))
            try:
                found = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)
                continue
            with found:
                if found.family in (socket.AF_INET, socket.AF_INET6):
                    yield found


def _bytes_of(connection: socket.socket) -> int:
    """Count the bytes that have gone over a connection, both ways."""
    counts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 200)
    acknowledged, received = _COUNTS.unpack_from(counts, _COUNTS_AT)
    return int(acknowledged + received)


@dataclass
class _Connection:
    """A connection that was opened in the name of a rank, this one or another.

    Attributes:
        descriptor: of a socket, which Python must not close when the process ends.
        number: a rank in the group, in whose name it is made.
        made: set once the number is sent, or cannot be.
    """

    descriptor: int
    number: int
    made: threading.Event = field(default_factory=threading.Event)


class _OpenConnections:
    """The connections that this process has made, on one thread until the other sides answer."""

    def __init__(self) -> None:
        self._selector: selectors.BaseSelector | None = None  # it costs an open file
        self._lock = threading.Lock()

    def connect(self, address: _Address, number: int) -> _Connection:
        """Begin a connection in the name of a rank in a group."""
        to = socket.socket(address.family)
        to.setblocking(False)
        with suppress(OSError):  # under way, or refused; the socket tells
            to.connect(address.for_socket)
        made = _Connection(to.detach(), number)
        with self._lock:
            if self._selector is None:
                self._selector = selectors.DefaultSelector()
                with suppress(NoThreadError):
                    Asked(partial(_serve, self._selector), lasts=True)
        self._selector.register(made.descriptor, selectors.EVENT_WRITE, made)
        return made


def _serve(selector: selectors.BaseSelector) -> None:
    while True:
        for key, _ in selector.select():
            _advance(key.data, selector)


def _advance(ready: _Connection, selector: selectors.BaseSelector) -> None:
    if not ready.made.is_set():
        with suppress(OSError):  # it was refused
            os.write(ready.descriptor, struct.pack("q", ready.number))
            ready.made.set()
            selector.modify(ready.descriptor, selectors.EVENT_READ, ready)
            return
        ready.made.set()
    selector.unregister(ready.descriptor)
    with socket.socket(fileno=ready.descriptor) as over, suppress(OSError):
        over.shutdown(socket.SHUT_RDWR)  # a process that was forked meanwhile has it open, too


_OPEN = _OpenConnections()


def _forget() -> None:
    """In a forked process the thread is not there."""
    global _OPEN
    _OPEN = _OpenConnections()


os.register_at_fork(after_in_child=_forget)
