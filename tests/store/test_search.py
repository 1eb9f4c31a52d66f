"""Coming to the store that all ranks meet at: who serves it, how long it takes, how it ends."""

import os
import signal
import socket
import subprocess
import sys
import threading
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
from commgrid.store.launch import Launch
from commgrid.store.search import connect_store
from commgrid.testing import Ranks, free_port, run_on_ranks
from commgrid.torch_compat.peer_errors import is_peer_failure, is_store_gone
from commgrid.torch_compat.world import world_store
from tests.waiting import until, until_waiting

FOREVER = 1000.0


@pytest.fixture
def silent() -> Iterator[int]:
    """A port where something listens and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        yield listener.getsockname()[1]


def launch(rank: int, port: int) -> Launch:
    return Launch(rank, 2, address="127.0.0.1", port=port, hosts_store=rank == 0)


def failure(rank: int, port: int, left: float) -> CommGridError:
    with pytest.raises(CommGridError) as raised:
        connect_store(launch(rank, port), left)
    return raised.value


def test_a_port_in_use_is_said_at_once(silent: int) -> None:
    error = failure(0, silent, FOREVER)
    assert not isinstance(error, PeerTimeoutError)
    assert f"rank 0 on {socket.gethostname()} cannot serve the store at 127.0.0.1" in str(error)
    assert f"another process there listens on port {silent} already" in str(error)
    assert "set MASTER_PORT to a free port" in str(error)


def test_a_listener_that_never_answers_is_an_error_in_time(silent: int) -> None:
    """torch's client waits for it for ever, whatever its timeout."""
    error = failure(1, silent, 1.5)
    assert isinstance(error, PeerTimeoutError)
    assert f"what listens at 127.0.0.1:{silent} did not answer as a store" in str(error)


def test_nobody_there() -> None:
    error = failure(1, free_port(), 1)
    assert isinstance(error, PeerTimeoutError)
    assert "nobody serves the store at" in str(error)
    assert "Connection refused" in str(error)


def test_who_serves_the_store_serves_it_until_it_has_connected_too() -> None:
    """torch's server ends with the try to connect to it: those who were there already lost it."""
    elsewhere = replace(launch(0, free_port()), address="192.0.2.1")  # nobody's, by RFC 5737

    def serve_in_vain() -> None:
        with suppress(PeerTimeoutError):
            connect_store(elsewhere, 4)

    serving = threading.Thread(target=serve_in_vain)
    serving.start()
    try:
        store = connect_store(launch(1, elsewhere.port), 60)
        count = 0
        while serving.is_alive():  # for longer than a try took
            count += 1
            try:
                assert store.add("key", 1) == count
            except dist.DistNetworkError:
                serving.join(2.0)  # the store goes with its server's last try
                assert not serving.is_alive()
            serving.join(0.1)
        assert count > 5
    finally:
        serving.join()


def test_no_time_left_is_about_this_rank() -> None:
    error = failure(1, free_port(), -2.5)
    assert isinstance(error, PeerTimeoutError)
    assert "startup_timeout was over 2.5 s before rank 1 came to ask" in str(error)
    assert "no peer did" in str(error)


def with_no_time() -> str:
    with pytest.raises(PeerTimeoutError) as raised:
        commgrid.initialize(startup_timeout=1e-9)
    return str(raised.value)


def test_initialize_with_no_time_left_blames_nobody() -> None:
    for rank, said in enumerate(run_on_ranks(with_no_time, 2, backend=None, launcher="torchrun")):
        assert f"before rank {rank} came to ask" in said


def waits_at_the_store(timeouts: list[Any]) -> list[float]:
    """How long a wait at the store may take, with each timeout; one is waited for in vain."""
    found = []
    for timeout in timeouts:
        commgrid.initialize(timeout=timeout)
        with pytest.raises(dist.DistStoreError):
            world_store().get("what nobody writes")
        found.append(world_store().timeout.total_seconds())
        commgrid.shutdown()
    return found


def test_the_stores_timeout_is_that_of_collectives() -> None:
    """The second initialize finds the store connected."""
    timeouts = [2.0, timedelta(seconds=1)]
    for limits in run_on_ranks(waits_at_the_store, 2, timeouts, backend=None, launcher="torchrun"):
        assert limits == [2.0, 1.0]


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
            until_waiting([waiting.pid])
            waiting.send_signal(how)
            _, said = waiting.communicate(timeout=300)
        finally:
            waiting.kill()
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
        until(lambda: server.living() and ready.exists(), "the store is served")
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
