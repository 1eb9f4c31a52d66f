"""Short messages between two ranks beside torch, sent without waiting.

A message is three numbers, 24 bytes, or a value in JSON. A rank connects to another when it first
has something for it. Messages of one rank arrive in the
order in which it sent them. The caller reads them, when it has use for them: a thread that woke up
for each would take the interpreter from the program. A thread only empties the sockets now and
then, so that no sender ever waits.
"""

from __future__ import annotations

import json
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from uuid import uuid4

from commgrid.rendezvous.op import Drop, Put, WaitKey, single
from commgrid.rendezvous.timeouts import timeouts
from commgrid.store.driver import StoreDriver
from commgrid.store.hosts import listening

_NUMBERS = struct.Struct("<QQQ")  # the first one 0: so many bytes of JSON follow
_LONGEST = 1 << 20
_LONGEST_GREETING = 1 << 12
_CLOSED = 0.05  # seconds between two looks at a closed mailbox
_BRIEF = 0.002  # seconds for which another reader is waited for, where nothing else is
_EMPTIED = 0.2  # seconds between two times that the thread empties the sockets


class NoMailboxError(Exception):
    """Another rank has none."""


class Mailbox:
    """This rank's, and its connections to others'.

    Args:
        rank: this one.
        store: where ranks find each other's addresses.
        prefix: what their keys begin with.
        address: of this host, at which the others reach it.
        heard: called by `read` as heard(rank, message); the message is None once the rank
            disconnects.
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
        self._senders: dict[socket.socket, tuple[bytearray, list[int]]] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._reading, self._closed = threading.RLock(), threading.Event()
        host, port = self._server.getsockname()[:2]
        mine = json.dumps([host, port, self._secret]).encode()
        self._driver.run(single(Put(f"{self._at}/{rank}", mine)))
        self._thread = threading.Thread(target=self._run, name="commgrid mailbox", daemon=True)
        self._thread.start()

    def send(self, rank: int, numbers: tuple[int, int, int]) -> bool:
        """Sends three numbers below 2**64, the first one not 0; False where the other is gone.

        Raises:
            NoMailboxError: the other has made none, for `Timeouts.connect`.
        """
        return self._send(rank, _NUMBERS.pack(*numbers))

    def tell(self, rank: int, value: Any) -> bool:
        """Sends a value that JSON can hold, likewise."""
        data = json.dumps(value).encode()
        return self._send(rank, _NUMBERS.pack(0, 0, len(data)) + data)

    def _send(self, rank: int, data: bytes) -> bool:
        with self._lock:
            if self._closed.is_set():
                return False
            connection = self._out.get(rank)
            try:
                if connection is None:
                    connection = self._out[rank] = self._connect(rank)
                connection.sendall(data)
            except OSError:
                if connection is not None:
                    connection.close()  # half a message may be out; nothing follows it
                return False
        return True

    def _connect(self, rank: int) -> socket.socket:
        until = time.monotonic() + timeouts().connect
        found = self._driver.run(single(WaitKey(f"{self._at}/{rank}", until)))
        if found is None:
            raise NoMailboxError
        host, port, secret = json.loads(found)
        connection = socket.create_connection((host, port), timeouts().connect)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(json.dumps([secret, self._rank]).encode() + b"\n")
        return connection

    def close(self) -> None:
        """Closes all connections, and ends the thread."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeouts().answer)
        with self._reading:
            self._selector.close()
            for each in (*self._senders, self._server):
                each.close()
            self._senders.clear()
        with self._lock:
            for connection in self._out.values():
                connection.close()
            self._out.clear()
        with suppress(RuntimeError):  # the store has gone with the rank that served it
            self._driver.run(single(Drop((f"{self._at}/{self._rank}",))))
            self._driver.close()

    def _run(self) -> None:
        while not self._closed.wait(_EMPTIED):
            while self.read(0.0):
                pass

    def read(self, seconds: float, is_enough: Callable[[], bool] = lambda: False) -> bool:
        """Pass on received messages to `heard`.

        Args:
            seconds: to wait for the first one.
            is_enough: whether nothing more is needed; another thread may have read it meanwhile.

        Returns:
            Whether there was anything to read.
        """
        # Another reader passes on what comes meanwhile.
        if not self._reading.acquire(timeout=-1 if seconds else _BRIEF):
            return False
        try:
            if is_enough():
                return False
            if self._closed.is_set():
                time.sleep(min(seconds, _CLOSED))
                return False
            ready = self._selector.select(seconds)
            is_new = [self._receive(key.fileobj) for key, _ in ready]
            while any(is_new):  # what new connections have brought
                is_new = [self._receive(key.fileobj) for key, _ in self._selector.select(0)]
            return bool(ready)
        finally:
            self._reading.release()

    def _receive(self, connection: Any) -> bool:
        """Read from a connection, or accept a new one; return whether it is new."""
        if connection is self._server:
            with suppress(OSError):
                made, _ = self._server.accept()
                self._selector.register(made, selectors.EVENT_READ)
                self._senders[made] = (bytearray(), [])
                return True
        elif not self._read(connection, *self._senders[connection]):
            self._selector.unregister(connection)
            connection.close()
            _, who = self._senders.pop(connection)
            if who:
                self._heard(who[0], None)
        return False

    def _read(self, connection: socket.socket, inbox: bytearray, who: list[int]) -> bool:
        """Read new messages; return whether the connection stays open."""
        try:
            data = connection.recv(1 << 16)
        except OSError:
            return False
        inbox += data
        try:
            if not who:
                if b"\n" not in inbox[:_LONGEST_GREETING]:
                    return bool(data) and len(inbox) < _LONGEST_GREETING
                end = inbox.index(b"\n")
                secret, rank = json.loads(inbox[:end])
                if secret != self._secret:
                    return False
                who.append(int(rank))
                del inbox[: end + 1]
            messages = list(_messages(inbox))
        except (ValueError, TypeError, RecursionError):
            return False  # not from a process of commgrid
        for message, _ in messages:
            self._heard(who[0], message)
        if messages:
            del inbox[: messages[-1][1]]
        return bool(data) and len(inbox) < _LONGEST


def _messages(inbox: bytearray) -> Iterator[tuple[Any, int]]:
    """The whole messages of an inbox, each with the number of bytes up to its end."""
    at = 0
    while at + _NUMBERS.size <= len(inbox):
        numbers = _NUMBERS.unpack_from(inbox, at)
        at += _NUMBERS.size
        if numbers[0]:
            yield numbers, at
            continue
        end = at + numbers[2]
        if end > len(inbox):
            return
        yield json.loads(inbox[at:end]), end
        at = end
