"""Names of calls in the timeline of torch's profiler."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import commgrid
from commgrid.collectives import all_reduce
from commgrid.testing import run_on_ranks


def names(traced: bool) -> set[str]:
    """What a profile has of two calls, of which the second one raises."""
    grid = commgrid.initialize(tp=2, trace=traced)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
        all_reduce(torch.ones(3), "tp")
        with pytest.raises((RuntimeError, ValueError)):
            dist.broadcast(torch.ones(3), 7, grid.get_group("dp"))
        dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2))
    all_reduce(torch.ones(3), "tp")  # after it
    commgrid.trace.stop()
    found = [each.key for each in profiled.key_averages() if each.count == 1]
    return {each for each in found if each in ("tp all_reduce", "default_pg all_gather")}


def test_a_traced_job_names_its_calls_in_a_profile() -> None:
    assert run_on_ranks(names, 2, True) == [{"tp all_reduce", "default_pg all_gather"}] * 2
    assert run_on_ranks(names, 2, False) == [set()] * 2


def without_a_profiler() -> None:
    def raised(*_: object) -> None:
        raise AssertionError("no profiler runs")

    commgrid.initialize(tp=2, trace=True)
    torch.profiler.record_function = raised  # type: ignore[assignment, misc]
    all_reduce(torch.ones(3), "tp")
    commgrid.trace.stop()


def test_calls_cost_nothing_of_it_otherwise() -> None:
    run_on_ranks(without_a_profiler, 2)
