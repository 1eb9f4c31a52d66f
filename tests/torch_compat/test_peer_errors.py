"""Which of torch's errors mean that a peer is gone: provoked here, and others that look like it."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid import CommGridError, PeerTimeoutError
from commgrid.runtime.named_failures import _whole_hosts
from commgrid.testing import run_on_ranks
from commgrid.torch_compat.peer_errors import as_peer_error, is_peer_failure
from tests.flags import hear, tell
from tests.waiting import comes, until_waits

Verdict = tuple[str, bool, bool]


def verdict(call: Callable[[], object]) -> Verdict:
    """What a call raises, and whether that is taken for a peer's failure, in both functions."""
    with pytest.raises(RuntimeError) as raised:
        call()
    error = raised.value
    made = as_peer_error("made", error)
    return str(error), is_peer_failure(error), isinstance(made, PeerTimeoutError)


def check(found: list[Verdict], said: str, expected: bool) -> None:
    for text, *is_failure in found:
        assert said in text
        assert is_failure == [expected, expected], text


def new_group(seconds: float) -> Any:
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    dist.barrier(group)
    return group


def peer_has_ended(rank: int) -> list[Verdict]:
    group, numbers = new_group(30), torch.ones(4_000_000)
    if rank == 1:
        until_waits("rank 0")
        dist.destroy_process_group()
        return []
    if rank == 0:
        comes("rank 0")
        found = [verdict(lambda: dist.recv(numbers, 1, group=group))]
        tell("rank 1 has ended")
        return found
    hear("rank 1 has ended")
    return [verdict(lambda: dist.send(numbers, 1, group=group))]


def test_a_peer_that_has_ended() -> None:
    receiving, _, sending = run_on_ranks(peer_has_ended, 3, per_rank=[(r,) for r in range(3)])
    check(receiving + sending, "Connection ", True)


def peer_is_silent(rank: int) -> list[Verdict]:
    group = new_group(3)
    if rank == 1:
        hear("both")
        return []
    receive = lambda: dist.recv(torch.ones(1), 1, group=group)  # noqa: E731
    found = [verdict(receive), verdict(receive)]
    tell("both")
    return found


@pytest.mark.full
def test_a_peer_that_is_silent() -> None:
    found = run_on_ranks(peer_is_silent, 2, per_rank=[(0,), (1,)])[0]
    check(found[:1], "Timed out waiting 3000ms for recv operation", True)
    check(found[1:], "Application timeout caused pair closure", True)


def peer_makes_no_group(rank: int) -> list[Verdict]:
    if rank == 1:
        hear("both")
        return []
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(timedelta(seconds=0.5))
    limit = timedelta(seconds=1)
    found = [
        verdict(lambda: dist.new_group(timeout=limit)),
        verdict(lambda: store.get("what nobody writes")),
    ]
    tell("both")
    return found


def test_a_peer_that_makes_no_group() -> None:
    found = run_on_ranks(peer_makes_no_group, 2, per_rank=[(0,), (1,)])[0]
    check(found[:1], "ait timeout", True)
    check(found[1:], "imeout", True)


def peer_ends_before_first_use(rank: int) -> list[Verdict]:
    """Of a grid's group that connects at first use."""
    group = commgrid.initialize(connect="none", timeout=3).get_group("dp")
    return [] if rank == 1 else [verdict(lambda: dist.all_reduce(torch.ones(1), group=group))]


def test_a_peer_that_ends_before_first_use() -> None:
    found = run_on_ranks(peer_ends_before_first_use, 2, per_rank=[(0,), (1,)], timeout=300)[0]
    check(found, "", True)


def innocent(rank: int) -> list[Verdict]:
    group = new_group(30)
    outputs = [torch.ones(1), torch.ones(1)]
    return [verdict(lambda: dist.all_gather(outputs, torch.ones(2), group=group))]


def test_a_wrong_call_is_no_peers_failure() -> None:
    for found in run_on_ranks(innocent, 2, per_rank=[(0,), (1,)]):
        check(found, "ProcessGroupGloo::allgather: invalid", False)


def no_such_interface() -> list[Verdict]:
    os.environ["GLOO_SOCKET_IFNAME"] = "nosuch0"
    return [verdict(lambda: dist.new_group(timeout=timedelta(seconds=2)))]


def test_a_wrong_setting_is_no_peers_failure() -> None:
    # The ranks set variables of the environment.
    check(run_on_ranks(no_such_interface, 1, check=False)[0], "nosuch0", False)


RECORDED = [
    # A rank killed while its peers created a group, torch 2.13.
    RuntimeError(
        "Gloo connectFullMesh failed with [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/"
        "tcp/pair.cc:152] timed out connecting: SO_ERROR: Connection refused, "
        "remote=[127.0.0.1]:44951$0"
    ),
    dist.DistNetworkError("The client socket has timed out after 1000ms while trying to connect"),
    dist.DistBackendError(
        "NCCL error in: NCCLUtils.cpp:90, remote process exited or there was a network error, NCCL "
        "version 2.27.5\nncclRemoteError: A call failed possibly due to a network error or a "
        "remote process exiting prematurely.\nLast error:\n"
    ),
    dist.DistBackendError(
        "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d "
        "key-value store by key '0', but store->get('0') got error: wait timeout after 600000ms, "
        "keys: /default_pg/0//0"
    ),
    dist.DistBackendError("NCCL communicator was aborted on rank 1."),
    RuntimeError("Operation timed out!"),
]
INNOCENT = [
    RuntimeError("unknown option connect"),
    RuntimeError("connectivity 6 needs a tensor of 3 dims"),
    RuntimeError("the wait timeout must be positive"),
    RuntimeError("gloo: unknown option connect_timeout"),
    RuntimeError("DataLoader timed out after 5 seconds"),
    RuntimeError("Connection reset by peer while downloading the tokenizer"),
    RuntimeError("nccl and gloo disagree about remote and closed shapes"),
    dist.DistBackendError(
        "NCCL error in: ProcessGroupNCCL.cpp:3699, invalid usage (run with NCCL_DEBUG=WARN for "
        "details), NCCL version 2.27.5\nncclInvalidUsage: This usually reflects invalid usage of "
        "NCCL library.\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device"
    ),
    ValueError("Connection closed by peer"),
    CommGridError("gloo: Connection closed by peer"),
]


@pytest.mark.parametrize("error", RECORDED, ids=lambda error: str(error)[:30])
def test_recorded_failures_of_peers(error: RuntimeError) -> None:
    assert is_peer_failure(error)
    assert isinstance(as_peer_error("made", error), PeerTimeoutError)


@pytest.mark.parametrize("error", INNOCENT, ids=lambda error: str(error)[:30])
def test_what_only_sounds_like_it(error: Exception) -> None:
    assert not is_peer_failure(error)
    if isinstance(error, RuntimeError):
        made = as_peer_error("made", error)
        assert not isinstance(made, PeerTimeoutError)
        assert str(error).splitlines()[0] in str(made)


@pytest.mark.parametrize(
    ("gone", "missing", "hosts"),
    [
        ({5}, {4, 5, 6, 7}, {4, 5, 6, 7}),
        ({5}, {5, 6, 7}, set()),
        ({1, 9}, {8, 9, 10, 11}, {8, 9, 10, 11}),
    ],
)
def test_a_host_of_which_nothing_is_heard_is_gone_as_a_whole(
    gone: set[int], missing: set[int], hosts: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert _whole_hosts(gone, missing) == hosts
