"""Live grids on gloo ranks: what the contract says of each call."""

import os
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from threading import Thread
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid import (
    CommGridError,
    GridDestroyedError,
    GridExistsError,
    GridNotInitializedError,
    GridSpec,
    HyperCommGrid,
    NotInGridError,
    NotInGroupError,
    SpecError,
    UnknownGroupError,
)
from commgrid.layout.ranks import RankTuple
from commgrid.runtime import registry
from commgrid.runtime.communicator import Communicator, _Exchange, exchange_ranks
from commgrid.testing import run_on_ranks
from tests.flags import hear, tell
from tests.process_groups import group_count
from tests.sizes import pick

EMBEDDING = {"embedding": {"of": "pp", "pick": ["first", "last"]}}


def total(group: dist.ProcessGroup, value: float) -> float:
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, group=group)
    return float(tensor.item())


def check_sums(grid: HyperCommGrid) -> None:
    """Every communicator has the planned members and sums to the planned number."""
    for communicator in grid.communicators:
        assert tuple(dist.get_process_group_ranks(communicator.group)) == communicator.ranks
        assert total(communicator.group, 2.0**grid.rank) == sum(2.0**r for r in communicator.ranks)


# -- the contract -----------------------------------------------------------------------


def contract() -> None:
    grid = commgrid.initialize(tp=2, pp=4, groups=EMBEDDING)
    rank = dist.get_rank()
    assert grid is commgrid.get_grid()
    assert commgrid.is_initialized()
    assert not commgrid.is_initialized("other")
    assert (grid.rank, grid.world_size, grid.name) == (rank, 8, "default")
    assert grid.shape == {"tp": 2, "cp": 1, "dp": 1, "pp": 4}
    assert grid.coordinate == {"tp": rank % 2, "cp": 0, "dp": 0, "pp": rank // 2}
    assert grid.spec.is_resolved
    assert {"tp", "pp_tp", "embedding"} <= set(grid.group_names)

    assert commgrid.get_group("tp") is grid.get_group("tp")
    assert grid.get_group("tp", "pp") is grid.get_group("pp_tp") is grid.get_group("tp_pp")
    assert grid.get_group("cp", "dp", "tp") is grid.get_group("dp_cp_tp")
    assert grid.get_group("dp_cp_tp") is not grid.get_group("tp")  # whose ranks are the same
    assert grid.get_group() is grid.get_group("pp_dp_cp_tp")
    assert grid.get_group() is not dist.group.WORLD

    assert (grid.size("tp"), grid.size("pp", "tp"), grid.size()) == (2, 8, 8)
    assert grid.get_local_rank("pp") == rank // 2
    assert grid.get_local_rank("pp") == dist.get_rank(grid.get_group("pp"))
    assert grid.get_ranks("tp") == (rank // 2 * 2, rank // 2 * 2 + 1)
    assert grid.get_all_ranks("pp") == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert grid.get_all_ranks("embedding") == ((0, 6), (1, 7))
    assert grid.next_rank("pp") == (rank + 2) % 8
    assert grid.prev_rank("pp") == (rank - 2) % 8
    assert grid.is_first("pp") == (rank < 2)
    assert grid.is_last("pp") == (rank > 5)

    middle = 2 <= rank <= 5
    assert grid.is_member("embedding") is not middle
    if middle:
        with pytest.raises(NotInGroupError, match=r"is not in group 'embedding', which here has"):
            grid.get_group("embedding")
        with pytest.raises(NotInGroupError):
            grid.get_ranks("embedding")
        with pytest.raises(NotInGroupError):
            commgrid.get_group("embedding")
    with pytest.raises(UnknownGroupError, match=r"no group is named 'tpp'; did you mean 'tp'\?"):
        grid.get_group("tpp")
    with pytest.raises(GridExistsError, match="grid 'default' is alive already"):
        commgrid.initialize()

    part = grid.select(pp=2)
    assert part.ranks == (4, 5)
    assert part.shape == {"tp": 2, "cp": 1, "dp": 1}
    assert part.is_member == (rank in (4, 5))
    if part.is_member:
        assert part.get_group("tp") is grid.get_group("tp")
        with pytest.raises(UnknownGroupError, match="runs along an axis that is fixed here"):
            part.get_group("pp_tp")
    else:
        with pytest.raises(NotInGroupError, match="is not in this sub-grid, which has"):
            part.get_group("tp")
    with pytest.raises(SpecError, match="pp=4 is outside axis pp of size 4"):
        grid.select(pp=4)
    with pytest.raises(SpecError, match="no region has all of these axes"):
        grid.select(ep=0)

    report = grid.check()
    assert len(report.rows) == len(grid.communicators)
    assert "all with the planned members" in str(report)
    check_sums(grid)

    grid.destroy()
    grid.destroy()
    for call in (grid.get_group, grid.size, grid.get_local_rank, grid.next_rank, grid.is_member):
        with pytest.raises(GridDestroyedError, match="grid 'default' was destroyed"):
            call("tp")
    with pytest.raises(GridDestroyedError):
        grid.check()
    with pytest.raises(GridNotInitializedError, match="there is no grid 'default'"):
        commgrid.get_group("tp")
    assert not commgrid.is_initialized()
    commgrid.destroy()
    commgrid.destroy("never there")
    assert "destroyed" in repr(grid)
    assert dist.is_initialized()


def test_the_contract() -> None:
    run_on_ranks(contract, 8)


def other_members() -> str:
    """A communicator whose plan has its members in another order than it answers with."""
    grid = commgrid.initialize(tp=2)
    live = next(c for c in grid.communicators if "tp" in c.names)
    wrong = replace(live, planned=replace(live.planned, members=RankTuple((1, 0))))
    with pytest.raises(commgrid.GridMismatchError) as caught:
        exchange_ranks([wrong], lambda: 60.0)
    return str(caught.value)


def test_members_other_than_planned_are_an_error() -> None:
    for said in run_on_ranks(other_members, 2):
        assert "of ranks 1, 0 answered with ranks 0, 1" in said


def test_get_before_initialize() -> None:
    with pytest.raises(GridNotInitializedError, match=r"call commgrid\.initialize\(\) first"):
        commgrid.get_group("tp")
    with pytest.raises(GridNotInitializedError, match=r"commgrid\.initialize starts it"):
        HyperCommGrid(GridSpec.build())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"config": {"axes": {"dp": 1}}, "tp": 2}, r"tp=2 beside config=: the config describes"),
        ({"config": {"axes": {"dp": 1}}, "order": "dp-tp-cp-pp"}, r"order='dp-tp-cp-pp' beside"),
        ({"config": {"axes": {"dp": 1}}, "groups": {}}, r"groups=\{\} beside config"),
        ({"config": {"axes": {"dp": 1}}, "dp_shard": 2}, r"dp_shard=2 beside config"),
        ({"config": "nowhere.yaml"}, r"nowhere\.yaml: there is no such file"),
        ({"tp": 2}, r"tp=2 · cp=1 · pp=1 = 2 does not divide 1 ranks"),
        ({"timout": 3}, r"timout=3: neither an argument .*did you mean 'timeout'\?"),
        ({"startup_timeout": None}, r"startup_timeout=None: expected seconds above 0"),
        ({"startup_timeout": float("inf")}, r"startup_timeout=inf: expected seconds"),
        ({"timeout": -1}, r"timeout=-1: expected seconds above 0"),
        ({"startup_timeout": "60"}, r"startup_timeout='60': expected seconds"),
    ],
)
def test_bad_arguments_leave_nothing_behind(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(CommGridError, match=said):
        commgrid.initialize(**arguments)
    assert not dist.is_initialized()
    assert not commgrid.is_initialized()


# -- ways to be started -----------------------------------------------------------------


def started(world: int) -> str:
    grid = commgrid.initialize(tp=2)
    check_sums(grid)
    assert grid.world_size == dist.get_world_size() == world
    assert grid.communicators[0].backend == "gloo"
    commgrid.destroy()
    assert dist.is_initialized()  # destroy leaves torch.distributed up, and it is used again
    check_sums(commgrid.initialize(tp=1))
    commgrid.shutdown()
    assert not dist.is_initialized()
    check_sums(commgrid.initialize(tp=2, name="after"))  # and a kept store starts it once more
    return "done"


@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_started_by_a_launcher(launcher: str) -> None:
    assert run_on_ranks(started, 4, 4, backend=None, launcher=launcher) == ["done"] * 4


def test_bare_process_is_a_world_of_one() -> None:
    def alone() -> None:
        grid = commgrid.initialize()
        assert (grid.world_size, grid.get_ranks("dp_cp")) == (1, (0,))
        assert grid.next_rank("pp") == grid.prev_rank("pp") == 0
        assert grid.check().rows

    run_on_ranks(alone, 1, backend=None)


def test_user_started_world_of_its_own_backend() -> None:
    def on_top() -> None:
        grid = commgrid.initialize(tp=2)
        check_sums(grid)
        commgrid.shutdown()
        assert dist.is_initialized()  # the user's, not ours to end

    for backend in ("cpu:gloo", "undefined"):  # the latter is what no backend= at all becomes
        run_on_ranks(on_top, 4, backend=backend)


def fake_world(world: int, rank: int) -> int:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    grid = commgrid.initialize(tp=8, pp=4, cp=2, ep=8, etp=1, groups={"dp": {"backend": "nccl"}})
    again = commgrid.initialize(tp=8, name="again")
    assert grid.get_group("tp") is not again.get_group("tp")
    assert grid.get_ranks("tp") == tuple(dist.get_process_group_ranks(grid.get_group("tp")))
    assert {c.backend for c in grid.communicators} == {"fake"}
    assert not any(c.connected for c in grid.communicators)
    grid.check()
    count = len(grid.communicators)
    commgrid.destroy()
    dist.destroy_process_group()
    return count


def test_one_process_stands_for_a_large_world() -> None:
    assert run_on_ranks(fake_world, 1, 1024, 777, backend=None) == [29]


# -- several grids ----------------------------------------------------------------------


def side_by_side() -> None:
    rank = dist.get_rank()
    mine = "low" if rank < 4 else "high"
    ranks = range(4) if rank < 4 else range(4, 8)
    grid = commgrid.initialize(tp=2, ranks=ranks, name=mine)
    whole = commgrid.initialize(pp=4, groups=EMBEDDING, name="whole")
    assert grid.get_ranks() == tuple(ranks)
    assert whole.get_group("tp") is not grid.get_group("tp")
    assert commgrid.get_group("tp", grid=mine) is grid.get_group("tp")
    for each in (grid, whole, whole, grid):
        check_sums(each)
    with pytest.raises(GridNotInitializedError, match=r"there is no grid 'default'.*alive: "):
        commgrid.get_grid()
    if rank % 2 == 0:
        every_other = commgrid.initialize(tp=2, ranks=range(0, 8, 2), name="even")
        assert every_other.get_ranks("tp") in ((0, 2), (4, 6))
        check_sums(every_other)
    else:
        with pytest.raises(NotInGridError, match=rf"rank {rank} is not in this grid, which covers"):
            commgrid.initialize(tp=2, ranks=range(0, 8, 2), name="even")
    commgrid.destroy("whole")
    check_sums(grid)


def test_several_grids_live_side_by_side() -> None:
    run_on_ranks(side_by_side, 8)


def same_name() -> None:
    """Grids on separate ranks may even have one name: they never meet."""
    low = (dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])) < 4
    for _ in range(3):
        grid = commgrid.initialize(tp=2 if low else 4, ranks=range(4) if low else range(4, 8))
        check_sums(grid)
        commgrid.destroy()


def test_grids_on_separate_ranks_may_share_a_name() -> None:
    run_on_ranks(same_name, 8)


def test_two_grids_that_together_start_torch_distributed() -> None:
    run_on_ranks(same_name, 8, backend=None, launcher="torchrun")


def test_a_rank_outside_the_grid_is_told() -> None:
    def outside() -> None:
        dist.barrier()  # whoever leaves at once must not leave while others still connect
        if dist.get_rank() == 3:
            with pytest.raises(
                NotInGridError, match=r"rank 3 is not in this grid.*ranks alone: initialize\(…\) if"
            ):
                commgrid.initialize(ranks=range(3))

    run_on_ranks(outside, 4)


def test_spare_ranks_get_none_and_may_make_grids_of_their_own() -> None:
    """Where commgrid starts torch.distributed: rank 3 calls as all do, rank 4 only joins."""

    def spare(rank: int) -> None:
        if rank == 4:
            commgrid.join()
            assert dist.get_world_size() == 5
            commgrid.join()  # nothing left to do
            return
        grid: Any = commgrid.initialize(ranks=(2, 0, 1))
        if rank < 3:
            assert grid.get_ranks() == (2, 0, 1)
            assert grid.get_local_rank() == (1, 2, 0)[rank]
            check_sums(grid)
            return
        assert grid is None
        assert not commgrid.is_initialized()
        own = commgrid.initialize(ranks=[3])
        assert own.get_ranks() == (3,)

    ranks = [(rank,) for rank in range(5)]
    run_on_ranks(spare, 5, per_rank=ranks, backend=None, launcher="torchrun")


def by_threads(cycles: int) -> None:
    """Eight grids, over all ranks and some, started by four threads at once."""
    rank, failed = int(os.environ["RANK"]), []

    def start(thread: int, cycle: int) -> None:
        try:
            for which in (0, 1):
                ranks = None if (thread + which) % 2 else (range(2) if rank < 2 else range(2, 4))
                name = f"{thread}.{which}"
                grid = commgrid.initialize(tp=2, ranks=ranks, name=name, startup_timeout=60)
                for communicator in grid.communicators:
                    mine = torch.tensor([float(rank + 10 * thread)])
                    dist.all_reduce(mine, group=communicator.group)
                    assert mine.item() == sum(r + 10 * thread for r in communicator.ranks)
                if which:
                    commgrid.destroy(name)
        except BaseException:
            failed.append(traceback.format_exc())

    for cycle in range(cycles):
        threads = [Thread(target=start, args=(thread, cycle)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed, "\n".join(failed)
        assert len(registry.live_grids()) == 4
        commgrid.destroy()


@pytest.mark.full
def test_threads_start_grids_at_once() -> None:
    cycles = pick(5, 5, 20)
    run_on_ranks(by_threads, 4, cycles, backend=None, launcher="torchrun", timeout=300)


def test_two_threads_and_one_name() -> None:
    """One starts it, the other is told; nothing of it stays."""

    def both() -> None:
        outcomes: list[str] = []
        groups = group_count()

        def start() -> None:
            try:
                commgrid.initialize(tp=2)
                outcomes.append("started")
            except GridExistsError as error:
                outcomes.append(str(error))

        threads = [Thread(target=start) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(said[:7] for said in outcomes) == ["grid 'd", "started"]
        commgrid.destroy()
        assert group_count() == groups

    run_on_ranks(both, 2)


def test_a_spec_can_carry_its_ranks() -> None:
    def from_config() -> None:
        spec = GridSpec.build(tp=2, ranks=range(2, 6))
        if dist.get_rank() in spec.resolve(8).grid_ranks:
            grid = commgrid.initialize(config=spec.to_dict())
            assert grid.get_ranks() == (2, 3, 4, 5)
            check_sums(grid)
            commgrid.destroy()
        if dist.get_rank() < 4:
            check_sums(commgrid.initialize(config=GridSpec.build(tp=2), ranks=range(4)))

    run_on_ranks(from_config, 6)


# -- communicators ----------------------------------------------------------------------


def options() -> None:
    groups = {
        "dp": {"timeout": 7},
        "slow": {"of": "tp", "timeout": 1000},
        "ag": {"of": "dp", "own": True},
    }
    grid = commgrid.initialize(tp=2, groups=groups, timeout=timedelta(seconds=90))
    seconds = {}
    for communicator in grid.communicators:
        backend = communicator.group._get_backend(torch.device("cpu"))
        assert backend.options._timeout == {
            7.0: timedelta(seconds=7), 1000.0: timedelta(seconds=1000), None: timedelta(seconds=90),
        }[communicator.options.timeout]  # fmt: skip
        assert communicator.group.group_desc == ",".join(communicator.names)
        assert communicator.seconds_to_create > 0
        seconds[communicator.names[0]] = communicator.seconds_to_connect
        assert communicator.connected == communicator.planned.connect
    assert seconds["dp"] is not None
    assert seconds["dp_tp"] is None
    grid.check()
    assert all(c.connected for c in grid.communicators if len(c.ranks) > 1)
    assert grid.get_group("ag") is not grid.get_group("dp")
    by_name = {name: c for c in grid.communicators for name in c.names}
    assert by_name["ag"].options.timeout == 7.0  # inherited from what it is made of
    world = dist.group.WORLD
    assert world is not None
    assert world._get_backend(torch.device("cpu")).options._timeout == timedelta(minutes=30)


def connects_late() -> dict[str, float | None]:
    """Rank 1 comes to the communicator of tp a second after dp's has connected on rank 0."""
    start = _Exchange.start

    def late(communicator: Communicator) -> _Exchange:
        rank, name = dist.get_rank(), communicator.names[0]
        if (rank, name) == (1, "tp"):
            hear("dp has connected")
            time.sleep(1.0)  # a slow rank
        made = start(communicator)
        if (rank, name) == (0, "dp"):
            made.parts[0][1].work.wait()
            tell("dp has connected")
        return made

    with mock.patch.object(_Exchange, "start", late):
        grid = commgrid.initialize(tp=2, connect=["tp", "dp"])
    return {name: c.seconds_to_connect for c in grid.communicators for name in c.names}


def test_the_seconds_to_connect_are_a_communicators_own() -> None:
    """A wait for another communicator was counted too."""
    found = run_on_ranks(connects_late, 4)[0]
    assert found["tp"] - found["dp"] > 0.9  # the second of the slow rank, on any machine


def test_options_reach_torch_and_world_keeps_its_own() -> None:
    run_on_ranks(options, 4)


def test_an_unknown_backend_is_named() -> None:
    def wrong() -> None:
        with pytest.raises(SpecError, match=r"backend='glo': there is no .*did you mean 'gloo'\?"):
            commgrid.initialize(backend="glo")
        for backend in ("mpi", "fake", "gpu:gloo", "cpu:gloo,cpu:gloo"):
            with pytest.raises(SpecError, match=rf"backend='{backend}': "):
                commgrid.initialize(backend=backend)
        with pytest.raises(SpecError, match=r"groups\.dp\.backend='nccl': .*use gloo"):
            commgrid.initialize(groups={"dp": {"backend": "nccl"}})
        assert not commgrid.is_initialized()
        check_sums(commgrid.initialize())

    run_on_ranks(wrong, 2)


def bound() -> None:
    """WORLD bound to a device: torch's helpers would split it, which all ranks must join."""
    world = dist.group.WORLD
    assert world is not None
    device = torch.device("cuda", 0)
    world.bound_device_id = device
    grid = commgrid.initialize(pp=4, groups=EMBEDDING)
    assert world.bound_device_id == device
    check_sums(grid)


def test_world_bound_to_a_device() -> None:
    run_on_ranks(bound, 4)


def test_hsdp_live() -> None:
    def hsdp() -> None:
        grid = commgrid.initialize(tp=2, dp_replicate=2)
        check_sums(grid)
        assert grid.get_group("dp") is grid.get_group("dp_shard", "dp_replicate")
        assert grid.size("dp") == 4
        for dp in range(4):
            assert grid.select(dp=dp).ranks == (2 * dp, 2 * dp + 1)
        assert grid.select(dp_shard=1).ranks == (2, 3, 6, 7)
        part = grid.select(tp=0)
        if part.is_member:
            assert part.get_group("dp") is grid.get_group("dp")
            assert part.get_group() is grid.get_group("pp_dp_cp")

    run_on_ranks(hsdp, 8)


def test_only_what_create_lists_exists() -> None:
    def some() -> None:
        grid = commgrid.initialize(tp=2, create=["dp_cp", "tp"], connect=["tp"])
        assert set(grid.group_names) == {"tp", "dp_cp"}
        assert grid.size("dp") == 2  # arithmetic knows every name
        for call in (grid.get_group, grid.is_member):
            with pytest.raises(UnknownGroupError, match="was not created; add it to create="):
                call("dp")
        check_sums(grid)

    run_on_ranks(some, 4)


def test_share_all_holds_one_communicator_a_rank_set() -> None:
    def shared() -> None:
        grid = commgrid.initialize(tp=2, pp=2, ep=2, share="all", groups=EMBEDDING)
        assert grid.get_group("embedding") is grid.get_group("pp")
        ranks = [c.ranks for c in grid.communicators]
        assert len(ranks) == len(set(ranks))
        check_sums(grid)

    run_on_ranks(shared, 8)


def test_two_names_at_once_in_opposite_order() -> None:
    """Equal-shaped asynchronous sums in opposite order are right on separate communicators."""

    def crossed() -> None:
        grid = commgrid.initialize(tp=2, ep=2, etp=1)
        first, second = ("tp", "ep") if grid.rank == 0 else ("ep", "tp")
        values = {"tp": 1.0 + grid.rank, "ep": 100.0 + 100 * grid.rank}
        tensors = {name: torch.tensor([value]) for name, value in values.items()}
        assert grid.get_ranks("tp") == grid.get_ranks("ep")
        works = [
            dist.all_reduce(tensors[name], group=grid.get_group(name), async_op=True)
            for name in (first, second)
        ]
        for work in works:
            assert work is not None
            work.wait()
        assert (tensors["tp"].item(), tensors["ep"].item()) == (3.0, 300.0)

    run_on_ranks(crossed, 2)


def checks_without_one() -> str:
    grid = commgrid.initialize(tp=2)
    if grid.rank == 3:
        return ""
    with pytest.raises(commgrid.PeerTimeoutError) as told:
        grid.check(timeout=2.0)
    return str(told.value)


def test_check_names_the_rank_that_does_not_come() -> None:
    *told, silent = run_on_ranks(checks_without_one, 4, check=False)
    assert silent == ""
    for message in told:
        assert message.endswith("; rank 3 did not come to grid.check"), message
