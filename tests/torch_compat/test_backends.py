"""What torch's versions do differently while a group is made; a grid is the same on all."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import commgrid
from commgrid.errors import CommGridError
from commgrid.testing import run_on_ranks
from commgrid.torch_compat import nccl as torch_nccl
from commgrid.torch_compat.world import world_store
from tests.runtime.test_grid import check_sums
from tests.waiting import until


def without_a_backend() -> list[str]:
    dist.init_process_group()
    grid = commgrid.initialize(tp=2)
    check_sums(grid)
    dist.barrier()
    return sorted({communicator.backend for communicator in grid.communicators})


def test_a_world_that_was_given_no_backend() -> None:
    """It was called 'undefined', and its groups were taken for connected."""
    if torch.version.cuda and not torch.cuda.is_available() and torch.__version__ < "2.15":
        pytest.skip("torch itself takes NCCL then, which fails without a GPU")
    for (backend,) in run_on_ranks(without_a_backend, 4, backend=None, launcher="torchrun"):
        assert ("nccl" if torch.cuda.is_available() else "gloo") in backend
        assert "undefined" not in backend


def timeouts(debug: bool) -> None:
    if debug:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    grid = commgrid.initialize(tp=2, timeout=70, groups={"dp": {"timeout": 7}})
    world = dist.group.WORLD
    assert world is not None
    groups = {c.names[0]: c.group for c in grid.communicators} | {"world": world}
    for name, group in groups.items():
        backend: Any = group._get_backend(torch.device("cpu"))
        seconds = {"dp": 7, "world": 1800}.get(name, 70)
        made = getattr(backend, "wrapped_pg", backend)
        assert made.options._timeout == timedelta(seconds=seconds), (name, made.options._timeout)
        assert (made is not backend) == debug
    dist.barrier()  # rank 0 serves the store


@pytest.mark.parametrize("debug", [False, True])
def test_a_group_keeps_its_timeout(debug: bool) -> None:
    """torch's change of it left out its wrapper for debugging, and then got another name."""
    run_on_ranks(timeouts, 4, debug, backend=None, launcher="torchrun")


def recorded() -> int:
    grid = commgrid.initialize(tp=2)
    check_sums(grid)
    hooks = getattr(c10d._world, "pg_flight_recorder_hooks", {})
    return len({c.group for c in grid.communicators} & set(hooks))


def test_gloo_is_not_recorded_twice() -> None:
    """From 2.15 on torch watches what it takes for a plug-in; gloo tells its recorder itself."""
    assert run_on_ranks(recorded, 4) == [0] * 4


def refused() -> None:
    dist.init_process_group("gloo")
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # torch then makes the groups on gloo, too
    c10d._new_process_group_helper = lambda *_, **__: (dist.GroupMember.NON_GROUP_MEMBER, None)
    with pytest.raises(CommGridError, match=r"tp: torch's backend 'gloo' made no group"):
        commgrid.initialize(tp=2)


def test_a_backend_that_makes_no_group() -> None:
    # Megatron, or its stand-ins for CUDA, change torch and the environment.
    run_on_ranks(refused, 2, backend=None, launcher="torchrun", check=False)


def beside_torchcomms() -> list[str]:
    """torch as if it were switched to a torchcomms that has gloo, and NCCL."""

    class Wrapper:
        pass

    made: list[str] = []
    c10d._TORCHCOMM_AVAILABLE = True
    c10d._BackendWrapper = Wrapper
    c10d._torchcomms_is_backend_built = lambda name: name in ("gloo", "nccl")
    c10d._create_torchcomms_backend = lambda name, *_, **__: made.append(name)
    dist.config.use_torchcomms = True
    grid = commgrid.initialize(tp=2)
    check_sums(grid)
    grid.check()
    commgrid.destroy()
    return made


def test_gloo_is_torchs_own_beside_torchcomms() -> None:
    """The switch takes another path through torch's helper; ours asks for a backend it has not."""
    if not hasattr(c10d, "_torchcomms_is_backend_built"):
        pytest.skip("torch has the switch from 2.14 on")
    # It changes torch's functions, and leaves them so.
    assert run_on_ranks(beside_torchcomms, 4, check=False) == [[]] * 4


KEPT: list[Any] = []  # an NCCL backend ends the process where it goes and there is no GPU


def over_nccl() -> list[tuple[str, Any, Any, bool]]:
    """A grid of torch 2.15's own NCCL groups, on devices that torch takes for there."""
    torch.cuda.is_available = lambda: True
    torch.cuda.is_initialized = lambda: True
    torch.cuda.current_device = lambda: 5  # as the program chose, whatever LOCAL_RANK says
    torch.cuda.device_count = torch.accelerator.device_count = lambda: 8
    KEPT.append(commgrid.initialize(tp=2, connect="none", groups={"dp": {"backend": "nccl-lazy"}}))
    world = dist.group.WORLD
    assert world is not None
    KEPT.append(world)
    found = [("world", dist.get_backend(world), world.bound_device_id, False)]
    for each in KEPT[0].communicators:
        KEPT.append(each.group)
        found.append((each.names[0], each.backend, each.group.bound_device_id, each.connected))
    dist.distributed_c10d._world.pg_names.clear()  # nobody shuts them down
    world_store().add("done", 1)
    if dist.get_rank() == 0:  # it serves the store
        until(lambda: world_store().add("done", 0) == 4, "the others")
    return found


def test_nccl_groups_of_the_real_torch_without_a_gpu() -> None:
    """Given no device, 2.15's were on LOCAL_RANK's, WORLD bound to it; and all were connected."""
    if not torch_nccl.is_bound(["nccl"]) or torch.cuda.is_available():
        pytest.skip("from torch 2.15 on, in a CUDA build, without a GPU")
    # It changes torch's functions, and its grid cannot be ended without a GPU.
    for found in run_on_ranks(over_nccl, 4, backend=None, launcher="torchrun", check=False):
        kinds = {name: backend for name, backend, *_ in found}
        assert (kinds["world"], kinds["tp"], kinds["dp"]) == ("nccl", "nccl", "nccl-lazy")
        assert len(found) > 5
        for name, _, device, connected in found:
            assert (device, connected) == (torch.device("cuda", 5), False), name
