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
from commgrid.planning.groups import GroupOptions
from commgrid.runtime import torch_groups, torch_world
from commgrid.runtime.launch import Launch


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
    monkeypatch.setenv(torch_groups._NCCL_CONNECTS_WITHIN, "x")
    monkeypatch.delenv(torch_groups._NCCL_CONNECTS_WITHIN)


def made(within: float | None, **nccl: Any) -> Any:
    options = GroupOptions(nccl=tuple(nccl.items()))
    return torch_groups._nccl_options(options, timedelta(minutes=30), within)


@pytest.mark.usefixtures("nccl")
def test_the_startup_timeout_bounds_nccls_first_connection() -> None:
    """`ncclCommInitRank` waited without end for a rank that had died."""
    options = made(12.3)
    assert options.config.blocking == 0
    assert os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "13"
    assert options._timeout == timedelta(minutes=30)  # collectives keep theirs


@pytest.mark.usefixtures("nccl")
def test_what_is_asked_of_nccl_goes_before_the_bound() -> None:
    assert made(12.3, blocking=1).config.blocking == 1
    assert "TORCH_NCCL_NONBLOCKING_TIMEOUT" not in os.environ
    both = made(12.3, max_ctas=4)
    assert (both.config.blocking, both.config.max_ctas) == (0, 4)
    os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] = "7"
    made(100.0)
    assert os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "7"


@pytest.mark.usefixtures("nccl")
def test_what_connects_at_first_use_keeps_torchs_own_mode() -> None:
    assert made(None) is None
    assert math.isnan(made(None, max_ctas=4).config.blocking)
