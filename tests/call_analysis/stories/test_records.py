"""Records: saved while they are written, on a full disk, of files and code that look alike."""

from __future__ import annotations

import resource
import signal
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commgrid
from commgrid.failures import told_when_stopped
from tests.call_analysis.stories.job import Here, Job, Story, correct
from tests.waiting import until_waiting

kept: list[Any] = []  # what the programs have made


def sums(group: Any, count: int = 1) -> None:
    for _ in range(count):
        x = torch.ones(2)
        dist.all_reduce(x, group=group)
        assert float(x[0]) == dist.get_world_size(group)


@correct(short=True)
def test_a_save_into_the_folder_of_the_running_trace(here: Here) -> None:
    """Some ranks save there, and go on; one of them does so twice."""
    group = here.grid(dp=4).get_group("dp")
    for step in range(4):
        sums(group, 2)
        if here.rank + step < 3 and step:
            commgrid.trace.save(here.trace)
    here.now(ask=1)
    sums(group)
    here.now()


@correct(size=2)
def test_a_save_elsewhere_and_a_restart_of_the_recorder(here: Here) -> None:
    group = here.grid(dp=2).get_group("dp")
    sums(group, 3)
    commgrid.trace.save(here.folder / "elsewhere")
    here.now()
    sums(group, 2)
    here.now()


@correct(size=2)
def test_a_recorder_that_is_started_late(here: Here) -> None:
    """On all ranks, after calls that are in no record."""
    group = here.grid(dp=2).get_group("dp")
    commgrid.trace.stop()
    sums(group, 5)
    commgrid.trace.start()
    sums(group, 3)
    here.now()
    dist.send(torch.ones(1), 1, group) if here.rank == 0 else dist.recv(torch.ones(1), 0, group)
    here.now()


@correct(size=2)
def test_a_recorder_that_is_stopped_early(here: Here) -> None:
    """On all ranks, between two steps."""
    group = here.grid(dp=2).get_group("dp")
    sums(group, 3)
    commgrid.trace.stop()
    sums(group, 5)
    here.now()


@correct(size=2, open=True)
def test_a_recorder_that_is_stopped_on_one_rank(here: Here) -> None:
    """Its later calls are not recorded, and no rank waits for it."""
    group = here.grid(dp=2).get_group("dp")
    sums(group, 3)
    if here.rank == 1:
        commgrid.trace.stop()
    sums(group, 5)
    here.now()


@correct(size=2, open=True, order=False, short=True)
def test_a_full_disk_on_one_rank(here: Here) -> None:
    """It keeps its records in memory, and says so; the others' say nothing against it."""
    if here.rank == 1:  # no file of this process may be larger than a page or two
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, 1 << 14))
    group = here.grid(dp=2).get_group("dp")
    sums(group, 3)
    here.now()
    sums(group, 3)
    here.now()


HELPER = """
import torch, torch.distributed as dist

def reduce(group, count):
    for _ in range(count):
        dist.all_reduce(torch.ones({size}), group=group)
"""


def module(folder: Path, name: str, size: int) -> ModuleType:
    """A module of the file `utils.py` in a folder of its own."""
    made = ModuleType(name)
    made.__file__ = str(folder / name / "utils.py")
    exec(compile(HELPER.format(size=size), made.__file__, "exec"), made.__dict__)
    return made


@correct()
def test_two_files_of_one_name(here: Here) -> None:
    """`data/utils.py` and `model/utils.py` reduce at their fourth lines, on groups of their own."""
    grid = here.grid(tp=2)
    data, model = module(here.folder, "data", 2), module(here.folder, "model", 5)
    for _ in range(2):
        model.reduce(grid.get_group("tp"), 1 + here.rank // 2)
        data.reduce(grid.get_group("dp"), 2)
        (data if here.rank < 2 else model).reduce(grid.get_group("tp"), 1)
    here.now()


def total(x: torch.Tensor) -> torch.Tensor:
    """Sum over the group that the program has put down."""
    dist.all_reduce(x, group=kept[0])
    return x


torch.fx.wrap("total")


@correct(size=2, short=True)
def test_code_made_by_exec_and_by_fx(here: Here) -> None:
    """Without files: a template's function, and a traced module that calls a collective."""
    group = here.grid(dp=2).get_group("dp")
    space: dict[str, Any] = {"dist": dist, "torch": torch, "group": group}
    exec("def step():\n    dist.all_reduce(torch.ones(3), group=group)", space)

    kept[:] = [group]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = total(self.layer(x))
            return found * 2

    traced = torch.fx.symbolic_trace(Model())
    assert "total(" in traced.code
    for _ in range(3):
        space["step"]()
        traced(torch.ones(1, 2))
        eval("dist.all_reduce(torch.ones(1), group=group)", space)
    here.now()


@correct(size=2, open=True, short=True)
def test_a_group_that_torchs_registry_does_not_know(here: Here) -> None:
    """A backend's group made by hand, as some libraries do."""
    group = here.grid(dp=2).get_group("dp")
    store = dist.FileStore(str(here.folder / "store"), 2)
    made = dist.ProcessGroupGloo(store, here.rank, 2)
    plain = dist.ProcessGroup(here.rank, 2)
    plain._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, made)
    for _ in range(2):
        x = torch.ones(2)
        plain.allreduce([x], dist.AllreduceOptions()).wait()
        assert float(x[0]) == 2
        sums(group)
    here.now(ask=0)


@correct(size=2, open=True)
def test_many_groups_in_the_ring(here: Here) -> None:
    """More than the ring has places for, made by hand in the recorder of each rank."""
    group = here.grid(dp=2).get_group("dp")
    sums(group, 2)
    backend = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    for number in range(4200):
        own = dist.ProcessGroup(0, 1)
        own._set_group_name(f"library/{number}")
        kept.append(own)
        own._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        own.allreduce([torch.ones(1)], dist.AllreduceOptions()).wait()
    last = dist.new_group([0, 1])
    sums(last, 2)
    dist.broadcast(torch.ones(2), 1, group=last)
    sums(group)
    here.now()


def interrupted(here: Here) -> None:
    """Ends by the signal of a launcher, with commgrid's own handler of it."""
    group = here.grid(dp=4).get_group("dp")
    with told_when_stopped(lambda name: None):
        for step in range(10_000_000):
            sums(group)
            if step == 20:
                here.now()


def told_no_longer(here: Here) -> None:
    """Has left the block with commgrid's handler, and continues."""
    group = here.grid(dp=4).get_group("dp")
    with told_when_stopped(lambda name: None):
        sums(group, 5)
    for step in range(10_000_000):
        sums(group)
        if step == 20:
            here.now()


def by_default(here: Here) -> None:
    """Ends by the signal, as a program without handlers does."""
    group = here.grid(dp=4).get_group("dp")
    for step in range(10_000_000):
        sums(group)
        if step == 20:
            here.now()


def of_its_own(here: Here) -> None:
    """Has a handler of its own, which saves and ends the process."""
    group = here.grid(dp=4).get_group("dp")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    for step in range(10_000_000):
        sums(group)
        if step == 20:
            here.now()


def out_of_step(here: Here) -> None:
    """As `of_its_own`, but two ranks wait for the others, and end only when their call has failed.

    Python's handlers do not run while a thread is in a collective.
    """
    group = here.grid(dp=4).get_group("dp")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    sums(group, 20)
    if here.rank % 2:
        here.mark("comes")
        sums(group)
    for rank in (1, 3):
        here.hear("comes", rank)
    until_waiting([int(here.path("pid", rank).read_text()) for rank in (1, 3)])
    here.now(ranks=(0, 2), open=True)
    while True:
        signal.pause()


@pytest.mark.full("*SIGINT", "told*", "by_default*", "of_its_own*", "out_of_step*")
@pytest.mark.parametrize("signals", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize(
    "program", [interrupted, told_no_longer, by_default, of_its_own, out_of_step]
)
def test_a_job_that_is_stopped(tmp_path: Path, program: Any, signals: str) -> None:
    """All ranks at once, somewhere in a step: none of them was first."""
    job = Job(Story(program, open=True), tmp_path / "job", stop=getattr(signal, signals))
    job.run()
    assert job.looks
    assert not job.accusations, job.accusations


@correct(size=2)
def test_a_thread_that_ends_with_a_call_under_way(here: Here) -> None:
    """The work that it has started is waited for by another, later."""
    group = here.grid(dp=2).get_group("dp")
    works: list[Any] = []
    thread = threading.Thread(
        target=lambda: works.append(dist.all_reduce(torch.ones(2), group=group, async_op=True))
    )
    thread.start()
    thread.join()
    here.now()
    works[0].wait()
    here.now()
