"""Ranks are killed, and the others make the same named grid over whoever is left."""

import json
import os
import threading
from typing import Any

import pytest
import torch

import commgrid
from commgrid import PeerFailedError, PeerTimeoutError
from commgrid.collectives import all_reduce
from commgrid.planning.spec import GridSpec
from commgrid.runtime import registry
from commgrid.runtime.named_failures import named_failures
from commgrid.runtime.rebuild import _Rebuild
from commgrid.testing import run_on_ranks
from commgrid.torch_compat import gloo_departure as torch_leaving
from commgrid.torch_compat import world as torch_world
from commgrid.torch_compat.gloo import break_connections
from commgrid.torch_compat.world import world_store
from tests.flags import hear, meet, tell
from tests.killing import KILLED, kill_me, run_killable
from tests.sizes import full
from tests.waiting import comes, until_waits


def use(grid: commgrid.HyperCommGrid) -> None:
    """Every communicator has the members that it should, by a sum of their ranks."""
    for each in grid.communicators:
        total = all_reduce(torch.tensor([grid.rank + 1]), each.group)
        assert int(total) == sum(rank + 1 for rank in each.ranks), each.describe()


def fail_and_rebuild(
    grid: commgrid.HyperCommGrid, victims: list[int], **how: Any
) -> commgrid.HyperCommGrid | None:
    """The victims are killed between two sums; the others rebuild."""
    try:
        with named_failures(grid):
            for _ in range(20):
                use(grid)
                if grid.rank in victims:
                    kill_me()
            raise AssertionError("nobody noticed")
    except (PeerFailedError, PeerTimeoutError):
        pass
    return commgrid.rebuild(**{"grace": 3.0, **how})


def survive(victims: list[list[int]], sizes: dict[str, Any], **how: Any) -> list[Any]:
    """One failure after the other; what the grid was after each."""
    grid: commgrid.HyperCommGrid | None = commgrid.initialize(**sizes)
    found = []
    for who in victims:
        # Without a grid it is a spare rank.
        grid = commgrid.rebuild() if grid is None else fail_and_rebuild(grid, who, **how)
        if grid is None:
            found.append(None)
            break
        assert commgrid.get_grid() is grid
        use(grid)
        grid.check()
        assert grid.rebuilt is not None
        found.append((tuple(grid.spec.grid_ranks), grid.rebuilt.gone, grid.rebuilt.spares))
    commgrid.shutdown()
    return found


def some_go_on() -> list[int] | None:
    """All ranks give the same list, also the one that is not in it."""
    commgrid.initialize()
    grid = commgrid.rebuild(ranks=[0, 2])
    if grid is not None:
        use(grid)
    commgrid.shutdown()
    return None if grid is None else list(grid.spec.grid_ranks)


@pytest.mark.full
def test_who_is_not_in_the_list_waits_for_a_place() -> None:
    assert run_on_ranks(some_go_on, 3, check=False) == [[0, 2], None, [0, 2]]


def nobody_in_the_list() -> str:
    """The list is taken for that of the ranks which are gone."""
    grid = commgrid.initialize()
    said = ""
    if grid.rank < 2:
        with pytest.raises(PeerTimeoutError) as error:
            commgrid.rebuild(ranks=[2], timeout=2.0)
        said = str(error.value)
    meet(grid.rank, 3)
    commgrid.shutdown()
    return said


@pytest.mark.full
def test_who_is_not_in_the_list_does_not_wait_for_ever() -> None:
    for said in run_on_ranks(nobody_in_the_list, 3, check=False)[:2]:
        assert said.startswith("rebuild of grid 'default': rank 2 did not come within timeout")


@pytest.mark.parametrize("victim", [0, 1, 3] if full() else [0])
def test_one_of_four_is_killed(victim: int) -> None:
    """The first serves the store, which the others find elsewhere."""
    results = run_killable(survive, 4, [[victim]], {"tp": 2})
    assert results[victim] == KILLED
    partner = victim ^ 1
    left = tuple(sorted({0, 1, 2, 3} - {victim, partner}))
    for rank, found in enumerate(results):
        if rank in left:
            assert found == [(left, (victim,), (partner,))]
    assert results[partner] == [None]  # it waited for a place until the others had ended


@pytest.mark.full
def test_the_store_goes_twice() -> None:
    """Rank 0 serves the first store, rank 1 the one after it; both are killed, one by one."""
    results = run_killable(survive, 4, [[0], [1]], {})
    assert results[:2] == [KILLED, KILLED]
    for found in results[2:]:
        assert [each[:2] for each in found] == [((1, 2, 3), (0,)), ((2, 3), (0, 1))]


def watched(victims: list[list[int]]) -> list[Any]:
    return survive(victims, {"watch": True}, grace=1000.0, timeout=2000.0)


def test_who_is_seen_to_end_is_not_waited_for() -> None:
    """The second rebuild knows of the first one's, too; the grace is longer than a test lasts."""
    results = run_killable(watched, 5, [[3], [0]])
    assert (results[0], results[3]) == (KILLED, KILLED)
    for rank in (1, 2, 4):
        assert [each[:2] for each in results[rank]] == [((0, 1, 2, 4), (3,)), ((1, 2, 4), (0, 3))]


def of_three_and_a_spare(kind: str) -> list[Any]:
    """Four ranks, the last of which has no place until one is killed."""
    if os.environ["RANK"] == "3" and kind == "join":
        commgrid.join()
        grid = None
    else:
        grid = commgrid.initialize(ranks=[0, 1, 2])
    grid = commgrid.rebuild() if grid is None else fail_and_rebuild(grid, [1])
    assert grid is not None
    use(grid)
    ranks = tuple(grid.spec.grid_ranks)
    commgrid.shutdown()
    return [ranks]


@pytest.mark.parametrize("kind", ["ranks", "join"] if full() else ["join"])
def test_a_spare_takes_the_place(kind: str) -> None:
    results = run_killable(of_three_and_a_spare, 4, kind)
    assert results == [[(0, 3, 2)], KILLED, [(0, 3, 2)], [(0, 3, 2)]]


def spare_until_the_end() -> object:
    grid = commgrid.initialize(ranks=[0, 1])
    if grid is None:
        comes("the spare")
        return commgrid.rebuild()
    use(grid)
    until_waits("the spare")
    commgrid.shutdown()
    return "done"


def test_a_spare_that_nobody_needs_learns_of_the_end() -> None:
    assert run_killable(spare_until_the_end, 3) == ["done", "done", None]


def aborts_slowly() -> tuple[int, ...]:
    """Rank 1 still leaves its groups when rank 0 has done so."""
    grid = commgrid.initialize(tp=2)
    leave = torch_leaving.leave

    def slowly(*how: Any) -> None:
        until_waits("rank 0")
        leave(*how)

    if grid.rank == 1:
        torch_leaving.leave = slowly
    else:
        comes("rank 0")
    again = commgrid.rebuild()
    assert again is not None
    use(again)
    found = again.get_ranks("tp")
    commgrid.shutdown()
    return found


def test_a_rank_may_abort_later_than_others_call() -> None:
    assert run_killable(aborts_slowly, 2) == [(0, 1), (0, 1)]


def everything_at_once() -> dict[str, Any]:
    """What goes wrong in words, in one start: strict ranks, too few, late ranks, other sizes."""
    grid = commgrid.initialize(tp=2)
    rank, said = grid.rank, {}
    grid.abort()

    def refused(key: str, **how: Any) -> None:
        try:
            commgrid.rebuild(**how)
            said[key] = "rebuilt"
        except commgrid.CommGridError as error:
            said[key] = f"{type(error).__name__}: {error}"

    if rank != 3:
        refused("absent", ranks=[0, 1, 2, 3], timeout=2)
    if rank == 0:
        refused("few", grace=0.2)
    world_store().set(f"met/{rank}", "")
    world_store().wait([f"met/{each}" for each in range(4)])
    refused("fits", fits=lambda sizes: False)
    if rank in (0, 1):
        refused("two", ranks=[0, 1])
        world_store().set(f"two/{rank}", "")
    else:
        world_store().wait(["two/0", "two/1"])
        refused("late", grace=0.2)
    commgrid.shutdown()
    return said


@pytest.mark.nightly  # ranks 2 and 3 may miss keys set just before rank 0, which serves them, ends
def test_what_is_refused() -> None:
    first, _, third, last = run_killable(everything_at_once, 4)
    assert first["absent"].startswith(
        "PeerTimeoutError: rebuild of grid 'default': rank 3 did not come within timeout (ranks 0-2"
    )
    assert "only rank 0 of its 4 ranks came, and 2 are needed" in first["few"]
    assert first["few"].startswith("PeerFailedError")
    for each in (first, third, last):
        assert each["fits"].startswith("SpecError: rebuild of grid 'default': no grid fits")
    assert first["two"] == "rebuilt"
    assert third["late"].startswith("LateError: rebuild of grid 'default': rank 2 came too")


@pytest.mark.parametrize(
    ("here", "unsure", "needed"), [(2, False, None), (1, False, 2), (2, True, 3), (3, True, None)]
)
def test_half_go_on_only_where_the_others_cannot(
    here: int, unsure: bool, needed: int | None
) -> None:
    """Of 4 ranks; where the store was out of reach, the other half may be going on as well."""
    given = GridSpec.build()
    last = given.resolve(4)
    made = registry.Made(given, last.shape, last, "", None, None)
    call = _Rebuild("default", None, 1.0, None, None, 1.0)
    said = {"address": "", "server": None, "unsure": False}
    texts = [json.dumps({**said, "unsure": unsure and rank == 0}) for rank in range(here)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_world, "world_size", lambda: 4)
        verdict = call._conclude(made, list(range(here)), texts)
    if needed is None:
        assert verdict["spec"]["axes"]["dp"] == here
    else:
        assert f"of its 4 ranks came, and {needed} are needed" in verdict["refused"]


def nothing_is_left() -> dict[str, tuple[int, int]]:
    """Files and threads after some rebuilds without a death, and keys of the store."""
    grid = commgrid.initialize(tp=2)
    rank = grid.rank
    found = []
    for _ in range(6):
        grid.abort()
        rebuilt = commgrid.rebuild()
        assert rebuilt is not None
        grid = rebuilt
        use(grid)
        torch.distributed.barrier(grid.get_group("dp", "tp"))
        files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        found.append((files, threads, registry._registry.store.num_keys()))
        torch.distributed.barrier(grid.get_group("dp", "tp"))
    commgrid.shutdown()
    return {"rank": rank, "found": found}


def test_nothing_is_left_behind() -> None:
    for each in run_killable(nothing_is_left, 4):
        (_, *_, before), (_, *_, after) = each["found"][2], each["found"][5]
        assert after <= before + 3, each
        for what in (0, 1):
            assert each["found"][5][what] <= each["found"][2][what] + 2, each


def test_a_bad_argument() -> None:
    with pytest.raises(commgrid.GridNotInitializedError, match="rebuild: torch"):
        commgrid.rebuild()
    with pytest.raises(commgrid.SpecError, match=r"at_least=0: expected a whole number from 1 on"):
        commgrid.rebuild(at_least=0)
    with pytest.raises(commgrid.SpecError, match=r"grace=0: expected seconds above 0"):
        commgrid.rebuild(grace=0)


def waits_for_the_first(dead: int) -> None:
    """Rank 0 breaks its connections while the next rank is dead; the others wait for it.

    They learn of it while rank 0 lives, which ends only when they have told.
    """
    grid = commgrid.initialize(connect="all")
    group = grid.get_group("dp")
    others = [f"rank {rank}" for rank in (2, 3)]
    if grid.rank == dead:
        until_waits(*others)
        kill_me()
    if grid.rank == 0:
        until_waits(*others)
        hear_of_death(group, dead)
        break_connections(group)
        hear(*others)
        return
    comes(f"rank {grid.rank}")
    with pytest.raises(RuntimeError, match=r"Connection (closed|reset) by peer"):
        torch.distributed.recv(torch.ones(1), 0, group=group)
    tell(f"rank {grid.rank}")


def hear_of_death(group: torch.distributed.ProcessGroup, dead: int) -> None:
    with pytest.raises(RuntimeError, match=r"Connection (closed|reset) by peer"):
        torch.distributed.recv(torch.ones(1), dead, group=group)


@pytest.mark.full
def test_a_dead_neighbour_keeps_no_connection_open() -> None:
    """gloo closed nothing where the rank that was asked first was the one that is gone."""
    assert run_killable(waits_for_the_first, 4, 1) == [None, KILLED, None, None]
