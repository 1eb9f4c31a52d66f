"""gloo takes whoever connects and writes a number for the rank it expects; a start says so.

A program that still looks for a peer which has ended may reach a listener that got the peer's port
since. A full run, where jobs die beside jobs that start, has failed with the message this gives.
"""

import os
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid.errors import PeerFailedError, PeerTimeoutError
from commgrid.runtime import grid as grids
from commgrid.testing import run_on_ranks
from tests.flags import hear, tell
from tests.killing import KILLED, kill_me, run_killable
from tests.waiting import comes, until_waits

LISTENS = "0A"  # a socket's state in /proc/net/tcp


def own_listeners() -> Iterator[tuple[str, int]]:
    """Where this process listens."""
    mine = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            mine.add(os.readlink(f"/proc/self/fd/{name}"))
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, here, _, state, _, _, _, _, _, inode, *_ = line.split()
            if state == LISTENS and f"socket:[{inode}]" in mine:
                host, port = here.split(":")
                words = [int(host[i : i + 8], 16) for i in range(0, len(host), 8)]
                yield (
                    socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words)),
                    int(port, 16),
                )


def foreign_connections(ranks: int) -> None:
    """What a stranger's gloo would do: it says which rank it is, and is gone a moment later."""
    for address in own_listeners():
        for rank in range(ranks):
            with socket.create_connection(address, 5) as stranger:
                stranger.sendall(struct.pack("=q", rank))
                time.sleep(0.005)  # gloo shows nobody whom it has taken
    time.sleep(0.3)  # nor that it has seen them leave


def starts(hit: Sequence[int], **options: Any) -> tuple[str, str]:
    """The error of a start that strangers disturb, and what comes of a second call."""
    exchange: Callable[..., Any] = grids.exchange_ranks

    def exchange_after_strangers(*args: Any) -> Any:
        if dist.get_rank() in hit:
            foreign_connections(dist.get_world_size())
        tell(f"strangers of rank {dist.get_rank()}")
        hear(*(f"strangers of rank {rank}" for rank in hit))
        try:
            return exchange(*args)
        finally:
            del args  # a program holds no communicators of a grid that it does not have yet

    grids.exchange_ranks = exchange_after_strangers
    with pytest.raises((PeerFailedError, PeerTimeoutError)) as first:
        commgrid.initialize(tp=2, pp=2, connect="all", **options)
    grids.exchange_ranks = exchange  # type: ignore[assignment]
    grid = commgrid.initialize(tp=2, pp=2, connect="all", **options)
    grid.check()
    found = torch.ones(1) * dist.get_rank()
    dist.all_reduce(found, group=grid.get_group("tp"))
    commgrid.destroy()
    return str(first.value), f"tp sums up to {found.item():g}"


def run(hit: Sequence[int], **options: Any) -> list[tuple[str, str]]:
    # A grid that failed leaves keys in the store.
    return run_on_ranks(partial(starts, **options), 4, hit, timeout=120, check=False)


@pytest.mark.full("hit0-True", "hit[12]-*")
@pytest.mark.parametrize("watch", [False, True])
@pytest.mark.parametrize("hit", [(0,), (3,), (0, 1, 2, 3)])
def test_a_start_that_lost_a_connection_blames_no_rank(hit: tuple[int, ...], watch: bool) -> None:
    """The second call starts, on the same processes."""
    for told, second in run(hit, watch=watch):
        assert re.search("communicator .*(closed|reset) by peer", told), told
        assert "all ranks have reported since, so call it again" in told, told
        assert second == "tp sums up to 1" or second == "tp sums up to 5"


def is_killed_while_it_connects(watch: bool) -> str:
    exchange: Callable[..., Any] = grids.exchange_ranks

    def exchange_and_die(communicators: list[Any], *args: Any) -> Any:
        if os.environ["RANK"] == "3":
            exchange(communicators[:-1], *args)
            # Begins to connect with all of them.
            connecting = communicators[-1].group.recv_anysource([torch.empty(1)], 1)
            until_waits("rank 0", "rank 1", "rank 2")  # for what it has to say
            assert connecting
            kill_me()
        comes(f"rank {os.environ['RANK']}")
        return exchange(communicators, *args)

    grids.exchange_ranks = exchange_and_die
    try:
        commgrid.initialize(tp=2, pp=2, connect="all", watch=watch)
    except (PeerTimeoutError, PeerFailedError) as error:
        return str(error)
    raise AssertionError("started without rank 3")


@pytest.mark.full("True")
@pytest.mark.nightly("False")
@pytest.mark.parametrize("watch", [False, True])
def test_who_died_meanwhile_is_named(watch: bool) -> None:
    """As the one that does not report, or by the watch."""
    what = "rank 3 is gone: its process has ended" if watch else "rank 3 did not report within 10 s"
    *others, died = run_killable(is_killed_while_it_connects, 4, watch)
    assert died == KILLED
    for told in others:  # startup_timeout is longer than this test may last
        assert what in told, told
