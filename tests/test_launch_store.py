"""Coming to the store that all ranks meet at: who serves it, how long it takes, how it ends."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import commgrid
from commgrid import CommGridError, GridNotInitializedError, PeerTimeoutError
from commgrid.runtime.launch import Launch
from commgrid.runtime.torch_world import (
    connect_store,
    is_peer_failure,
    is_store_gone,
    world_store,
)
from commgrid.testing import Ranks, free_port, run_on_ranks


@pytest.fixture
def silent() -> Iterator[int]:
    """A port where something listens and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        yield listener.getsockname()[1]


def launch(rank: int, port: int) -> Launch:
    return Launch(rank, 2, address="127.0.0.1", port=port, hosts_store=rank == 0)


def failure(rank: int, port: int, left: float) -> tuple[CommGridError, float]:
    started = time.monotonic()
    with pytest.raises(CommGridError) as raised:
        connect_store(launch(rank, port), left)
    return raised.value, time.monotonic() - started


def test_a_port_in_use_is_said_at_once(silent: int) -> None:
    error, took = failure(0, silent, 60)
    assert not isinstance(error, PeerTimeoutError)
    assert took < 30  # of 60
    assert f"rank 0 on {socket.gethostname()} cannot serve the store at 127.0.0.1" in str(error)
    assert f"another process there listens on port {silent} already" in str(error)
    assert "set MASTER_PORT to a free port" in str(error)


def test_a_listener_that_never_answers_is_an_error_in_time(silent: int) -> None:
    """torch's client waits for it for ever, whatever its timeout."""
    error, took = failure(1, silent, 1.5)
    assert isinstance(error, PeerTimeoutError)
    assert took < 30
    assert f"what listens at 127.0.0.1:{silent} did not answer as a store" in str(error)


def test_nobody_there() -> None:
    error, took = failure(1, free_port(), 1)
    assert isinstance(error, PeerTimeoutError)
    assert took < 30
    assert "nobody serves the store at" in str(error)
    assert "Connection refused" in str(error)


def test_who_serves_the_store_serves_it_until_it_has_connected_too() -> None:
    """torch's server ends with the try to connect to it: those who were there already lost it."""
    elsewhere = replace(launch(0, free_port()), address="192.0.2.1")  # nobody's, by RFC 5737

    def serve_in_vain() -> None:
        with suppress(PeerTimeoutError):
            connect_store(elsewhere, 7)

    serving = threading.Thread(target=serve_in_vain)
    serving.start()
    try:
        store = connect_store(launch(1, elsewhere.port), 60)
        for count in range(1, 6):  # for longer than a try took
            assert store.add("key", 1) == count
            time.sleep(0.5)
    finally:
        serving.join()


def test_no_time_left_is_about_this_rank() -> None:
    error, took = failure(1, free_port(), -2.5)
    assert isinstance(error, PeerTimeoutError)
    assert took < 30
    assert "startup_timeout was over 2.5 s before rank 1 came to ask" in str(error)
    assert "no peer did" in str(error)


def with_no_time() -> str:
    with pytest.raises(PeerTimeoutError) as raised:
        commgrid.initialize(startup_timeout=1e-9)
    return str(raised.value)


def test_initialize_with_no_time_left_blames_nobody() -> None:
    for rank, said in enumerate(run_on_ranks(with_no_time, 2, backend=None, launcher="torchrun")):
        assert f"before rank {rank} came to ask" in said


def waits_at_the_store(timeouts: list[Any]) -> list[tuple[float, float]]:
    """How long a wait at the store took, and how long one may take, with each timeout."""
    took = []
    for timeout in timeouts:
        commgrid.initialize(timeout=timeout)
        started = time.monotonic()
        with pytest.raises(dist.DistStoreError):
            world_store().get("what nobody writes")
        took.append((time.monotonic() - started, world_store().timeout.total_seconds()))
        commgrid.shutdown()
    return took


def test_the_stores_timeout_is_that_of_collectives() -> None:
    """The second initialize finds the store connected."""
    timeouts = [2.0, timedelta(seconds=1)]
    for took in run_on_ranks(waits_at_the_store, 2, timeouts, backend=None, launcher="torchrun"):
        assert [limit for _, limit in took] == [2.0, 1.0]
        assert all(limit - 0.1 < seconds < 60 for seconds, limit in took)


INITIALIZE = """
import commgrid.runtime.registry  # torch too, so that what is stopped is the wait
print("ready", flush=True)
commgrid.initialize()
"""


@pytest.mark.full("nobody-*", "silent-sigterm")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
@pytest.mark.parametrize("listens", [True, False], ids=["silent", "nobody"])
def test_it_can_be_stopped_while_it_waits(how: int, listens: bool, silent: int) -> None:
    port = silent if listens else free_port()
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    with subprocess.Popen(
        [sys.executable, "-c", INITIALIZE],
        env={**os.environ, **variables, "MASTER_PORT": str(port)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as waiting:
        try:
            assert waiting.stdout is not None
            assert waiting.stdout.readline() == "ready\n"
            time.sleep(1)
            started = time.monotonic()
            waiting.send_signal(how)
            _, said = waiting.communicate(timeout=300)
            took = time.monotonic() - started
        finally:
            waiting.kill()
    assert took < 60
    assert waiting.returncode == -how, said
    assert ("KeyboardInterrupt" in said) == (how == signal.SIGINT)
    with pytest.raises(ProcessLookupError):
        os.killpg(waiting.pid, 0)  # it has left no process of its session


def serve(port: int, ready: str) -> None:
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    Path(ready).touch()
    signal.pause()  # until it is killed
    del store


def test_only_a_server_that_has_ended_is_gone(tmp_path: Path) -> None:
    port, ready = free_port(), tmp_path / "ready"
    with Ranks(serve, 1, port, str(ready), backend=None) as server:
        while not ready.exists():
            assert server.living()
            time.sleep(0.01)  # between two looks
        patience = timedelta(seconds=2)
        store = TCPStore("127.0.0.1", port, timeout=patience, wait_for_workers=False)
        with pytest.raises(RuntimeError) as slow:
            store.get("what nobody writes")
        with pytest.raises(RuntimeError) as taken:
            TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    with pytest.raises(RuntimeError) as first:
        store.add("key", 1)
    with pytest.raises(RuntimeError) as second:
        store.add("key", 1)
    errors = [slow.value, taken.value, first.value, second.value]
    assert [is_store_gone(error) for error in errors] == [False, False, True, True]
    assert [is_peer_failure(error) for error in errors] == [True, False, True, True]


def test_the_first_error_that_users_meet_has_none_before_it() -> None:
    with pytest.raises(GridNotInitializedError) as raised:
        commgrid.get_group("tp")
    assert raised.value.__context__ is None
