"""Waits for a key of the store: they end with their line, and hold no process at its end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from commgrid.rendezvous.op import Add, StoreLostError, WaitKey
from commgrid.store import client as patient
from commgrid.store import key_wait as roll
from commgrid.store.client import SilentStoreError, served
from commgrid.store.driver import StoreDriver
from commgrid.store.key_wait import Line
from tests.waiting import until

MANY = 1000
"""Ranks; more than look for a key before they wait for it."""


@pytest.fixture
def store() -> Any:
    return PrefixStore("here", TCPStore("localhost", 0, is_master=True, wait_for_workers=False))


def waiting(key: str) -> list[Any]:
    return [each for each in roll._UNDER_WAY if each.key == key]


def test_a_closed_line_ends_its_wait(store: Any) -> None:
    line = Line(store, MANY)
    assert line.within("never", 0.1) is None
    assert waiting("never")
    line.close()
    until(lambda: not waiting("never"), "the end of the wait")


def test_a_wait_for_another_key_ends_the_one_before(store: Any) -> None:
    line = Line(store, MANY)
    assert line.within("never", 0.1) is None
    store.set("now", "value")
    assert line.within("now", 60.0) == b"value"
    until(lambda: not waiting("never"), "the end of the wait before")
    line.close()


def test_others_wait_on_for_the_same_key(store: Any) -> None:
    def waits() -> Any:
        return (yield WaitKey("key", time.monotonic() + 60.0))

    found: list[Any] = []
    other = threading.Thread(target=lambda: found.append(StoreDriver(store, MANY).run(waits())))
    other.start()
    until(lambda: len(waiting("key")) == 1, "another wait")
    line = Line(store, MANY)
    assert line.within("key", 0.1) is None
    line.close()
    until(lambda: len(waiting("key")) == 1, "one wait less")
    assert found == []
    store.set("key", "value")
    other.join(60)
    assert found == [b"value"]


def test_a_forked_process_ends_no_wait_of_its_parent(store: Any) -> None:
    line = Line(store, MANY)
    assert line.within("never", 0.1) is None
    child = os.fork()
    if child == 0:
        line.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert store.add("count", 1) == 1  # the answer to this process
    assert waiting("never")
    line.close()
    until(lambda: not waiting("never"), "the end of the wait")


def test_a_key_that_came_between_two_looks_is_told_once(store: Any) -> None:
    """More than 64 ranks heard of a question a minute late."""
    driver = StoreDriver(store, MANY)
    assert not driver.has_come("key")
    store.set("key", "value")
    until(lambda: not waiting("key"), "the end of the wait")
    assert driver.has_come("key")
    assert driver.has_come("key")  # asked anew: it is still there
    store.delete_key("key")
    assert not driver.has_come("key")
    driver.close()


def test_an_ended_server_is_lost_and_not_silent() -> None:
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("localhost", server.port, is_master=False)
    line = Line(PrefixStore("here", client), MANY)
    del server
    with pytest.raises(dist.DistNetworkError) as told:
        line.within("never", 30.0)
    assert not isinstance(told.value, SilentStoreError)


def test_a_line_holds_few_waits(store: Any) -> None:
    line = Line(store, MANY)
    for number in range(20):
        assert line.within(f"never/{number}", 0.001) is None
    assert len(line._waits) <= 3
    line.close()
    until(lambda: not roll._UNDER_WAY, "the end of all waits")


def test_a_lost_connection_that_ends_a_wait_leaves_it_to_the_server(store: Any) -> None:
    line = Line(store, MANY)
    assert line.within("never", 0.1) is None
    patient._LOST[served(store)] = "lost"
    line.close()
    assert waiting("never")  # it has been given a second
    line = Line(store.underlying_store.clone(), MANY)
    assert line.within("here/never", 0.1) is None
    line.close()  # which ends all waits for the key
    until(lambda: not waiting("never"), "the end of the wait")


SCRIPT = """
import sys
from torch.distributed import TCPStore
from commgrid.store.key_wait import Line
store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
assert Line(store, 1000).within("never", 0.2) is None
sys.exit(7)
"""


def test_a_process_with_a_wait_ends_with_its_own_status() -> None:
    # Python ends the server with the store, the wait returns, and its thread asks for the lock
    # of an interpreter that is being taken down.
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, timeout=100)
    assert (ended.returncode, ended.stderr) == (7, b"")


# Python 3.12 and later start no thread once a process ends. The handler is the first to run. The
# second wait is one that a handler of the program's needs.
NO_THREAD = """
import atexit, _thread, sys, threading, time
from torch.distributed import TCPStore
from commgrid.store.key_wait import Line
store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

def waits():
    line = Line(store, 1000)
    assert line.within("never", 0.2) is None
    store.set("later", "value")
    assert line.within("later", 60.0) == b"value"
    print("seen")

atexit.register(waits)

def refused(*args):
    raise RuntimeError("can't create new thread at interpreter shutdown")

assert Line(store, 1000).within("never", 0.2) is None
time.sleep(1.0)

@atexit.register
def no_more():
    _thread.start_new_thread = threading._start_new_thread = refused

sys.exit(7)
"""


# A wait that begins in a handler of the program's leaves the other thread's to be ended.
HANDLER = """
import atexit, sys, threading
from torch.distributed import TCPStore
from commgrid.store.key_wait import Line
store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

def wait():
    Line(store.clone(), 1000).within("other", 60.0)

other = threading.Thread(target=wait, daemon=True)

@atexit.register
def waits():
    line = Line(store, 1000)
    assert line.within("never", 0.2) is None
    line.close()

other.start()
assert Line(store, 1000).within("never", 0.5) is None
sys.exit(7)
"""


@pytest.mark.parametrize("times", range(2))
def test_a_wait_in_an_exit_handler_leaves_no_other(times: int) -> None:
    ended = subprocess.run([sys.executable, "-c", HANDLER], capture_output=True, timeout=100)
    assert (ended.returncode, ended.stderr) == (7, b"")


def test_waits_are_ended_where_no_thread_can_be_started() -> None:
    ended = subprocess.run([sys.executable, "-c", NO_THREAD], capture_output=True, timeout=100)
    assert (ended.returncode, ended.stderr, ended.stdout) == (7, b"", b"seen\n")


def test_torch_is_not_asked_again_once_a_store_is_lost(capfd: pytest.CaptureFixture[str]) -> None:
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("localhost", server.port, is_master=False)
    one, two = (StoreDriver(PrefixStore(name, client), MANY) for name in ("one", "two"))
    del server
    for driver in (one, two, one):
        with pytest.raises(StoreLostError, match=r"recv|send") as told:
            driver.run(adds())
        assert isinstance(told.value.__cause__, dist.DistNetworkError)
    assert capfd.readouterr().err.count("[c10d]") == 1  # and some twenty lines of C++


def adds() -> Any:
    yield Add("key", 1)
