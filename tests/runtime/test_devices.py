"""Which backend and which CUDA device a rank takes, on torch.cuda functions of our own."""

import math
import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commgrid.errors import SpecError
from commgrid.health.detector import is_wanted
from commgrid.planning.group_row import GroupOptions
from commgrid.planning.spec import GridSpec
from commgrid.store.launch import Launch
from commgrid.torch_compat import groups as torch_groups
from commgrid.torch_compat import nccl as torch_nccl
from commgrid.torch_compat import world as torch_world


class Cuda:
    """A machine with several devices, of which a process has one current."""

    def __init__(self, patch: pytest.MonkeyPatch, devices: int, current: int | None) -> None:
        self.current, self.touched = current or 0, current is not None
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: devices)
        patch.setattr(torch.cuda, "is_initialized", lambda: self.touched)
        patch.setattr(torch.cuda, "current_device", lambda: self.current)
        patch.setattr(torch.cuda, "set_device", self.take)

    def take(self, device: int) -> None:
        self.current, self.touched = device, True


@pytest.mark.parametrize(("current", "local", "taken"), [
    (None, 3, 3),
    (0, 3, 3),  # touched before commgrid started, which was all on device 0
    (5, 3, 5),  # the program's own choice
    (None, 11, 3),  # a launcher that counts further than there are devices
    (0, None, 0),
    (5, None, 5),
])  # fmt: skip
def test_the_device_a_rank_takes(
    monkeypatch: pytest.MonkeyPatch, current: int | None, local: int | None, taken: int
) -> None:
    cuda = Cuda(monkeypatch, 8, current)
    torch_world.take_device(Launch(rank=3, world_size=16, local_rank=local), "nccl")
    assert cuda.current == taken


def test_nothing_says_which_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank took GPU 0."""
    Cuda(monkeypatch, 8, None)
    launch = Launch(rank=3, world_size=16, local_rank=None)
    with pytest.raises(SpecError, match=r"rank 3 sees 8 CUDA devices.*LOCAL_RANK.*set_device"):
        torch_world.take_device(launch, "nccl")
    torch_world.take_device(launch, "gloo")  # works on any device, and on none
    torch_world.take_device(Launch(local_rank=None), "nccl")  # alone
    Cuda(monkeypatch, 1, None)
    torch_world.take_device(launch, "nccl")


def test_nccl_alone_is_what_cuda_starts_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cpu:gloo,cuda:nccl` gave WORLD and every group a gloo mesh."""
    assert torch_world.default_backend() == ("nccl" if torch.cuda.is_available() else "gloo")
    Cuda(monkeypatch, 8, None)
    for built, chosen in ((True, "nccl"), (False, "gloo")):
        monkeypatch.setattr(dist, "is_nccl_available", lambda built=built: built)
        assert torch_world.default_backend() == chosen


class Options:
    """As much of ProcessGroupNCCL.Options as is asked for."""

    def __init__(self) -> None:
        self.is_high_priority_stream, self._timeout = False, timedelta(0)
        self.config = SimpleNamespace(blocking=math.nan, max_ctas=0)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)


def made(**nccl: Any) -> Any:
    options = GroupOptions(nccl=tuple(nccl.items()))
    return torch_nccl.make_options(options, ("nccl",), timedelta(minutes=30))


@pytest.mark.usefixtures("nccl")
def test_communicators_block_as_by_torchs_default() -> None:
    """torch's equal-split all-to-all took "in progress" for an error where they did not."""
    before = dict(os.environ)
    assert made() is None
    assert math.isnan(made(max_ctas=4).config.blocking)
    assert made(blocking=0).config.blocking == 0  # as asked for
    assert dict(os.environ) == before


class BoundOptions(Options):
    """As of torch 2.15, where `nccl` is another backend."""

    lazy_init = False


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch, nccl: None) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=BoundOptions))
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2", raising=False)


@pytest.mark.usefixtures("bound")
def test_a_backend_that_takes_its_device_when_created_is_given_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch 2.15 took LOCAL_RANK's, whatever device the program had made current."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    cuda = Cuda(monkeypatch, 8, 5)
    for kinds in (["nccl"], ["nccl2"], ["nccl-lazy"], ["gloo", "nccl"]):
        assert torch_nccl.device_for(kinds) == torch.device("cuda", 5)
    for kinds in (["gloo"], ["nccl-legacy"], ["fake"]):
        assert torch_nccl.device_for(kinds) is None
    cuda.take(3)
    assert torch_nccl.device_for(["nccl"]) == torch.device("cuda", 3)
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", "0")
    assert torch_nccl.device_for(["nccl"]) is None  # is the older one then
    assert torch_nccl.device_for(["nccl2"]) == torch.device("cuda", 3)


@pytest.mark.usefixtures("bound")
def test_worlds_device_goes_before_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who starts WORLD with device_id= may never make it current: all groups were on GPU 0."""
    Cuda(monkeypatch, 8, 0)
    world = SimpleNamespace(bound_device_id=torch.device("cuda", 6))
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))
    assert torch_nccl.rank_device() == torch.device("cuda", 6)
    assert torch_nccl.device_for(["nccl"]) == torch.device("cuda", 6)
    world.bound_device_id = None
    assert torch_nccl.device_for(["nccl"]) == torch.device("cuda", 0)


@pytest.mark.usefixtures("bound")
def test_torchcomms_is_given_our_device_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "config", SimpleNamespace(use_torchcomms=True), raising=False)
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", "0")
    Cuda(monkeypatch, 8, 5)
    assert torch_nccl.device_for(["nccl"]) == torch.device("cuda", 5)
    assert torch_nccl.device_for(["ncclx"]) == torch.device("cuda", 5)
    assert torch_nccl.device_for(["gloo"]) is None


@pytest.mark.usefixtures("bound")
def test_it_connects_when_connect_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """It connected every group at creation, whatever connect= said."""
    assert made().lazy_init
    both = made(max_ctas=4)  # in the exchange of ranks, which has a limit
    assert (both.lazy_init, both.config.max_ctas) == (True, 4)
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", "0")
    assert made() is None


class Started:
    """Takes note of how torch.distributed is started."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.given: dict[str, Any] = {}
        patch.setattr(dist, "init_process_group", self.start)

    def start(self, backend: str, **given: Any) -> None:
        self.given = {"backend": backend, **given}
        self.dumps = os.environ.get(DUMPS)


DUMPS = "TORCH_NCCL_DUMP_ON_TIMEOUT"
NO_NCCL = pytest.mark.filterwarnings("ignore:Attempted to get default timeout for nccl")


@NO_NCCL
@pytest.mark.usefixtures("bound")
def test_world_is_bound_to_our_device_and_not_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    Cuda(monkeypatch, 8, None)
    monkeypatch.setenv("LOCAL_RANK", "1")  # of another launcher's numbering
    started = Started(monkeypatch)
    launch = Launch(rank=3, world_size=16, local_rank=3)
    torch_world.start_world(launch, dist.HashStore(), "x", "nccl", 9.0)
    assert started.given["device_id"] == torch.device("cuda", 3)
    assert started.given["pg_options"].lazy_init


@NO_NCCL
@pytest.mark.usefixtures("nccl")
def test_an_older_world_is_not_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would connect at once, and be split for every new group."""
    Cuda(monkeypatch, 8, None)
    started = Started(monkeypatch)
    launch = Launch(rank=3, world_size=16, local_rank=3)
    torch_world.start_world(launch, dist.HashStore(), "x", "nccl", 9.0)
    assert (started.given["device_id"], started.given["pg_options"]) == (None, None)


@NO_NCCL
@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize(
    ("watched", "before", "while_made"), [(True, None, "0"), (False, None, None), (True, "1", "1")]
)
def test_survivors_of_a_timeout_do_not_end_with_torchs_dump(
    monkeypatch: pytest.MonkeyPatch, watched: bool, before: str | None, while_made: str | None
) -> None:
    """torch reads it when the first group is made, and ends processes 480 s after a timeout."""
    Cuda(monkeypatch, 8, None)
    monkeypatch.delenv(DUMPS, raising=False)
    if before is not None:
        monkeypatch.setenv(DUMPS, before)
    started = Started(monkeypatch)
    launch = Launch(rank=3, world_size=16, local_rank=3)
    torch_world.start_world(launch, dist.HashStore(), "x", "nccl", 9.0, watched)
    assert started.dumps == while_made
    assert os.environ.get(DUMPS) == before


@pytest.mark.parametrize("backend", ["nccl", "nccl-legacy", "nccl2", "nccl-lazy", "cuda:nccl"])
def test_nccl_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """torch's own ValueError came out of the middle of starting."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = rf"groups\.dp\.backend='{backend}': NCCL needs a CUDA device.*use gloo"
    with pytest.raises(SpecError, match=said):
        torch_world.check_backend("groups.dp.backend", backend)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(SpecError, match="without NCCL; use gloo"):
        torch_world.check_backend("groups.dp.backend", backend)


class OnDemand:
    """A backend that some package registers when it is asked for, as torch 2.14 allows it."""

    name = "ondemand"

    def load(self) -> Any:
        return lambda: dist.Backend.register_backend(self.name, lambda *_: None, devices=["cpu"])


def test_a_backend_that_is_registered_on_demand_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our list of names refused it."""
    if not hasattr(dist.Backend, "_ensure_backend_registered"):
        pytest.skip("torch registers backends on demand from 2.14 on")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [OnDemand()])
    for name in ("_plugins", "backend_list", "backend_capability", "backend_type_map"):
        monkeypatch.setattr(dist.Backend, name, getattr(dist.Backend, name).copy())
    torch_world.check_backend("backend", "ondemand")
    torch_world.check_backend("backend", "cpu:ondemand,cuda:gloo")
    with pytest.raises(SpecError, match=r"there is no backend 'ondemanded'"):
        torch_world.check_backend("backend", "ondemanded")


class Second:
    """As much of ProcessGroupNCCL2 as is asked for: whether it can be split says if it is up."""

    supports_splitting = False


def test_whether_the_newer_backend_has_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    c10d = dist.distributed_c10d
    monkeypatch.setattr(c10d, "ProcessGroupNCCL2", Second, raising=False)
    monkeypatch.setattr(c10d, "ProcessGroupNCCLLazy", Second, raising=False)
    monkeypatch.setattr(
        dist, "ProcessGroupNCCL", SimpleNamespace(Options=BoundOptions), raising=False
    )
    backend = Second()
    assert torch_nccl.is_connected(backend) is False
    backend.supports_splitting = True
    assert torch_nccl.is_connected(backend) is True
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options))
    assert torch_nccl.is_connected(backend) is None  # torch 2.14 does not say it
    assert torch_nccl.is_connected(SimpleNamespace(_is_initialized=lambda: False)) is False
    assert torch_nccl.is_connected(SimpleNamespace()) is True


@pytest.mark.parametrize("mended", [False, True])
def test_a_backend_that_ends_the_process_at_an_abort_is_not_watched(
    monkeypatch: pytest.MonkeyPatch, mended: bool
) -> None:
    """torch 2.14's second one: a watch ends communicators by aborting them."""
    kinds = frozenset({"nccl2"})
    options = SimpleNamespace(lazy_init=True) if mended else SimpleNamespace()
    nccl = SimpleNamespace(Options=options)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(torch_world, "world_backend", lambda: "nccl2")
    monkeypatch.setattr(torch_groups, "nccl_kinds", lambda backend: kinds)
    spec = GridSpec.build(tp=2).resolve(4)
    assert is_wanted(None, spec, None) is mended
    assert not is_wanted(False, spec, None)
    if mended:
        assert is_wanted(True, spec, None)
    else:
        with pytest.raises(SpecError, match=r"watch=True: nccl2 of torch .* use nccl"):
            is_wanted(True, spec, None)


def test_a_barrier_is_on_this_ranks_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch guessed the device from the global rank, and warned."""
    calls: list[Any] = []
    group: Any = SimpleNamespace()
    monkeypatch.setattr(dist, "barrier", lambda group, **named: calls.append(named["device_ids"]))
    for backend in ("nccl", "cpu:gloo,cuda:nccl", "gloo"):
        monkeypatch.setattr(dist, "get_backend", lambda group, backend=backend: backend)
        Cuda(monkeypatch, 8, 5)
        torch_groups.barrier(group)
    assert calls == [[5], [5], None]
