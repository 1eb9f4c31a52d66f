"""The store while ranks fail: its server is late, stopped, or out of reach."""

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import commgrid
from commgrid import GridMismatchError, PeerTimeoutError
from commgrid.collectives import all_reduce
from commgrid.recording import remote
from commgrid.rendezvous.failure_round import Failure
from commgrid.rendezvous.timeouts import Timeouts, use_timeouts
from commgrid.runtime import named_failures, registry
from commgrid.store import standby as torch_standby
from commgrid.store.client import PatientStore, SilentStoreError
from commgrid.store.key_wait import connection_of
from commgrid.store.standby import Answer
from commgrid.testing import free_port, run_on_ranks
from commgrid.torch_compat import gloo as torch_gloo
from commgrid.torch_compat import gloo_departure as torch_leaving
from commgrid.torch_compat import world as torch_world
from commgrid.torch_compat.ended_groups import stop_waiting
from tests.flags import hear, tell
from tests.killing import run_killable

GENEROUS = timedelta(seconds=100)  # tells a hang


def a_server_that_is_late() -> str:
    """Rank 0 serves the store, and computes while the others go on without it, on another one."""
    grid = commgrid.initialize()
    rank, old = grid.rank, torch_world.world_store()
    grid.abort()
    if rank:
        rebuilt = commgrid.rebuild(grace=1.0)
        assert rebuilt is not None
        assert tuple(rebuilt.spec.grid_ranks) == (1, 2)
        old.set(f"went on/{rank}", "")
        old.wait(["waits"], GENEROUS)
        commgrid.shutdown()
        with suppress(RuntimeError):  # rank 0 has ended, and its store
            old.wait(["told"], GENEROUS)
        return "done"
    old.wait(["went on/1", "went on/2"], GENEROUS)
    with pytest.raises(PeerTimeoutError, match="rank 0 came too late"):
        commgrid.rebuild(grace=0.1)
    found: list[object] = ["nothing"]

    def waits() -> None:
        found[0] = commgrid.rebuild()

    waiting = threading.Thread(target=waits, daemon=True)
    waiting.start()
    old.set("waits", "")
    waiting.join(60.0)
    old.set("told", "")
    return "waits for ever" if waiting.is_alive() else f"told: {found[0]}"


def own_faults() -> list[str]:
    """What rank 1 says where its own abort fails, and where the store of rank 0 is silent."""
    grid, said = commgrid.initialize(), []
    abort = grid.abort_after_failure

    def fails() -> None:
        abort()
        raise RuntimeError("out of handles")

    def silent(*_: object) -> int:
        raise SilentStoreError("the store has not answered")

    if grid.rank == 1:
        board = named_failures.FailureBoard(grid)
        grid.abort_after_failure = fails  # type: ignore[method-assign]
        error = named_failures.GoneError("a connection closed", 0)
        said.append(board.inquire(grid, error, ""))
        said += error.__notes__
        board = named_failures.FailureBoard(grid)
        board._failure = Failure("again", 1, (0, 1))
        board._driver.store.add = silent  # type: ignore[method-assign]
        grid.abort_after_failure = abort  # type: ignore[method-assign]
        said.append(board.inquire(grid, error, ""))
    commgrid.shutdown()
    return said


@pytest.mark.full
def test_an_abort_that_fails_is_not_taken_for_a_store_that_is_gone() -> None:
    aborted, note, silent = run_on_ranks(own_faults, 2, check=False)[1]
    assert "a connection closed" in aborted
    assert "serves the store" not in aborted
    assert note == "grid.abort() failed after it: RuntimeError: out of handles"
    assert silent.startswith("rank 0 is gone or does not answer, which serves the store")
    assert silent.count("rank 0") == 1


def own_silent_store() -> str:
    """What the rank that serves the store says where its store thread answers too late."""
    grid, said = commgrid.initialize(), ""

    def silent(*_: object) -> int:
        raise SilentStoreError("the store has not answered")

    if grid.rank == 0:
        board = named_failures.FailureBoard(grid)
        board._driver.store.add = silent  # type: ignore[method-assign]
        said = board.inquire(grid, named_failures.GoneError("a connection closed", 1), "")
    commgrid.shutdown()
    return said


@pytest.mark.full
def test_a_rank_that_serves_the_store_does_not_say_that_it_is_gone() -> None:
    said = run_on_ranks(own_silent_store, 2, check=False)[0]
    assert said == "rank 1 is gone or does not answer: rank 0 got a connection closed"


@pytest.mark.parametrize(
    ("local", "on_host", "server", "named"),
    [
        ("1", "8", 0, "rank 0"),  # one host: only the server is silent
        ("", "", 0, "rank 0"),  # not known which hosts there are
        ("1", "2", 0, "rank 0"),  # the server is on this host, which reaches itself
        ("1", "2", 6, "ranks 2-5, 7 and rank 6"),
    ],
    ids=["one host", "unknown", "own host", "other host"],
)
def test_a_silent_store_names_no_rank_that_may_live(
    local: str, on_host: str, server: int, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", on_host)
    monkeypatch.setattr(named_failures, "_server_rank", lambda: server)
    spec = SimpleNamespace(grid_ranks=tuple(range(8)))
    grid = cast(Any, SimpleNamespace(rank=1, spec=spec))
    said = named_failures._store_is_gone(grid, True, {5}, "mine")
    assert said.startswith(named)
    assert not set(re.findall(r"\d+", said)) - set(re.findall(r"\d+", named))


def test_a_late_rank_waits_where_the_others_are() -> None:
    """It waited at the store that they had left, and never heard of their end."""
    assert run_killable(a_server_that_is_late, 3) == ["told: None", "done", "done"]


@pytest.fixture
def through_a_wire() -> Iterator[tuple[TCPStore, list[socket.socket], socket.socket]]:
    """A client of a store that lives, the connections that it goes over, and who accepts them."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    listener = socket.create_server(("127.0.0.1", 0))
    ends: list[socket.socket] = []

    def carry(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)

    def accept() -> None:
        with suppress(OSError):
            while True:
                near = listener.accept()[0]
                far = socket.create_connection(("127.0.0.1", server.port))
                ends.extend((near, far))
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=carry, args=pair, daemon=True).start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    port = listener.getsockname()[1]
    client = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    yield client, ends, listener
    end(listener)
    accepting.join(10.0)
    for each in ends:
        end(each)


def end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


@pytest.mark.parametrize("listens", [True, False])
def test_a_store_is_gone_only_where_nobody_listens(
    listens: bool,
    through_a_wire: tuple[TCPStore, list[socket.socket], socket.socket],
) -> None:
    """A cut connection was taken for a dead server: two halves of a grid could both go on."""
    client, ends, listener = through_a_wire
    store = dist.PrefixStore("a", client)
    assert torch_standby.ask(store) is Answer.HERE
    for each in ends if listens else [listener, *ends]:
        end(each)
    assert torch_standby.ask(store) is (Answer.SILENT if listens else Answer.GONE)


def test_a_store_with_a_full_queue_is_waited_for() -> None:
    """Of many ranks that come at once one took such a store for silent, and went to another."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        port = listener.getsockname()[1]
        waiting = [socket.socket() for _ in range(3)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(("127.0.0.1", port))
        taken: list[socket.socket] = []

        def take() -> None:
            with suppress(OSError):  # until the listener is closed
                while True:
                    taken.append(listener.accept()[0])

        server = threading.Timer(0.3, take)
        server.start()
        assert torch_standby._look("127.0.0.1", port) is None
        listener.shutdown(socket.SHUT_RDWR)
        server.join()
    for each in (*waiting, *taken):
        each.close()


def test_what_was_recorded_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """With trace=True the error of a rank waited for ever where the store's server was stopped."""
    commgrid.initialize(trace=True)
    try:
        monkeypatch.setattr(remote, "connection_of", lambda _: threading.Event().wait())
        use_timeouts(replace(Timeouts(), settle=0.1, leave=0.1, answer=0.1))
        why = remote.at_failure("default@0/0.1", True)
        said: list[str] = []
        waiting = threading.Thread(target=lambda: said.append(why()), daemon=True)
        waiting.start()
        waiting.join(30.0)
        assert said == [""]
    finally:
        use_timeouts(None)
        commgrid.trace.stop()
        commgrid.shutdown()


def test_a_standby_store_of_rank_0_is_not_the_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for server, said in ((None, "torchrun's agent"), (0, "rank 0"), (2, "rank 2")):
        monkeypatch.setattr(registry._registry.place, "server", server)
        assert named_failures._store_server() == said


def order_after_a_rebuild() -> str:
    """The second grid's ranks call in different orders."""
    grid = commgrid.initialize(verify="order", timeout=20)
    grid.abort()
    again = commgrid.rebuild()
    assert again is not None
    first, second = ("dp", "dp_tp") if again.rank == 0 else ("dp_tp", "dp")
    try:
        for name in (first, second):
            size = 3 if name == "dp" else 4
            all_reduce(torch.ones(size), again.get_group(name))
        said = "nothing was compared"
    except GridMismatchError as error:
        said = str(error)
    store = torch_world.world_store()
    store.set(f"found/{again.rank}", "")
    with suppress(RuntimeError):  # rank 0 serves it until both have found it
        store.wait(["found/0", "found/1"], GENEROUS)
    return said


def test_order_is_compared_after_a_rebuild_too() -> None:
    for said in run_on_ranks(order_after_a_rebuild, 2, backend=None, launcher="torchrun"):
        assert "all_reduce" in said


@pytest.mark.full
def test_a_further_connection_may_take_longer_than_a_call() -> None:
    """A server looks up names, for a second and more, where a group may wait for less."""
    port = free_port()
    limit = timedelta(milliseconds=500)
    first = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    store.set_timeout(limit)
    del first  # nobody listens for two seconds
    served: list[TCPStore] = []

    def serve() -> None:
        served.append(TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))

    later = threading.Timer(2.0, serve)
    later.start()
    made = connection_of(store)
    later.join()
    assert made.add("count", 1) == 1
    assert (store.timeout, made.timeout) == (limit, limit)


def other_host_is_silent() -> str:
    """Ranks 2 and 3 run on another host, which nobody hears of; each waits for one of them."""
    grid = commgrid.initialize(tp=2, timeout=2)
    if grid.rank >= 2:
        hear("0 is through", "1 is through")
        tell(f"{grid.rank} is through")
        return ""
    with pytest.raises(PeerTimeoutError) as told, named_failures.named_failures(grid):
        all_reduce(torch.ones(1), "dp")
    tell(f"{grid.rank} is through")
    if grid.rank == 0:  # whose process is the store's
        hear("2 is through", "3 is through")
    return str(told.value)


@pytest.mark.full
def test_a_host_that_is_silent_is_named_with_all_its_ranks() -> None:
    two_a_host = {"LOCAL_WORLD_SIZE": "2"}
    said = run_on_ranks(
        other_host_is_silent, 4, backend=None, launcher="torchrun", environ=two_a_host
    )
    assert all(each.startswith("ranks 2-3 are gone or do not answer") for each in said[:2]), said


def test_a_connection_that_takes_long_is_no_silent_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store answers meanwhile."""
    commgrid.initialize()
    over = threading.Event()
    monkeypatch.setattr(torch_gloo, "can_be_lazy", lambda: True)
    monkeypatch.setattr(torch_leaving, "leave", lambda *how: over.wait(120))
    use_timeouts(replace(Timeouts(), leave=0.1, answer=5.0))
    try:
        stop_waiting([dist.group.WORLD])
        assert not PatientStore(torch_world.world_store()).check(["nothing"])
    finally:
        over.set()
        use_timeouts(None)
        commgrid.shutdown()
