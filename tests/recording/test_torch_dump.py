"""A job without a trace: `commgrid dump` writes torch's last calls, `commgrid diagnose` reads."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.parallel import DistributedDataParallel

import commgrid
from commgrid.call_analysis import diagnosis
from commgrid.cli import main
from commgrid.testing import run_on_ranks
from tests.waiting import comes, until_waits


def of_ddp(grid: commgrid.HyperCommGrid) -> Callable[[], object]:
    """A backward, whose all-reduce DistributedDataParallel issues in C++."""
    model = DistributedDataParallel(nn.Linear(3, 1), process_group=grid.get_group("dp"))
    return lambda: model(torch.ones(2, 3)).sum().backward()


def of_dtensor(grid: commgrid.HyperCommGrid) -> Callable[[], object]:
    """A sum that DTensor issues as a functional collective."""
    mesh = init_device_mesh("cpu", (2,))
    part = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    return lambda: part.redistribute(mesh, [Replicate()]).to_local()


def of_compiled_code(grid: commgrid.HyperCommGrid) -> Callable[[], object]:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def total(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = all_reduce(x * 2, "sum", grid.get_group("dp"))
        return found + 1

    return lambda: total(torch.ones(3)).sum().item()


def of_torch(grid: commgrid.HyperCommGrid) -> Callable[[], object]:
    return lambda: dist.all_reduce(torch.ones(3), group=grid.get_group("dp"))


KINDS = {"ddp": of_ddp, "dtensor": of_dtensor, "compiled": of_compiled_code, "torch": of_torch}


def one_is_late(folder: str, kind: str) -> None:
    """Rank 0 dumps both while rank 1 waits in a call that rank 0 has not entered."""
    faulthandler.unregister(signal.SIGUSR1)  # that of the tests' harness
    grid = commgrid.initialize(dp=2, timeout=1000.0)
    calls = KINDS[kind](grid)
    calls()
    if grid.rank == 0:
        until_waits("rank 1")
        assert main(["dump", "--pid", str(os.getpid()), "-o", folder]) == 0
    else:
        comes("rank 1")
    calls()
    commgrid.shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_job_without_a_trace_hangs_in(
    tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run_on_ranks(one_is_late, 2, str(tmp_path), kind, backend=None, launcher="torchrun")
    assert "torch's calls of ranks 0-1" in capfd.readouterr().out
    assert main(["diagnose", str(tmp_path), "--patience", "0"]) == 1
    first = capfd.readouterr().out.splitlines()[0]
    assert first.startswith("rank 0 has not entered ")
    assert "all_reduce" in first
    assert "for which rank 1 has waited" in first
    assert "it is in test_torch_dump.py:" in first


def all_is_well(folder: str) -> None:
    """Calls of all kinds, messages, and groups that end, of which some ranks make more."""
    faulthandler.unregister(signal.SIGUSR1)
    grid = commgrid.initialize(dp=2, tp=2, timeout=1000.0)
    for kind in ("ddp", "torch"):
        KINDS[kind](grid)()
    for _ in range(3):  # gloo keeps no record of messages, and counts them
        if grid.rank == 0:
            dist.send(torch.ones(1), 1)
        elif grid.rank == 1:
            dist.recv(torch.ones(1), 0)
    for members in ([0, 1], [0, 2, 3], [0, 1]):
        group = dist.new_group(members)
        if grid.rank in members:
            dist.all_reduce(torch.ones(1), group=group)
            dist.destroy_process_group(group)
    dist.all_reduce(torch.ones(1))
    store = dist.distributed_c10d._get_default_store()
    if grid.rank == 0:
        assert main(["dump", "--pid", str(os.getpid()), "-o", folder]) == 0
        store.set("dumped", "")
    store.wait(["dumped"])
    commgrid.shutdown()


def test_no_rank_of_a_right_job_is_accused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_on_ranks(all_is_well, 4, str(tmp_path), backend=None, launcher="torchrun")
    traces = diagnosis.read(tmp_path)
    assert [trace.rank for trace in traces] == [0, 1, 2, 3]
    assert all(trace.state == "running" and trace.stacks for trace in traces)
    assert sum(len(trace.calls) for trace in traces) > 20
    assert main(["diagnose", str(tmp_path), "--patience", "0"]) == 0, capfd.readouterr().out
