"""Transfers between two programs, each with its own torch.distributed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import commgrid
from commgrid.grid_pairs import pairing
from commgrid.launching.process import free_port
from commgrid.torch_compat import world as torch_world
from commgrid.version import VERSION
from tests.transfer.programs import World, both, said, started

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


def meets_again(world: World) -> list[str]:
    """Close and meet again, also under another name; the keys left at the store of both."""
    for again in range(3):
        transfer = world.meet(name=f"round {again % 2}")
        transfer.run()
        transfer.close()
    world.await_other()
    return sorted(world.store.list_keys()) if world.rank == 0 else []


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


def over_a_file(world: World, file: str) -> bool:
    served, world.store = world.store, dist.FileStore(file)
    moves(world)
    del served
    return True


@pytest.mark.full
def test_programs_meet_at_a_file(tmp_path: Path) -> None:
    for found in both(over_a_file, over_a_file, (2, 2), str(tmp_path / "store")):
        assert found == [True, True]


def of_another_version(world: World) -> str:
    if world.name == "engine":
        pairing.VERSION = "0.0"  # type: ignore[attr-defined]
    told = said(world.meet)
    world.await_other()
    return told


@pytest.mark.full
def test_programs_of_two_versions_are_refused() -> None:
    trainers, engines = both(of_another_version, of_another_version)
    for text in (*trainers, *engines):
        assert text.startswith(
            "GridMismatchError: transfer 'default': ranks disagree: commgrid is "
        )
        assert f"'{VERSION}' on ranks 0-1" in text
        assert "'0.0' on ranks 2-3" in text


def on_other_backends(world: World, kinds: tuple[str, ...]) -> str:
    if world.name == "engine":
        torch_world.world_kinds = lambda: kinds  # type: ignore[assignment]
    told = said(lambda: moves(world))
    world.await_other()
    return told


@pytest.mark.full
def test_programs_talk_over_the_backend_that_both_have() -> None:
    for found in both(on_other_backends, on_other_backends, (2, 2), ("cuda:nccl 2.3", "cpu:gloo")):
        assert found == ["", ""]
    for found in both(on_other_backends, on_other_backends, (2, 2), ("cuda:nccl 2.3",)):
        for text in found:
            assert "ranks disagree: backend is 'cpu:gloo, cuda:gloo' on ranks 0-1 and " in text
            assert "'cuda:nccl 2.3' on ranks 2-3" in text


def is_one_of_two(world: World, number: int) -> str:
    """Trainer 0; engine 1, beside which engine 2 comes under the same name."""
    flag = "engine 1 was told"
    if number == 0:
        world.store.wait([flag])
    elif number == 2:
        world.store.wait(["commgrid/transfer/default/target"])
    told = said(lambda: moves(world))
    dist.barrier()
    if world.rank == 0:
        world.store.set(flag if number == 1 else f"{number} is done", "")
    if number == 0:
        world.store.wait(["2 is done"])
    return told


@pytest.mark.full
def test_two_living_engines_of_one_name_are_told() -> None:
    port = free_port()
    with (
        started(is_one_of_two, "trainer", 2, port, 0) as trainer,
        started(is_one_of_two, "engine", 2, port, 1) as first,
        started(is_one_of_two, "engine", 2, port, 2) as second,
    ):
        for text in first.results():
            assert "another program has come to a store at 127.0.0.1" in text
            assert (
                "as its target, while this one waited; give each pair of programs a name=" in text
            )
        assert second.results() == ["", ""]
        assert trainer.results() == ["", ""]


def names_differ(world: World) -> str:
    model = torch.nn.Linear(2, 2) if world.name == "trainer" else torch.nn.Linear(2, 2, bias=False)
    return said(lambda: world.meet(model))


@pytest.mark.full
def test_a_tensor_that_one_program_lacks_is_named_on_both() -> None:
    for found in both(names_differ, names_differ, (2, 1)):
        for text in found:
            assert "TransferError: nothing was moved: " in text
            assert "bias on ranks 0-1 of the source is on no rank of the target" in text
            assert text.endswith(
                "(ranks 0-1 are trainer's ranks 0-1 and rank 2 is engine's rank 0)"
            )
