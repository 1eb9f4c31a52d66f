"""The gate before a communicator's first call: who is absent is named, and nothing is left."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel

import commgrid
from commgrid.collectives import all_reduce
from commgrid.errors import PeerFailedError, PeerTimeoutError
from commgrid.failures import named_failures
from commgrid.rendezvous.timeouts import Timeouts, use_timeouts
from commgrid.store.gate import Gate, Hearing
from commgrid.testing import run_on_ranks
from tests.flags import hear, meet, tell
from tests.nccl_stand_in import NAME, install, unique_id
from tests.waiting import until

GROUP = "commgrid/default/0.1/dp_cp/(3, 5, 8)"
RANKS = (3, 5, 8)
Requests = Callable[[dist.Store, int], bytes]
"""Asks a store for an id as torch does, given the group rank."""


def first_backend(store: dist.Store, rank: int) -> bytes:
    return unique_id(store, rank, "0", rank == 0)


def scalable(store: dist.Store, rank: int) -> bytes:
    """The first backend in a group of many ranks: several members write, all read all."""
    if rank < 2:
        store.set(f"UniqueNCCLID:{rank}", f"id {rank}")
    return b", ".join(store.multi_get(["UniqueNCCLID:0", "UniqueNCCLID:1"]))


def second_backend(store: dist.Store, rank: int) -> bytes:
    """The second backend: the writer waits for its id, and reads it, too."""
    inner = PrefixStore("commgrid/default/0.1/dp_cp", store)
    if rank == 0:
        inner.set("nccl_storekey_0", "id")
    inner.wait(["nccl_storekey_0"], timedelta(seconds=30))
    return b"".join(inner.multi_get(["nccl_storekey_0"]))


def writer_of_2_14(store: dist.Store, rank: int) -> bytes:
    """The second backend of torch 2.14, whose writer does not read."""
    if rank == 0:
        store.set("nccl_storekey_0", "id")
        return b"id"
    store.wait(["nccl_storekey_0"], timedelta(seconds=30))
    return bytes(store.get("nccl_storekey_0"))


def pair(store: dist.Store, rank: int) -> bytes:
    """An unbatched message between group ranks 1 and 2; 0 does not come, and need not."""
    return b"" if rank == 0 else unique_id(store, rank, "1:2", rank == 1)


def lazy_pair(store: dist.Store, rank: int) -> bytes:
    if rank == 0:
        return b""
    inner = PrefixStore("commgrid/default/0.1/dp_cp/p2p-1-2-0", store)
    return unique_id(inner, rank, "nccl_storekey_0", rank == 1)


class Members:
    """The members of a group, as threads over one store."""

    def __init__(self, timeout: float = 30.0, where: str = "") -> None:
        self.store = dist.HashStore()
        self.told: list[tuple[str, bool]] = []
        hearing = Hearing(lambda ranks: where, lambda *failure: self.told.append(failure))
        self.gates = [
            Gate(self.store, GROUP, "dp_cp", rank, RANKS, timeout, None, hearing) for rank in RANKS
        ]

    def ask(self, requests: Requests, ranks: tuple[int, ...] = (0, 1, 2)) -> list[Any]:
        """Let group ranks connect at once; return the ids, or the errors."""

        def one(rank: int) -> Any:
            prefixed = PrefixStore("cuda/", PrefixStore(f"{GROUP}/", self.gates[rank]))
            try:
                return requests(prefixed, rank)
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(one, ranks))

    def left(self) -> int:
        for each in self.gates:
            each.close()
        return self.store.num_keys()


ALL = (first_backend, scalable, second_backend, writer_of_2_14)


@pytest.mark.parametrize("requests", [*ALL, pair, lazy_pair])
def test_all_get_one_id_and_it_is_deleted(requests: Requests) -> None:
    members = Members()
    ids = [each for each in members.ask(requests) if each != b""]
    assert len({*ids}) == 1, ids
    assert not isinstance(ids[0], Exception)
    if requests not in (writer_of_2_14, lazy_pair):  # whose writer reads nothing
        assert members.store.num_keys() == 0
    assert members.left() == 0
    assert members.told == []


@pytest.mark.parametrize("requests", ALL)
@pytest.mark.parametrize("absent", [0, 2])
def test_an_absent_member_is_named_by_all_others(requests: Requests, absent: int) -> None:
    members = Members(1.0, "it is at train.py:31 in step")
    present = tuple(rank for rank in range(3) if rank != absent)
    said = (
        f"rank {RANKS[absent]} did not come to the first call on dp_cp within 1 s; it is at "
        "train.py:31 in step"
    )
    for error in members.ask(requests, present):
        assert said in str(error), error
    assert members.told == [(said, True)] * 2
    # It comes after all.
    (error,) = members.ask(requests, (absent,))
    assert f"rank {RANKS[absent]} came too late to the first call on dp_cp" in str(error)


@pytest.mark.parametrize("requests", [pair, lazy_pair])
def test_of_a_pair_the_other_one_is_named(requests: Requests) -> None:
    (error,) = Members(1.0).ask(requests, (1,))
    assert "rank 8 did not come to the first call on dp_cp within 1 s" in str(error)


def test_the_class_of_the_error_passes_through_torch() -> None:
    (error,) = Members(0.5).ask(first_backend, (0,))
    assert type(error) is PeerTimeoutError


def test_a_failure_ends_the_wait() -> None:
    members = Members(20.0)
    threading.Thread(target=lambda: (
        until(lambda: members.gates[1].waits, "rank 5 waits at the gate"),
        members.gates[0].end("rank 8 is gone: its process has ended", False),
        members.gates[1].end("rank 8 is gone: its process has ended", False),
    )).start()  # fmt: skip
    (error,) = members.ask(first_backend, (1,))
    assert "rank 8 is gone" in str(error)
    (error,) = members.ask(first_backend, (0,))  # later, it does not wait at all
    assert type(error) is PeerFailedError
    (error,) = members.ask(pair, (1,))  # nor for another connection
    assert type(error) is PeerFailedError


def test_an_id_that_is_never_written() -> None:
    """The member that should write it came, and ended."""

    def comes_alone(store: dist.Store, rank: int) -> bytes:
        return b"" if rank == 0 else first_backend(store, rank)

    members = Members(1.0)
    members.gates[0].set = lambda key, value: members.gates[0]._meet(key)  # type: ignore
    said = [str(each) for each in members.ask(first_backend)][1:]
    told = "all members came to the first call on dp_cp, and the first of them did not write"
    assert all(told in each for each in said), said


def test_other_keys_meet_nobody() -> None:
    members = Members(3000.0)
    store = PrefixStore("cuda/", PrefixStore(f"{GROUP}/", members.gates[0]))
    for key in ("NCCL_1_trace_start", "a/1", "rank_0", "1/0"):
        store.set(key, "x")
        assert store.get(key) == b"x"
        assert store.check([key])
    members.gates[0].set("exception_dump", "1")
    assert not members.gates[0].check(["exception_dump"])
    assert store.add("count", 3) == 3
    assert store.compare_set("other", "", "y") == b"y"


def test_the_first_meeting_has_what_is_left_of_a_start() -> None:
    gate = Gate(dist.HashStore(), "g", "tp", 0, (0, 1), 3000.0, startup=0.5)
    with pytest.raises(PeerTimeoutError, match=r"rank 1 did not come .* within 0\.5 s"):
        gate.set("g//cuda//0", b"id")
    late = Gate(dist.HashStore(), "g", "tp", 0, (0, 1), 0.5, startup=3000.0)
    other = Gate(late._store, "g", "tp", 1, (0, 1), 30.0)
    reading = threading.Thread(target=other.get, args=("g//cuda//0",))
    reading.start()
    late.set("g//cuda//0", b"id")
    reading.join(60)
    with pytest.raises(PeerTimeoutError, match=r"rank 1 did not come .* within 0\.5 s"):
        late.set("g//cuda//0:1", b"id")


def test_a_store_that_ends() -> None:
    server = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
    gate = Gate(client, "g", "tp", 0, (0, 1), 3000.0)

    def ends() -> None:
        until(lambda: gate.waits, "the rank waits at the gate")
        time.sleep(0.1)
        nonlocal server
        del server

    threading.Thread(target=ends).start()
    with pytest.raises(
        PeerTimeoutError, match="the store ended or did not answer before the first call on tp"
    ):
        gate.set("g//cuda//0", b"id")


# -- a grid over a backend that connects at first use ---------------------------------------------


def first_call(absent: int, how: str) -> tuple[str, str]:
    """What a rank gets of the first call on dp_cp; the absent one waits for the others to end."""
    install()
    use_timeouts(Timeouts(seen=5.0))
    grid = commgrid.initialize(
        dp=2, cp=2, connect="none", backend=NAME, watch=True, timeout=3.0, groups={}
    )
    rank, kind, told = grid.rank, "", ""
    if rank != absent:
        try:
            with named_failures(grid):
                if how == "python":
                    all_reduce(torch.ones(4), "dp_cp")
                else:
                    DistributedDataParallel(nn.Linear(2, 2), process_group=grid.get_group("dp_cp"))
        except commgrid.CommGridError as error:
            kind, told = type(error).__name__, str(error)
    else:
        until(lambda: "tp" not in grid._groups, "another rank names this one")
        with pytest.raises(PeerTimeoutError, match="cannot be used any more"):
            grid.get_group("tp")
    meet(rank, 4)
    return kind, told


@pytest.mark.parametrize(("absent", "how"), [(3, "python"), (0, "python"), (2, "ddp")])
def test_a_rank_that_never_comes_to_a_first_call(absent: int, how: str) -> None:
    """All others hung in it for ever, and nobody was named."""
    found = run_on_ranks(
        first_call, 4, absent, how, backend=None, launcher="torchrun", check=False, timeout=100
    )
    for rank, (kind, told) in enumerate(found):
        if rank != absent:
            assert kind == "PeerTimeoutError", told
            assert f"rank {absent} did not come to the first call on dp_cp within 3 s" in told
            assert "waiting.py" in told, told  # where it is


def connects() -> tuple[list[float], int]:
    install()
    grid = commgrid.initialize(tp=2, connect="axes", backend=NAME, watch=True, timeout=30.0)
    sums = [float(all_reduce(torch.ones(1), name)) for name in ("tp", "dp", "dp_tp")]
    connected = sum(each.connected for each in grid.communicators)
    grid.check()
    commgrid.destroy()
    store = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    tell(f"{dist.get_rank()} has destroyed it")
    hear(*(f"{rank} has destroyed it" for rank in range(4)))
    left = [key for key in store.list_keys() if "/gate/" in key or "//cuda//0" in key]
    assert left == []
    meet(dist.get_rank(), 4)
    return sums, connected


def test_a_correct_program_passes_the_gate_and_leaves_nothing() -> None:
    for sums, connected in run_on_ranks(
        connects, 4, backend=None, launcher="torchrun", check=False, timeout=100
    ):
        assert sums == [2.0, 2.0, 4.0]
        assert connected >= 3


def interrupted() -> str:
    """Ctrl-C while a rank waits at the gate."""
    install()
    grid = commgrid.initialize(connect="none", backend=NAME, watch=True, timeout=3000.0)
    if grid.rank == 1:
        until(lambda: grid.failure, "rank 0 has ended")
        return str(grid.failure)
    threading.Timer(0.0, lambda: (
        until(lambda: any(g.waits for g in gates()), "rank 0 waits at the gate"),
        os.kill(os.getpid(), 2),
    )).start()  # fmt: skip
    try:
        with named_failures(grid):
            all_reduce(torch.ones(1), "dp")
    except KeyboardInterrupt:
        return "interrupted"
    return "not interrupted"


def gates() -> list[Gate]:
    from commgrid.torch_compat.groups import _GATES

    return list(_GATES.values())


def test_ctrl_c_ends_the_wait_and_the_others_are_told() -> None:
    first, second = run_on_ranks(
        interrupted, 2, backend=None, launcher="torchrun", check=False, timeout=100
    )
    assert first == "interrupted"
    assert "rank 0 failed" in second
    assert "KeyboardInterrupt" in second
