"""What a plan says of open files, connections and threads is what real ranks have."""

import os
import resource
import socket
import time
from contextlib import suppress

import pytest
import torch.distributed as dist

import commgrid
from commgrid.errors import SpecError
from commgrid.planning.plan import GroupPlan
from commgrid.planning.sockets import Need, check_limits, needs, total
from commgrid.planning.spec import GridSpec
from commgrid.store import client
from commgrid.testing import run_on_ranks

SIZES = {"tp": 2, "pp": 2, "ep": 2, "etp": 1}


def usage() -> Need:
    """This process's files, the connected TCP sockets among them, and threads that stay."""
    before = -1
    # Threads that ask stores are kept for the next call.
    while before != (now := len(os.listdir("/proc/self/task")) - len(client._IDLE)):
        before = now
        time.sleep(0.3)  # a poll
    names = os.listdir("/proc/self/fd")  # the listing's own among them, each time
    connected = 0
    for name in names:
        with suppress(OSError):  # no socket, or one that listens
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as held:
                    held.getpeername()
                    connected += 1
    return Need(len(names), connected, now)


def minus(after: Need, before: Need) -> Need:
    return Need(
        after.files - before.files,
        after.connections - before.connections,
        after.threads - before.threads,
    )


def counted(connect: str) -> tuple[Need, Need, Need]:
    """What WORLD, starting a grid, and using all of it add on this rank."""
    none = usage()
    dist.init_process_group("gloo")
    dist.barrier()
    world = usage()
    grid = commgrid.initialize(**SIZES, connect=connect)  # type: ignore[arg-type]
    dist.barrier()
    start = usage()
    dist.barrier()  # whoever goes on connects to those who are still counting
    grid.check()
    dist.barrier()
    most = usage()
    dist.barrier()
    return minus(world, none), minus(start, world), minus(most, world)


@pytest.mark.full("none")
@pytest.mark.parametrize("connect", ["axes", "none"])
def test_real_gloo_ranks_need_what_the_plan_says(connect: str) -> None:
    spec = GridSpec.build(**SIZES, connect=connect).resolve(8)  # type: ignore[arg-type]
    found = run_on_ranks(counted, 8, connect, backend=None, launcher="torchrun")
    for rank, (world, start, most) in enumerate(found):
        planned = total(needs(GroupPlan.for_rank(spec, rank), "gloo"))
        if rank == 0:  # serves the store, where others come and go
            assert (start.threads, most.threads) == tuple(need.threads for need in planned)
        else:
            # So few ranks may need no connection to wait on.
            waits = minus(planned[0], start)
            assert waits in (Need(), Need(files=1, connections=1))
            of_world = Need(files=12, connections=8, threads=3)  # 4 files, 7 pairs, the store
            assert (world, most) == (of_world, minus(planned[1], waits))


@pytest.mark.parametrize("world", [1024, 16_384])
def test_nccl_alone_opens_nothing_of_gloos(world: int) -> None:
    spec = GridSpec.build(tp=8, pp=4, cp=2, ep=8, etp=1).resolve(world)
    plan = GroupPlan.for_rank(spec, 1)
    found = needs(plan, "nccl")
    connecting = [c for c in plan.communicators if c.connect]
    start, _ = total(found)
    # The grid's store, and of each 6 files of the bootstrap and 2 channels of a ring.
    assert start.files == 1 + 14 * len(connecting)
    assert {n.start.files for n in found if n.size > 1} == {0, 14}
    assert start.files < 100
    gloo, both = total(needs(plan, "gloo"))[1], total(needs(plan, "cpu:gloo,cuda:nccl"))[1]
    assert gloo.files > world  # every pair of the larger groups
    assert both.files == gloo.files + total(found)[1].files - 1
    assert needs(plan, "nccl2") == needs(plan, "cuda:nccl-legacy") == found


def test_a_grid_that_runs_out_of_files_is_refused_before_it_opens_any() -> None:
    """gloo ended the process: `terminate called … accept: Too many open files`."""

    def low() -> None:
        dist.barrier()  # whoever is refused first must not leave while others still connect
        held = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (held + 20, held + 20))
        told = r"needs \d+ open files .* most take 'dp' \(4 ranks, 7 files\).*ulimit -Hn"
        with pytest.raises(SpecError, match=told):
            commgrid.initialize(tp=2)
        assert len(os.listdir("/proc/self/fd")) <= held + 1

    run_on_ranks(low, 8)


def test_the_soft_limit_is_raised_as_far_as_allowed() -> None:
    def soft() -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 5, hard))
        grid = commgrid.initialize(tp=2)
        grid.check()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)

    run_on_ranks(soft, 4)


def test_enough_is_left_alone() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    check_limits(GroupPlan.for_rank(GridSpec.build().resolve(1), 0), "gloo")
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
