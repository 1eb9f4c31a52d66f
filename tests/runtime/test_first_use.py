"""Groups that connect at first use: what works on them, and what a dead peer is."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid.planning.group_row import GroupOptions
from commgrid.testing import run_on_ranks
from commgrid.torch_compat import ended_groups
from commgrid.torch_compat import groups as torch_groups
from commgrid.torch_compat import world as torch_world
from commgrid.torch_compat.peer_errors import is_peer_failure
from tests.flags import hear, tell
from tests.waiting import comes, until_waits

LIMIT = 2.0
FOREVER = 1000.0  # seconds, for which no test may last

USES: dict[str, Callable[[dist.ProcessGroup], Any]] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(1), group=group),
    "broadcast": lambda group: dist.broadcast(torch.ones(1), 2, group=group),
    "all_gather": lambda group: dist.all_gather([torch.ones(1)] * 3, torch.ones(1), group=group),
    "send": lambda group: dist.send(torch.ones(1), 2, group=group),
    "recv": lambda group: dist.recv(torch.ones(1), 2, group=group),
    "any": lambda group: dist.recv(torch.ones(1), group=group),
    "barrier": lambda group: dist.barrier(group=group),
}


def made(name: str, ranks: list[int], limit: float = LIMIT) -> dist.ProcessGroup:
    return torch_groups.create_group(
        name,
        name,
        ranks,
        backend=None,
        options=GroupOptions(),
        timeout=limit,
        startup_timeout=FOREVER,
    )


# -- a peer that is not there -----------------------------------------------------------


def first_use(use: str, dead: str) -> None:
    group = made(f"{use}-{dead}", [0, 1, 2])
    dist.barrier()
    if dist.get_rank() == 2:
        if dead == "silent":
            hear("0 is through", "1 is through")
        torch_groups.destroy_group(group)
        tell("rank 2 has let go")
        return
    if dead == "gone":
        hear("rank 2 has let go")
    with pytest.raises(RuntimeError) as told:
        USES[use](group)
    assert is_peer_failure(told.value), told.value
    ended_groups.abort_all([group], {group})
    del group
    tell(f"{dist.get_rank()} is through")


@pytest.mark.full("recv-*", "broadcast-*", "all_gather-*", "send-*", "any-*", "barrier-*")
@pytest.mark.parametrize("dead", ["gone", "silent"])
@pytest.mark.parametrize("use", USES)
def test_a_peer_that_never_talks_is_an_error_within_the_timeout(use: str, dead: str) -> None:
    run_on_ranks(first_use, 3, use, dead)


def late_messages() -> None:
    group = torch_groups.create_group(
        "connected", "", [0, 1], backend=None, options=GroupOptions(), timeout=LIMIT,
        startup_timeout=FOREVER, connect=True,
    )  # fmt: skip
    dist.all_reduce(torch.ones(1), group=group)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="Timed out waiting 2000ms"):
            dist.recv(torch.ones(1), 1, group=group)
        tell("0 is through")
    else:
        hear("0 is through")


def test_messages_on_a_connected_group_get_the_groups_whole_timeout() -> None:
    """They got what the first meeting was given, however long the group's timeout was."""
    run_on_ranks(late_messages, 2)


# -- what works -------------------------------------------------------------------------


def uses() -> None:
    rank = dist.get_rank()
    group = made("uses", [0, 1, 2, 3], 20.0)
    assert dist.get_backend(group) == "gloo"
    assert group.name() == "gloo"
    if rank == 0:  # from whoever it comes
        tensor = torch.zeros(1)
        assert {dist.recv(tensor, group=group, tag=5) for _ in range(3)} == {1, 2, 3}
    else:
        dist.send(torch.ones(1), 0, group=group, tag=5)
    there, back = torch.full((1,), float(rank)), torch.zeros(1)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, there, (rank + 1) % 4, group),
            dist.P2POp(dist.irecv, back, (rank - 1) % 4, group),
        ]
    )
    for work in works:
        work.wait()
    assert back.item() == (rank - 1) % 4
    dist.monitored_barrier(group, timedelta(seconds=10))
    found: list[Any] = [None] * 4
    dist.all_gather_object(found, {"rank": rank}, group=group)
    assert found == [{"rank": other} for other in range(4)]
    beside = dist.new_group([0, 1, 2, 3])
    for each in (group, beside):
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=each)
        assert tensor.item() == 4
    alone = made(f"alone{rank}", [rank])
    parts = [torch.zeros(2)]
    dist.all_gather(parts, torch.ones(2), group=alone)
    assert parts[0].tolist() == [1, 1]
    for each in (alone, group):
        torch_groups.destroy_group(each)


def test_every_kind_of_use_beside_torchs_own_groups() -> None:
    run_on_ranks(uses, 4)


def test_with_torchs_debugging_wrapper() -> None:
    def wrapped() -> None:
        dist.set_debug_level_from_env()
        grid = commgrid.initialize(tp=2)
        grid.check()
        backend = grid.get_group("tp")._get_backend(torch.device("cpu"))
        assert backend.wrapped_pg.options._timeout == timedelta(minutes=30)
        commgrid.destroy()

    # The wrapper leaves keys in the store.
    run_on_ranks(wrapped, 4, environ={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, check=False)


def keys() -> list[int]:
    dist.init_process_group("gloo")
    store = torch_world.world_store()
    counts = []
    for _ in range(3):
        dist.barrier()
        commgrid.initialize(tp=2, connect="none")
        dist.barrier()
        commgrid.destroy()
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()  # the store goes with rank 0
    return counts


def test_addresses_leave_the_store_with_their_group() -> None:
    """A rank left a key for every group of every grid it had made."""
    for counts in run_on_ranks(keys, 4, backend=None, launcher="torchrun"):
        assert counts[2] - counts[1] < 8, counts  # the meeting's own; 40 addresses a cycle


def destroyed_in_a_call() -> float:
    grid = commgrid.initialize(tp=2, connect="none")
    ones = torch.ones(1)
    if grid.rank == 1:
        until_waits("rank 0 in destroy")
    dist.all_reduce(ones, group=grid.get_group("tp"), async_op=True)
    if grid.rank == 0:
        comes("rank 0 in destroy")
    commgrid.destroy()
    return ones.item()


def test_a_grid_is_destroyed_while_a_call_connects() -> None:
    """Its addresses went first, and the peer then waited for them as long as the group's timeout.

    So a program did not end whose step had raised between two calls, on all ranks.
    """
    assert run_on_ranks(destroyed_in_a_call, 2, timeout=60) == [2.0, 2.0]


def beside_torchs_own() -> None:
    grid = commgrid.initialize(tp=2)
    other = dist.new_group([0, 1], backend="cpu:gloo")
    dist.all_reduce(torch.ones(1), group=other)
    dist.destroy_process_group(other)
    assert [c.connected for c in grid.communicators] == [
        c.planned.connect for c in grid.communicators
    ]


def test_torchs_own_gloo_groups_are_made_as_ever() -> None:
    run_on_ranks(beside_torchs_own, 2)


def aborted() -> None:
    grid = commgrid.initialize(tp=2, connect="none", timeout=FOREVER)
    dist.barrier()
    if dist.get_rank() == 0:
        until_waits("rank 1")
        grid.abort()
        hear("rank 1 was woken")
    else:
        comes("rank 1")
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), group=grid.get_group("dp_tp"))
        tell("rank 1 was woken")
        grid.abort()


def test_abort_wakes_who_waits_for_a_first_connection() -> None:
    run_on_ranks(aborted, 2, check=False)  # an aborted grid leaves its keys
