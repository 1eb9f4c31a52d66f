"""Communicators that are given up and taken up again: what goes, what comes back, who is told."""

import math
import os
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import commgrid
from commgrid import (
    CommGridError,
    GridDestroyedError,
    GridMismatchError,
    GroupSuspendedError,
    HyperCommGrid,
    PeerFailedError,
    PeerTimeoutError,
    UnknownGroupError,
)
from commgrid.collectives import all_reduce
from commgrid.collectives.objects import gathered
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.pipeline import Pipeline
from commgrid.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from commgrid.testing import RanksFailed, run_on_ranks
from commgrid.torch_compat import ended_groups
from commgrid.torch_compat import groups as torch_groups
from commgrid.torch_compat import nccl as torch_nccl
from commgrid.torch_compat import suspended_groups as torch_suspend
from tests.flags import hear, tell
from tests.process_groups import group_count
from tests.runtime.test_leaks import usage
from tests.sizes import pick
from tests.waiting import until

CYCLES, SETTLING = pick((20, 2), (20, 2), (200, 10))
LIMIT = 2.0  # seconds for one that does not come


def summed(group: dist.ProcessGroup) -> float:
    tensor = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def check_sums(grid: HyperCommGrid) -> None:
    """Every communicator adds up its own members, found by name and by handle."""
    for communicator in grid.communicators:
        expected = sum(rank + 1 for rank in communicator.ranks)
        assert summed(communicator.group) == expected
        for name in communicator.names:
            assert grid.get_group(name) is communicator.group
            assert summed(commgrid.get_group(name)) == expected


def message(call: Callable[[], object], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


# -- what goes and comes back ---------------------------------------------------------------


def cycling(cycles: int) -> list[list[tuple[int, int, float]]]:
    bare = usage()
    grid = commgrid.initialize(tp=2, dp=2, create=["tp", "dp", "dp_tp"], connect="all")
    up, down, again = usage(), [], []
    for done in range(SETTLING + cycles):
        grid.suspend()
        if done >= SETTLING:
            down.append(usage())
        grid.resume()
        assert summed(grid.get_group("tp")) == sum(rank + 1 for rank in grid.get_ranks("tp"))
        if done >= SETTLING:
            again.append(usage())
    check_sums(grid)
    grid.check()
    commgrid.destroy()
    assert group_count() == 1
    return [[bare, up, usage()], down, again]


def test_sockets_and_threads_go_down_and_come_back_cycle_after_cycle() -> None:
    for (bare, up, after), down, again in run_on_ranks(cycling, 4, CYCLES, timeout=300):
        assert up[0] - bare[0] >= 12, "of three communicators, with a socket each at least"
        assert up[1] - bare[1] >= 6
        # A socket or thread may be on its way out while it is counted.
        for seen, like in [*((seen, bare) for seen in down), *((seen, up) for seen in again)]:
            assert abs(seen[0] - like[0]) <= 4, (like, seen)
            assert abs(seen[1] - like[1]) <= 4, (like, seen)
        assert after[0] - bare[0] <= 4
        assert after[1] - bare[1] <= 4
        assert again[-1][2] - again[0][2] < 16, "MiB"


def states() -> None:
    grid = commgrid.initialize(tp=2, dp=2, connect=["tp"])
    held = {c.names[0]: c for c in grid.communicators}
    assert held["tp"].state == "connected"
    assert held["dp"].state == "not connected"
    assert held["tp"].memory is None  # gloo counts none
    grid.suspend(["tp", "dp_tp"])
    assert {c.names for c in grid.communicators if c.suspended} == {("tp",), ("dp_tp",)}
    assert held["tp"].state == "suspended"
    assert not held["tp"].connected
    assert held["tp"].memory is None
    assert held["tp"].backend == "gloo"
    assert "2 suspended" in str(grid)
    assert "2 suspended" in grid._repr_html_()
    report = grid.check()
    assert report.suspended == (("tp",), ("dp_tp",))
    assert "suspended, not asked  tp" in str(report)
    assert len(report.rows) == len(grid.communicators) - 2
    assert summed(grid.get_group("dp")) == sum(rank + 1 for rank in grid.get_ranks("dp"))
    grid.suspend("tp")  # twice is once
    grid.resume("tp")
    assert held["tp"].state == "connected"
    assert held["dp_tp"].state == "suspended"
    grid.resume()
    grid.resume()
    assert not any(c.suspended for c in grid.communicators)
    check_sums(grid)


def test_some_go_and_the_others_stay() -> None:
    run_on_ranks(states, 4)


def with_names_that_share(share: str) -> None:
    table = {"fsdp": "dp_cp", "ends": {"of": "pp", "pick": ["first", "last"]}}
    grid = commgrid.initialize(pp=2, dp=2, share=share, groups=table)
    check_sums(grid)
    sharing = next(c for c in grid.communicators if "fsdp" in c.names)
    assert "dp_cp" in sharing.names
    grid.suspend("cp_dp")  # in another order than the canonical one
    assert [c for c in grid.communicators if c.suspended] == [sharing]
    for name in sharing.names:
        assert "is suspended; call grid.resume()" in message(
            lambda name=name: summed(grid.get_group(name)), GroupSuspendedError
        )
    grid.suspend(["fsdp", "ends"])  # one of them is suspended already
    assert {name for c in grid.communicators if c.suspended for name in c.names} >= {"ends"}
    grid.resume("fsdp")
    assert not sharing.suspended
    grid.resume()
    check_sums(grid)


@pytest.mark.full("region", "aliases")
@pytest.mark.parametrize("share", ["aliases", "region", "all"])
def test_names_that_share_a_communicator_go_together(share: str) -> None:
    run_on_ranks(with_names_that_share, 4, share)


# -- what the program holds -----------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(4, 8, dtype=torch.float64)
        self.down = RowParallelLinear(8, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


def trained(sizes: dict[str, int], pauses: bool) -> list[float]:
    """All that holds groups, for four steps."""
    grid = commgrid.initialize(**sizes)
    torch.manual_seed(5)
    chunk = Block()
    reducer = GradientReducer(chunk)
    pipeline = Pipeline(
        chunk, schedule="1f1b", num_microbatches=2, loss=F.mse_loss, reducer=reducer
    )
    optimizer = ShardedOptimizer(reducer, torch.optim.AdamW, lr=0.05)
    generator = torch.Generator().manual_seed(7 + grid.get_local_rank("dp"))
    losses = []
    for _ in range(4):
        x = torch.randn(4, 4, dtype=torch.float64, generator=generator)
        loss = pipeline.step(x.chunk(2), x.sin().chunk(2))
        reducer.finish()
        optimizer.step()
        mean = torch.zeros(1, dtype=torch.float64) if loss is None else loss.detach().mean()
        losses.append(all_reduce(mean.view(1), "pp_dp").item())
        if pauses:
            grid.suspend()
            grid.resume()
    return losses


@pytest.mark.full("*pp*")
@pytest.mark.parametrize("sizes", [{"tp": 2, "dp": 2}, {"tp": 2, "dp": 2, "pp": 2}], ids=str)
def test_layers_reducers_pipelines_and_optimizers_go_on(sizes: dict[str, int]) -> None:
    with_pauses = run_on_ranks(trained, math.prod(sizes.values()), sizes, True)
    assert with_pauses == run_on_ranks(trained, math.prod(sizes.values()), sizes, False)
    assert with_pauses[0][-1] < with_pauses[0][0]


def other_options(pauses: bool) -> str:
    """Ranks whose optimizers differ from the third step on, with a group that was kept."""
    grid = commgrid.initialize(dp=2)
    kept = grid.get_group("dp")
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    reducer = GradientReducer(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.param_groups[0]["lr"] = 0.1 + grid.rank * (step == 2)
        model(torch.ones(1, 2)).sum().backward()
        try:
            reducer.finish()
        except GridMismatchError as error:
            assert gathered(grid.rank, kept) == [0, 1]
            return str(error)
        optimizer.step()
        reducer.zero_grad()
        if pauses:
            grid.suspend()
            grid.resume()
    return ""


def test_a_difference_is_named_after_a_pause_as_without_one() -> None:
    """The reducer keeps its groups, of which torch's tables know nothing any more."""
    with_pauses = run_on_ranks(other_options, 2, True)
    assert with_pauses == run_on_ranks(other_options, 2, False)
    assert "lr=0.1 and 1.1 on ranks 0 and 1" in with_pauses[0]


def with_fsdp(pauses: bool) -> list[float]:
    grid = commgrid.initialize(dp=2)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    fully_shard(model, mesh=grid.device_mesh("dp"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(torch.full((2, 4), grid.rank + 1.0)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if pauses:
            grid.suspend()
            grid.resume()
    return losses


@pytest.mark.full
def test_fsdp_which_keeps_the_groups_goes_on() -> None:
    with_pauses = run_on_ranks(with_fsdp, 2, True)
    assert with_pauses == run_on_ranks(with_fsdp, 2, False)
    assert with_pauses[0][-1] < with_pauses[0][0]


KEPT: list[nn.Module] = []
"""DDP's destructor now and then waits for ever where its group is gone; a rank ends without it."""


def with_ddp() -> None:
    grid = commgrid.initialize(dp=2)
    model = DistributedDataParallel(nn.Linear(4, 4), process_group=grid.get_group("dp"))
    KEPT.append(model)
    grid.suspend()
    grid.resume()
    with pytest.raises((RuntimeError, GroupSuspendedError)):
        model(torch.ones(2, 4)).sum().backward()


def test_ddp_which_keeps_them_in_cpp_is_told() -> None:
    run_on_ranks(with_ddp, 2)


def meshes() -> None:
    grid = commgrid.initialize(tp=2, dp=2)
    mesh = grid.device_mesh("dp", "tp")
    part, flat, sub = mesh["tp"], mesh["dp", "tp"]._flatten("dp_tp"), grid.select(dp=0)
    own = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(24, dtype=torch.float64).view(4, 6)
    spread = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    for _ in range(2):
        grid.suspend()
        for call in (
            lambda: spread.full_tensor(),
            lambda: functional.all_reduce(torch.ones(1), "sum", part).wait(),
            lambda: dist.all_gather_object([None, None], 1, group=mesh.get_group("tp")),
            lambda: dist.barrier(flat.get_group()),
        ):
            assert "is suspended" in message(call, GroupSuspendedError)
        # torch's own groups beside them work, and so does making more: torch names these by count.
        assert summed(own.get_group("tp")) == sum(rank + 1 for rank in grid.get_ranks("tp"))
        grid.resume()
        assert torch.equal(spread.full_tensor(), whole)
        moved = spread.redistribute(mesh, [Replicate(), Shard(0)])
        assert torch.equal(moved.full_tensor(), whole)
        ranks = grid.get_ranks("tp")
        assert summed(part.get_group()) == summed(mesh.get_group("tp")) == sum(ranks) + 2
        assert summed(flat.get_group()) == 10
        if sub.is_member:
            assert summed(sub.get_group("tp")) == sum(ranks) + 2
    assert mesh.get_group("tp") is grid.get_group("tp")


def test_meshes_and_dtensors_go_on() -> None:
    run_on_ranks(meshes, 4)


def flattening() -> None:
    """torch names a group by its ranks and how many groups there are, or by counting."""
    grid = commgrid.initialize(tp=2, dp=2, create=["tp", "dp"])
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    before = root["a", "b"]._flatten("before").get_group()
    count = group_count()
    grid.suspend()
    assert group_count() == count
    meanwhile = dist.new_group([0, 1, 2, 3], use_local_synchronization=True)
    grid.resume()
    assert group_count() == count + 1
    after = dist.new_group([0, 1, 2, 3], use_local_synchronization=True)
    assert [summed(group) for group in (before, meanwhile, after)] == [10, 10, 10]
    check_sums(grid)
    commgrid.destroy()
    assert [summed(group) for group in (before, meanwhile, after)] == [10, 10, 10]


def test_groups_that_torch_makes_before_meanwhile_and_after_meet() -> None:
    run_on_ranks(flattening, 4)


def kept_handles() -> None:
    grid = commgrid.initialize(tp=2)
    ranks = grid.get_ranks("tp")
    kept = grid.get_group("tp")
    mesh = DeviceMesh.from_group([kept], "cpu", torch.tensor(ranks), mesh_dim_names=("mine",))
    files = usage()[0]
    grid.suspend()
    meanwhile = grid.get_group("tp")
    assert meanwhile.size() == 2
    assert meanwhile.rank() == grid.get_local_rank("tp")
    assert meanwhile.group_name == kept.group_name
    assert files - usage()[0] >= 1, "its connection goes, whoever holds it"
    calls = (
        lambda group: dist.all_reduce(torch.ones(1), group=group),
        lambda group: dist.broadcast(torch.ones(1), ranks[0], group=group),
        lambda group: dist.all_gather([torch.ones(1)] * 2, torch.ones(1), group),
        lambda group: dist.send(torch.ones(1), group=group, group_dst=1 - group.rank()),
        lambda group: dist.barrier(group),
        lambda group: group.allreduce(torch.ones(1)),
        lambda group: dist.broadcast_object_list([1], ranks[0], group),
    )
    for call in calls:
        for group in (kept, meanwhile):
            message(lambda call=call, group=group: call(group), GroupSuspendedError)
    grid.resume()
    assert grid.get_group("tp") not in (kept, meanwhile)
    for group in (kept, meanwhile, mesh.get_group()):
        assert summed(group) == 3
        assert functional.all_reduce(torch.ones(1), "sum", group).wait().item() == 2
        heard: list[object] = [None, None]
        dist.all_gather_object(heard, grid.rank, group=group)
        assert heard == list(ranks)
        tensor = torch.tensor([float(grid.rank)])
        dist.broadcast(tensor, ranks[1], group=group)
        assert tensor.item() == ranks[1]
        operations = [
            dist.P2POp(dist.isend, torch.ones(1), group=group, group_peer=1 - group.rank()),
            dist.P2POp(dist.irecv, tensor, group=group, group_peer=1 - group.rank()),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert tensor.item() == 1
        assert dist.get_process_group_ranks(group) == list(ranks)
        assert dist.get_rank(group) == grid.get_local_rank("tp")
        assert dist.get_global_rank(group, 1) == ranks[1]
        assert dist.get_backend(group) == "gloo"
    check_sums(grid)
    assert dist.get_backend(grid.get_group("tp")) == "gloo"
    with pytest.raises(ValueError, match="not initialized"):
        dist.get_backend(dist.ProcessGroup(dist.HashStore(), 0, 1))  # torch's own errors stay
    grid.suspend()
    assert "is suspended" in message(lambda: summed(kept), GroupSuspendedError)
    grid.resume()
    assert summed(kept) == summed(meanwhile) == 3
    commgrid.destroy()
    for group in (kept, meanwhile):
        assert "whose grid was destroyed" in message(lambda g=group: summed(g), GridDestroyedError)


def test_a_handle_that_was_kept_goes_on() -> None:
    run_on_ranks(kept_handles, 2)


# -- refused, or not agreed -----------------------------------------------------------------


def busy() -> list[str]:
    grid = commgrid.initialize(tp=2, dp=2)
    group = grid.get_group("tp")
    tensor = torch.full((3,), float(grid.rank))
    work = None
    if grid.rank == 2:
        work = dist.all_reduce(tensor, group=group, async_op=True)
    told = []
    for names in ("tp", None):
        kind = CommGridError if grid.rank == 2 else PeerFailedError
        told.append(message(lambda names=names: grid.suspend(names), kind))
        assert not any(c.suspended for c in grid.communicators)
    grid.suspend("dp")  # has none under way
    grid.resume("dp")
    if grid.rank == 3:
        work = dist.all_reduce(tensor, group=group, async_op=True)
    if work is not None:
        work.wait()
        assert tensor.tolist() == [5, 5, 5]
    # Done, though nobody has waited for it: a handle that is ready keeps nothing.
    done = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    dist.barrier()
    until(done.is_completed, "the end of an all-reduce")
    grid.suspend()
    grid.resume()
    check_sums(grid)
    return told


def test_work_under_way_is_named_and_nothing_changes() -> None:
    found = run_on_ranks(busy, 4)
    for rank, told in enumerate(found):
        for text in told:
            assert "on rank 2 work is under way (all_reduce on tp); wait for its handles" in text
            assert ("rank 2 failed" in text) == (rank != 2)


def late(call: str) -> str:
    grid = commgrid.initialize(tp=2, dp=2)
    if call == "resume":
        grid.suspend()
    if grid.rank == 1:
        hear("0 is through", "2 is through", "3 is through")
        return ""
    said = message(lambda: getattr(grid, call)(timeout=LIMIT), PeerTimeoutError)
    tell(f"{grid.rank} is through")
    # Nothing has changed.
    assert {c.state == "suspended" for c in grid.communicators} == {call == "resume"}
    return said


@pytest.mark.full("resume")
@pytest.mark.parametrize("call", ["suspend", "resume"])
def test_a_rank_that_does_not_call_is_named(call: str) -> None:
    found = run_on_ranks(late, 4, call)
    for said in (found[0], found[2], found[3]):
        assert "rank 1 did not arrive within timeout" in said
        assert f"does each call grid.{call} of this grid?" in said


def disagreeing() -> list[str]:
    grid = commgrid.initialize(tp=2)
    told = []
    for mine, others in (
        (lambda: grid.suspend("tp"), lambda: grid.suspend("dp")),
        (lambda: grid.suspend(), lambda: grid.resume()),
        (lambda: grid.suspend("tp"), lambda: grid.suspend(["tp", "dp"])),
    ):
        call = mine if grid.rank == 0 else others
        told.append(message(call, GridMismatchError))
    assert not any(c.suspended for c in grid.communicators)
    grid.suspend()
    grid.resume()
    check_sums(grid)
    return told


def test_ranks_that_call_different_things_are_told_both() -> None:
    for names, calls, more in run_on_ranks(disagreeing, 2):
        assert "names is ['tp'] on rank 0 and ['dp'] on rank 1" in names
        assert "call is 'grid.suspend' on rank 0 and 'grid.resume' on rank 1" in calls
        assert "names is ['tp'] on rank 0 and ['tp', 'dp'] on rank 1" in more


def wrong() -> None:
    grid = commgrid.initialize(tp=2, create=["tp", "dp"])
    assert "'pt'" in message(lambda: grid.suspend("pt"), UnknownGroupError)
    assert "was not created" in message(lambda: grid.suspend(["tp", "pp"]), UnknownGroupError)
    adopted = HyperCommGrid.from_device_mesh(grid.device_mesh("dp", "tp"))
    said = message(adopted.suspend, CommGridError)
    assert "has adopted the groups of a DeviceMesh" in said
    assert not any(c.suspended for c in grid.communicators)
    grid.destroy()
    message(grid.suspend, GridDestroyedError)
    message(grid.resume, GridDestroyedError)


def test_what_cannot_be_suspended() -> None:
    run_on_ranks(wrong, 2)


def dying(when: str) -> None:
    grid = commgrid.initialize(tp=2, dp=2)
    if when == "created":
        grid.suspend()
    if grid.rank == 3:
        if when == "idle":
            torch_suspend.work_under_way = lambda *_: os._exit(7)  # type: ignore[assignment]
        else:
            torch_groups.create_group = lambda *_, **__: os._exit(7)  # type: ignore[assignment]
    try:
        (grid.resume if when == "created" else grid.suspend)(timeout=LIMIT)
    except PeerTimeoutError:
        # Before anything was given up the grid lives on; after that it is of no use, and says so.
        assert grid.is_destroyed == (when == "created")
        raise


@pytest.mark.full("idle")
@pytest.mark.parametrize("when", ["idle", "created"])
def test_a_rank_that_dies_in_the_middle_is_named(when: str) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_on_ranks(dying, 4, when)
    said = f"PeerTimeoutError: grid 'default': rank 3 did not get as far as '{when}' within timeout"
    assert str(failed.value).count(said) == 3
    told = "commgrid: the grid was destroyed on this rank"
    assert str(failed.value).count(told) == (3 if when == "created" else 0)


# -- ends -----------------------------------------------------------------------------------


def ending(how: str) -> None:
    bare = usage()
    grid = commgrid.initialize(tp=2, dp=2, connect=["tp"])
    grid.suspend(["tp", "dp_tp"])
    if how == "destroy":
        commgrid.destroy()
    elif how == "abort":
        grid.abort()
        commgrid.destroy()
    else:
        dist.destroy_process_group()
        assert not commgrid.is_initialized()
        assert "its communicators are gone" in str(grid) or grid.is_destroyed
        return
    assert group_count() == 1

    def is_given_back() -> bool:
        files, threads, _ = usage()
        return files - bare[0] <= 4 and threads - bare[1] <= 4

    until(is_given_back, "no more than four files and four threads are left")  # as other ranks end
    grid = commgrid.initialize(tp=2, dp=2)
    check_sums(grid)


@pytest.mark.full("abort", "world")
@pytest.mark.parametrize("how", ["destroy", "abort", "world"])
def test_a_grid_ends_while_it_is_suspended(how: str) -> None:
    # A grid that failed leaves keys in the store.
    run_on_ranks(ending, 4, how, check=False)


def shut_down() -> None:
    for _ in range(2):
        grid = commgrid.initialize(tp=2)
        grid.suspend()
        commgrid.shutdown()
        assert not dist.is_initialized()


@pytest.mark.full
def test_shutdown_while_it_is_suspended() -> None:
    run_on_ranks(shut_down, 2, backend=None, launcher="torchrun")


# -- where NCCL does it itself --------------------------------------------------------------


def by_itself(calls: list[str]) -> None:
    """gloo in NCCL's place: everything but NCCL's own calls."""
    torch_suspend._has_nccl = lambda group: True  # type: ignore[assignment]
    torch_nccl.can_suspend = lambda: True  # type: ignore[assignment]
    torch_suspend.work_under_way = lambda *_: {}  # type: ignore[assignment]
    torch_suspend._on_connected = lambda group, call: calls.append(  # type: ignore[assignment]
        f"{call} {group.group_desc}"
    )
    grid = commgrid.initialize(tp=2, create=["tp", "dp", "dp_tp"])
    mesh = grid.device_mesh("tp")
    kept = {name: grid.get_group(name) for name in ("tp", "dp", "dp_tp")}
    grid.suspend(["tp", "dp_tp"])
    assert all(grid.get_group(name) is group for name, group in kept.items())
    for call in (
        lambda: summed(kept["tp"]),
        lambda: functional.all_reduce(torch.ones(1), "sum", mesh).wait(),
        lambda: dist.barrier(kept["dp_tp"]),
    ):
        assert "is suspended; call grid.resume()" in message(call, GroupSuspendedError)
    assert summed(kept["dp"]) == grid.rank + 1
    grid.resume()
    assert all(grid.get_group(name) is group for name, group in kept.items())
    assert summed(kept["tp"]) == 3
    assert functional.all_reduce(torch.ones(1), "sum", mesh).wait().item() == 2
    check_sums(grid)
    assert calls == ["suspend tp", "suspend dp_tp", "resume tp", "resume dp_tp"]


def test_groups_that_suspend_themselves_stay_the_same_objects() -> None:
    run_on_ranks(by_itself, 2, [])


class Suspending:
    """A backend of NCCL's that tells what it is asked."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.asked = device, list[str]()

    def suspend(self) -> None:
        self.asked.append("suspend")

    def resume(self) -> None:
        self.asked.append("resume")

    def abort(self) -> None:
        self.asked.append("abort")

    def memory_stats(self) -> dict[str, int]:
        return {"suspended": int(self.asked[-1] == "suspend")}

    def get_error(self) -> SimpleNamespace:
        return SimpleNamespace(name="SUCCESS")

    def _get_sequence_number_for_group(self) -> int:
        return 7


def with_a_backend_that_suspends(ends: str) -> None:
    """gloo, but for what is asked of the backend itself."""
    torch_suspend._has_nccl = lambda group: True  # type: ignore[assignment]
    torch_nccl.can_suspend = lambda: True  # type: ignore[assignment]
    torch_suspend.work_under_way = lambda *_: {}  # type: ignore[assignment]
    torch_nccl.rank_device = lambda: torch.device("cuda", 0)  # type: ignore[assignment]
    grid = commgrid.initialize(tp=2, create=["tp"], watch=True)
    backend, group = Suspending(torch.device("cuda", 0)), grid.get_group("tp")
    torchs = torch_groups._TORCHS_GET_BACKEND
    torch_groups._TORCHS_GET_BACKEND = (  # type: ignore[assignment]
        lambda of, device: backend if device.type == "cuda" else torchs(of, device)
    )
    grid.suspend("tp")
    (suspended,) = grid.communicators
    assert suspended.memory == {"suspended": 1}
    message(lambda: summed(group), GroupSuspendedError)
    with pytest.MonkeyPatch.context() as nccls:
        nccls.setattr(torch_groups, "backend_of", lambda group: "nccl")
        nccls.setattr(torch_groups, "devices_of", lambda group: [torch.device("cuda", 0)])
        assert suspended.error() == ""  # which a watch asks all the time
        assert suspended.calls() == 7
        if ends == "abort":
            ended_groups.wake([group])
            assert backend.asked == ["suspend", "abort"]
    if ends == "resume":
        grid.resume("tp")
        assert backend.asked == ["suspend", "resume"]
        assert grid.is_alive


@pytest.mark.parametrize("ends", ["abort", "resume"])
def test_the_backend_of_a_suspended_group_is_asked_and_not_its_stand_in(ends: str) -> None:
    """Resuming raised that the group is suspended, and so did its watch, and an abort."""
    run_on_ranks(with_a_backend_that_suspends, 2, ends, check=False)


def test_without_nccl_2_29_7_groups_do_not_suspend_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", dist.ProcessGroup, raising=False)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    assert not torch_nccl.can_suspend()  # a torch without it
    monkeypatch.setattr(dist.ProcessGroup, "suspend", None, raising=False)
    assert torch_nccl.can_suspend()
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    assert not torch_nccl.can_suspend()


# -- elsewhere ------------------------------------------------------------------------------


def simple() -> None:
    grid = commgrid.initialize()
    check_sums(grid)
    grid.suspend()
    message(lambda: summed(grid.get_group("dp")), GroupSuspendedError)
    grid.resume()
    check_sums(grid)


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2])
def test_with_torchs_debug_wrapper_and_in_a_world_of_one(world: int) -> None:
    run_on_ranks(simple, world, environ={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"} if world > 1 else {})


def in_a_fake_world() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=64)
    grid = commgrid.initialize(tp=4, pp=2)
    grid.suspend("tp")
    assert "is suspended" in message(lambda: summed(grid.get_group("tp")), GroupSuspendedError)
    grid.resume()
    summed(grid.get_group("tp"))


def test_in_torchs_fake_world() -> None:
    run_on_ranks(in_a_fake_world, 1, backend=None)
