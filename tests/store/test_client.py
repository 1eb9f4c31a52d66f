"""Calls of the store on threads that are kept: few, never in the way, gone by themselves."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from typing import Any

import pytest

from commgrid.store import client
from commgrid.store.client import PatientStore, SilentStoreError
from tests.waiting import until


class Store:
    """One that answers with the thread it was asked on, once it may."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.may.set()

    def get(self, key: str) -> bytes:
        assert self.may.wait(60)
        if key == "wrong":
            raise KeyError(key)
        return str(threading.get_native_id()).encode()


def asked(store: Any, patience: float = 60.0) -> PatientStore:
    return PatientStore(store, lambda: patience)


def test_calls_share_a_thread() -> None:
    store, other = asked(Store()), asked(Store())
    seen = {store.get("a"), store.get("b"), other.get("c")}
    with pytest.raises(KeyError):
        store.get("wrong")
    seen.add(store.get("d"))
    assert len(seen) == 1
    assert str(threading.get_native_id()).encode() not in seen


def test_a_thread_that_hangs_is_left_alone_with_its_call() -> None:
    raw, idle = Store(), len(client._IDLE)
    hung, other = asked(raw, 0.2), asked(Store())
    first = other.get("a")
    raw.may.clear()
    with pytest.raises(SilentStoreError, match=r"has not answered for 0\.2 s"):
        hung.get("b")
    assert other.get("c") != first  # which is still with it
    with pytest.raises(SilentStoreError):  # the client is held
        hung.get("d")
    raw.may.set()

    def answers() -> bool:
        try:
            hung.get("e")
        except SilentStoreError:
            return False
        return raw not in client._OWED

    until(answers, "an answer")
    assert len(client._IDLE) <= max(idle, 1) + 1


def test_several_threads_ask_at_once() -> None:
    raw, found, idle = Store(), [], len(client._IDLE)
    raw.may.clear()
    asking = [threading.Thread(target=lambda: found.append(asked(raw).get("a"))) for _ in range(4)]
    for each in asking:
        each.start()
    raw.may.set()
    for each in asking:
        each.join(60)
    assert len(found) == 4
    assert len(client._IDLE) <= max(idle, 4)


def test_an_idle_thread_keeps_no_store() -> None:
    raw = Store()
    asked(raw).get("a")
    seen = weakref.ref(raw)
    del raw
    until(lambda: gc.collect() >= 0 and seen() is None, "the store is collected")


def test_a_forked_process_asks_on_threads_of_its_own() -> None:
    raw = Store()
    mine = asked(raw).get("a")
    hanging = Store()
    hanging.may.clear()
    with pytest.raises(SilentStoreError):
        asked(hanging, 0.1).get("b")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        hanging.may.set()  # the parent's call, not this process's
        os.write(writing, b" ".join([asked(raw, 30.0).get("c"), asked(hanging, 30.0).get("d")]))
        os._exit(0)
    hanging.may.set()
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        found = pipe.read().split()
    assert os.waitpid(child, 0)[1] == 0
    assert len(found) == 2
    assert mine not in found


SCRIPT = """
import os, signal, sys, threading, time
from commgrid.store.client import PatientStore, SilentStoreError

class Store:
    def get(self, key):
        if key == "hangs":
            time.sleep(600)  # for ever
        return b"answer"

store = PatientStore(Store(), lambda: 0.2)
assert store.get("a") == b"answer"
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT + textwrap.dedent(script)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("hangs", [False, True])
def test_a_program_ends_whatever_its_threads_do(hangs: bool) -> None:
    done = run(
        """
        try:
            store.get("hangs")
        except SilentStoreError:
            print("silent")
        """
        if hangs
        else "print('over')"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == ("silent\n" if hangs else "over\n")


def test_an_interrupt_reaches_who_waits_for_a_call() -> None:
    done = run(
        """
        store = PatientStore(Store(), lambda: 600.0)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            store.get("hangs")
        except KeyboardInterrupt:
            print("interrupted")
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")
