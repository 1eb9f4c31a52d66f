"""Transfers between two programs, each with its own torch.distributed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import commgrid
from commgrid.launching.process import free_port
from tests.transfer.programs import PEERS, World, both, said, started

VERSIONS = 3


def moves(world: World, name: str = "default") -> dict[str, Any]:
    """Several versions, and what each program sees of its own world meanwhile."""
    found: dict[str, Any] = {}
    transfer = world.meet(name=name)
    found["plan"] = transfer.plan.sent
    for version in range(1, VERSIONS):
        if world.name == "trainer":
            world.fill(version)
        transfer.run(verify=version == 2)
        assert world.holds(version), (world.name, world.rank, version)
    mine = torch.tensor([float(world.rank)])
    size = world.grid.size("tp")
    assert (dist.get_rank(), dist.get_world_size()) == (world.rank, size)
    dist.all_reduce(mine)
    found["own"] = mine.item()
    assert dist.get_process_group_ranks(dist.group.WORLD) == list(range(size))
    transfer.close()
    return found


@pytest.mark.parametrize("sizes", [(2, 2), pytest.param((3, 4), marks=pytest.mark.full)])
def test_programs_with_equal_ranks_are_not_confused(sizes: tuple[int, int]) -> None:
    trainers, engines = both(moves, moves, sizes)
    for found, size in ((trainers, sizes[0]), (engines, sizes[1])):
        assert [each["own"] for each in found] == [sum(range(size))] * size
        assert all(each["plan"] == trainers[0]["plan"] for each in found)
    assert sorted(trainers[0]["plan"]) == list(range(sizes[0]))


def records(world: World) -> list[tuple[str, tuple[int, ...]]]:
    """The recorded calls, of a program's own and of those with the other one."""
    commgrid.trace.start()
    moves(world)
    calls = commgrid.trace.recorded().calls
    commgrid.trace.stop()
    return [(call.operation, call.group.ranks) for call in calls]


@pytest.mark.full
@pytest.mark.parametrize("verify", [None, "order"])
def test_records_name_no_rank_of_another_program(verify: str | None) -> None:
    for found in both(records, records, (2, 3), grid={"verify": verify}):
        own = tuple(range(len(found)))
        assert found == [[("all_reduce", own)]] * len(found)


def looks_up(world: World) -> bool:
    """Whether torch has a group of ranks 0 and 1, as DTensor looks for one, beside one of both."""
    transfer = world.meet() if world.grid is not None else None
    found = c10d._find_pg_by_ranks_and_tag("", [0, 1])
    if transfer is not None:
        assert dist.get_process_group_ranks(transfer._group) == [0, 1]
        transfer.close()
    return found is not None


@pytest.mark.full
def test_torch_finds_no_group_of_both_programs_by_its_ranks() -> None:
    for found in both(looks_up, looks_up, (1, 1), grid={"ranks": [0]}, ranks=3):
        assert found == [False] * 3


def meets_again(world: World) -> int:
    """Close and meet again, also under another name; the keys left at the store of both."""
    for again in range(3):
        transfer = world.meet(name=f"round {again % 2}")
        transfer.run()
        transfer.close()
    dist.barrier()
    if world.rank == 0:
        world.store.set(f"{world.name} is done", "")
        world.store.wait([f"{other} is done" for other in PEERS])
        return sorted(world.store.list_keys())
    return 0


def test_nothing_is_left_at_the_store() -> None:
    trainers, engines = both(meets_again, meets_again)
    own = ["engine is done", "trainer is done"]
    assert (trainers[0], engines[0]) == (own, own)


def never_comes(world: World) -> str:
    return said(lambda: world.meet(timeout=1.5))


def test_a_program_that_never_comes_is_named() -> None:
    port = free_port()
    with started(never_comes, "trainer", 2, port) as ranks:
        texts = ranks.results()
    for text in texts:
        assert text.startswith(
            "PeerTimeoutError: transfer 'default': no engine has come to meet this program at a "
            f"store at 127.0.0.1:{port} within timeout; is its first rank running"
        ), texts


def differs(world: World) -> str:
    return said(lambda: world.meet(max_bytes=64 if world.name == "trainer" else 128))


def test_arguments_that_differ_between_programs_are_named() -> None:
    trainers, engines = both(differs, differs, (2, 1))
    for text in (*trainers, *engines):
        assert (
            "GridMismatchError: transfer 'default': ranks disagree: max_bytes is 128 on rank 2 "
            "and 64 on ranks 0-1" in text
        )
        assert text.endswith("(ranks 0-1 are trainer's ranks 0-1 and rank 2 is engine's rank 0)")
