"""The simulated store gives the same answers as each kind of torch's, to the same operations."""

import os
import random
import signal
import threading
import time
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore, TCPStore  # type: ignore[attr-defined]

from commgrid.rendezvous.op import Add, Cas, Drop, Get, Op, Protocol, Put, StoreLostError, WaitKey
from commgrid.store.driver import StoreDriver
from tests.mortal import CountingStore
from tests.rendezvous.simulator import SimulatedStore
from tests.waiting import stop

SEQUENCES = 10_000  # of 12 operations each
LENGTH = 12


def operations(seed: int) -> list[Op]:
    """Operations on a few keys, named by the seed, so that they meet often and never mix."""
    chance = random.Random(seed)
    names = [f"{seed}/{name}" for name in "abc"]
    counter = f"{seed}/count"
    values = (b"1", b"two", b"\x00\xff", b'{"kind": "agreed"}')

    def one() -> Op:
        key = chance.choice(names)
        return chance.choice([
            Get((key,)), Get(tuple(names)), Get((counter,)),
            Put(key, chance.choice(values)),
            Add(counter, chance.choice((1, 4, -1, 1 << 58))),
            Cas(key, chance.choice((b"", b"", *values)), chance.choice(values)),
            Drop((key, counter)[: chance.choice((1, 2))]),
        ])  # fmt: skip

    return [one() for _ in range(LENGTH)]


def asked(ops: list[Op]) -> Protocol[list[Any]]:
    found = []
    for op in ops:
        found.append((yield op))
    return found


def check(store: Any, seeds: range) -> None:
    driver = StoreDriver(store, 2)
    for seed in seeds:
        ops, expected = operations(seed), SimulatedStore()
        assert driver.run(asked(ops)) == [expected.do(op) for op in ops], (seed, ops)
    driver.close()


@pytest.mark.nightly("True")
@pytest.mark.parametrize("all_of_them", [False, True])
def test_the_same_answers(all_of_them: bool, tmp_path: Path) -> None:
    """FileStore, which locks and syncs a file at each operation, has a share of the sequences."""
    count = SEQUENCES if all_of_them else SEQUENCES // 40
    check(HashStore(), range(count))
    check(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), range(count))
    check(FileStore(str(tmp_path / "store"), 1), range(count // 10))


@pytest.mark.parametrize("kind", ["hash", "tcp"])
def test_waiting_ends_with_the_key_or_the_time(kind: str) -> None:
    store = HashStore() if kind == "hash" else TCPStore("127.0.0.1", 0, is_master=True,
                                                        wait_for_workers=False)  # fmt: skip
    driver, now = StoreDriver(store, 2), time.monotonic()
    assert driver.run(asked([WaitKey("a", now), Put("a", b"x"), WaitKey("a", now)])) == [
        None,
        None,
        b"x",
    ]
    late = threading.Timer(0.3, lambda: store.set("b", "y"))
    late.start()
    assert driver.run(asked([WaitKey("b", now + 60.0)])) == [b"y"]
    late.join()
    driver.close()


def test_reading_a_missing_key_wakes_nobody() -> None:
    """torch's compare and set wakes waiters of its key even if it sets nothing."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    waiting, woken = store.clone(), []

    def wait() -> None:
        try:
            waiting.wait(["key"], timedelta(seconds=1))
            woken.append("key")
        except RuntimeError:  # the time is up
            pass

    thread = threading.Thread(target=wait)
    thread.start()
    driver = StoreDriver(store, 2)
    while thread.is_alive():
        assert driver.run(asked([Get(("key",)), Get(("key", "other"))])) == [(None,), (None, None)]
        thread.join(0.05)
    assert woken == []


def test_a_key_that_comes_and_goes_is_waited_for_again() -> None:
    """The waiting rank was slow to read it; torch's `get` would hold its connection."""
    store, read = HashStore(), []

    class Slow(CountingStore):
        def compare_set(self, key: str, old: bytes, new: bytes) -> bytes:
            if not read:
                store.delete_key(key)
                threading.Timer(0.2, lambda: store.set(key, "again")).start()
            read.append(key)
            return store.compare_set(key, old, new)  # type: ignore[arg-type]

    driver = StoreDriver(Slow(store), 2)
    store.set("key", "first")
    assert driver.run(asked([WaitKey("key", time.monotonic() + 60.0)])) == [b"again"]
    driver.close()


def serve(port: Any) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.put(store.port)
    time.sleep(600)


def test_a_stopped_server_is_silence() -> None:
    """An ended server is a lost connection. Neither is waited for."""
    context = get_context("spawn")
    port = context.Queue()
    server = context.Process(target=serve, args=(port,), daemon=True)
    server.start()
    try:
        store = TCPStore("127.0.0.1", port.get(timeout=60), is_master=False, wait_for_workers=False)
        driver = StoreDriver(store, 2, lambda: 0.5)
        assert driver.run(asked([Add("count", 1)])) == [1]
        assert server.pid is not None
        stop(server.pid)
        with pytest.raises(StoreLostError, match="has not answered") as lost:
            driver.run(asked([Add("count", 1)]))
        assert lost.value.silent
        os.kill(server.pid, signal.SIGCONT)
        # The operation that was given up has taken effect.
        assert StoreDriver(store, 2, lambda: 30.0).run(asked([Get(("count",))])) == [(b"2",)]
        server.kill()
        server.join()
        with pytest.raises(StoreLostError) as lost:
            StoreDriver(store, 2, lambda: 30.0).run(asked([Get(("count",))]))
        assert not lost.value.silent
    finally:
        server.kill()
