"""Initialize and destroy without end: files, threads, memory and WORLD stay as they were."""

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid.store import client
from commgrid.testing import run_on_ranks
from commgrid.torch_compat import groups as torch_groups
from tests.process_groups import group_count
from tests.sizes import pick

CYCLES, SETTLING = pick((50, 10), (50, 10), (200, 20))
EMBEDDING = {"embedding": {"of": "pp", "pick": ["first", "last"]}}


def usage() -> tuple[int, int, float]:
    """Open files, threads that stay, MiB of this process in memory."""
    gc.collect()
    # Without pages of files, of which a forked rank takes those of libraries one by one.
    status = Path("/proc/self/status").read_text()
    mebibytes = int(status.partition("RssAnon:")[2].split()[0]) / 1024
    # Those that ask stores are kept for the next call.
    threads = len(os.listdir("/proc/self/task")) - len(client._IDLE)
    return len(os.listdir("/proc/self/fd")), threads, mebibytes


def cycle() -> None:
    # Half as many groups as share="aliases" makes, and as many cycles.
    grid = commgrid.initialize(tp=2, pp=2, groups=EMBEDDING, share="region")
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=grid.get_group("pp_tp"))
    assert tensor.item() == 4
    commgrid.destroy()


def many(cycles: int) -> list[tuple[int, int, float]]:
    for _ in range(SETTLING):  # until allocators and torch's own caches have settled
        cycle()
    seen = [usage()]
    for done in range(1, cycles + 1):
        cycle()
        if done % (CYCLES // 4) == 0:
            seen.append(usage())
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == dist.get_world_size()
    assert group_count() == 1
    return seen


def check_flat(seen: list[tuple[int, int, float]]) -> None:
    files, threads, memory = zip(*seen, strict=True)
    # A socket or thread may be on its way out while it is counted; one leaked a cycle would be 15
    # or more.
    assert max(files) - files[0] <= 4, files
    assert max(threads) - threads[0] <= 4, threads
    # The store itself remembers a few keys a cycle (torch's and ours): kilobytes, not megabytes.
    assert memory[-1] - memory[0] < 16, memory


def test_cycles_over_a_world_that_is_up() -> None:
    for seen in run_on_ranks(many, 4, CYCLES // 2, timeout=300):
        check_flat(seen)


@pytest.mark.nightly
def test_200_cycles_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "cycles.py"
    script.write_text(
        "import torch, commgrid\n"
        "torch.set_num_threads(1)\n"
        "from tests.runtime.test_leaks import CYCLES, check_flat, many\n"
        "check_flat(many(CYCLES))\n"
        "print('flat')\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4",
         str(script)],
        capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("flat") == 4


def test_shutdown_and_start_again() -> None:
    def restarts() -> list[Any]:
        seen = []
        for done in range(CYCLES // 10 + 10):
            cycle()
            commgrid.shutdown()
            assert not dist.is_initialized()
            if done in (9, CYCLES // 10 + 9):
                seen.append(usage())
        return seen

    for seen in run_on_ranks(restarts, 4, backend=None, launcher="torchrun", timeout=300):
        check_flat(seen)


@pytest.mark.full
def test_an_old_handle_that_somebody_keeps_costs_only_itself() -> None:
    def holding() -> list[Any]:
        kept = commgrid.initialize(tp=2).get_group("tp")
        commgrid.destroy()
        assert group_count() == 1
        assert not torch_groups.is_alive(kept)
        seen = []
        for done in range(CYCLES // 10 + 10):
            cycle()
            if done in (9, CYCLES // 10 + 9):
                seen.append(usage())
        return seen

    for seen in run_on_ranks(holding, 4):
        check_flat(seen)


def watched_cycle() -> int:
    grid = commgrid.initialize(tp=2, watch=True)
    handles = [ref(communicator.group) for communicator in grid.communicators]
    gc.disable()  # nothing that only the collector frees
    try:
        commgrid.destroy()
        return sum(handle() is not None for handle in handles)
    finally:
        gc.enable()


def test_a_watched_grid_lets_its_communicators_go() -> None:
    """Its watch is kept for a rebuild, with what it has seen."""
    assert run_on_ranks(watched_cycle, 2) == [0, 0]


def test_a_grid_owns_only_what_it_made() -> None:
    def owning() -> None:
        mine = dist.new_group([0, 1])
        commgrid.initialize(tp=2)
        commgrid.destroy()
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=mine)
        assert tensor.item() == 2
        # Whoever ends WORLD ends the grid's groups with it; the grid takes that without complaint.
        grid = commgrid.initialize(tp=2)
        dist.destroy_process_group()
        grid.destroy()
        assert not commgrid.is_initialized()

    run_on_ranks(owning, 2, check=False)  # an aborted group leaves keys
