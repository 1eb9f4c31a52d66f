"""The mailbox of the live check: no message is missed, and no stranger ends it."""

from __future__ import annotations

import socket
import threading
import time

import torch.distributed as dist

from commgrid.health.mailbox import Mailbox
from commgrid.store.client import PatientStore
from commgrid.store.key_wait import connection_of
from tests.waiting import until


def boxes() -> tuple[Mailbox, Mailbox, list[object], dist.TCPStore]:
    """Two, the messages that the second has heard, and their store."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    heard: list[object] = []
    made = [
        Mailbox(rank, PatientStore(connection_of(store)), "test", "127.0.0.1",
                lambda who, message: heard.append((who, message)))
        for rank in range(2)
    ]  # fmt: skip
    return made[0], made[1], heard, store


def test_a_message_that_another_thread_has_read_is_enough() -> None:
    """The reader slept its whole time, though its message had come."""
    sender, receiver, heard, _ = boxes()
    try:
        assert sender.tell(1, "first")
        while receiver.read(1.0, lambda: bool(heard)):
            pass
        assert heard == [(0, "first")]
        assert receiver.read(60.0, lambda: bool(heard)) is False  # at once
    finally:
        sender.close(), receiver.close()


def test_messages_are_read_without_a_reader() -> None:
    """So that a sender's messages never fill the sockets."""
    sender, receiver, heard, _ = boxes()
    try:
        text = "x" * 1000
        for number in range(3000):
            assert sender.tell(1, [number, text])
        until(lambda: len(heard) == 3000, "all messages")
        assert [each[1][0] for each in heard] == list(range(3000))  # type: ignore[index]
    finally:
        sender.close(), receiver.close()


def test_a_stranger_ends_nothing() -> None:
    sender, receiver, heard, _ = boxes()
    try:
        for greeting in (b"[" * 200_000 + b"\n", b"{}\n", b"x" * 100_000, b"[1, 2]\n"):
            with socket.create_connection(receiver._server.getsockname()) as stranger:
                stranger.sendall(greeting)
        assert sender.tell(1, "after")
        until(lambda: heard == [(0, "after")], "the message")
        assert receiver._thread.is_alive()
    finally:
        sender.close(), receiver.close()


def test_a_closed_mailbox_sends_nothing_and_does_not_spin() -> None:
    sender, receiver, _, _ = boxes()
    assert sender.tell(1, "first")
    sender.close()
    assert sender.tell(1, "second") is False
    receiver.close()
    before, reads = time.process_time(), 0
    until_then = time.monotonic() + 0.5
    while time.monotonic() < until_then:
        receiver.read(1.0)
        reads += 1
    assert reads < 50
    assert time.process_time() - before < 0.4
    assert not any("mailbox" in thread.name for thread in threading.enumerate())
