"""Short messages between two ranks beside torch: sent without waiting, read by a thread.

A rank connects to another when it first has something for it. Messages of one rank arrive in the
order in which it sent them.
"""

from __future__ import annotations

import json
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from uuid import uuid4

from commgrid.rendezvous import addresses
from commgrid.rendezvous.timeouts import timeouts
from commgrid.torch_compat.addresses import listening
from commgrid.torch_compat.store import StoreDriver

_LONGEST = 1 << 20


class NoMailboxError(Exception):
    """Another rank has none."""


class Mailbox:
    """This rank's, and its connections to others'.

    Args:
        rank: this one.
        store: where ranks find each other's addresses.
        prefix: what their keys begin with.
        address: of this host, at which the others reach it.
        heard: is called by the thread with a rank and its message, and None when it has gone.
    """

    def __init__(
        self,
        rank: int,
        store: Any,
        prefix: str,
        address: str,
        heard: Callable[[int, Any], None],
    ) -> None:
        self._rank, self._heard = rank, heard
        self._driver, self._at = StoreDriver(store, 2), f"{prefix}/at"
        self._out: dict[int, socket.socket] = {}
        self._lock = threading.Lock()
        self._secret = uuid4().hex
        self._server = listening(address, "initialize without verify='order'")
        self._bell, self._ringer = socket.socketpair()
        host, port = self._server.getsockname()[:2]
        mine = json.dumps([host, port, self._secret])
        self._driver.run(addresses.publish(self._at, rank, mine))
        self._thread = threading.Thread(target=self._run, name="commgrid mailbox", daemon=True)
        self._thread.start()

    def send(self, rank: int, message: Any) -> bool:
        """Sends a message; False where the other is gone.

        Raises:
            NoMailboxError: the other has made none, for `Timeouts.connect`.
        """
        data = json.dumps(message).encode() + b"\n"
        with self._lock:
            connection = self._out.get(rank)
            try:
                if connection is None:
                    connection = self._out[rank] = self._connect(rank)
                connection.sendall(data)
            except OSError:
                return False
        return True

    def _connect(self, rank: int) -> socket.socket:
        until = time.monotonic() + timeouts().connect
        found = self._driver.run(addresses.awaited(self._at, rank, until))
        if found is None:
            raise NoMailboxError
        host, port, secret = json.loads(found)
        connection = socket.create_connection((host, port), timeouts().connect)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(json.dumps([secret, self._rank]).encode() + b"\n")
        return connection

    def close(self) -> None:
        """Closes all connections, and ends the thread."""
        with suppress(OSError):
            self._ringer.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeouts().answer)
        with self._lock:
            for connection in self._out.values():
                connection.close()
            self._out.clear()
        with suppress(RuntimeError):  # the store has gone with the rank that served it
            self._driver.run(addresses.withdraw(self._at, self._rank))
            self._driver.close()

    def _run(self) -> None:
        senders: dict[socket.socket, tuple[bytearray, list[int]]] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            selector.register(self._bell, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    connection = key.fileobj
                    assert isinstance(connection, socket.socket)
                    if connection is self._bell:
                        for each in (*senders, self._server, self._bell):
                            each.close()
                        return
                    if connection is self._server:
                        with suppress(OSError):
                            made, _ = self._server.accept()
                            selector.register(made, selectors.EVENT_READ)
                            senders[made] = (bytearray(), [])
                    elif not self._read(connection, *senders[connection]):
                        selector.unregister(connection)
                        connection.close()
                        _, who = senders.pop(connection)
                        if who:
                            self._heard(who[0], None)

    def _read(self, connection: socket.socket, inbox: bytearray, who: list[int]) -> bool:
        """Read new messages; return whether the connection stays open."""
        try:
            data = connection.recv(1 << 16)
        except OSError:
            return False
        inbox += data
        *lines, rest = bytes(inbox).split(b"\n")
        inbox[:] = rest
        for line in lines:
            try:
                message = json.loads(line)
                if not who:
                    secret, rank = message
                    if secret != self._secret:
                        return False
                    who.append(int(rank))
                    continue
            except (ValueError, TypeError):
                return False  # not from a process of commgrid
            self._heard(who[0], message)
        return bool(data) and len(inbox) < _LONGEST
