"""What `commgrid dump` gathers: calls of ranks on other hosts, and torch's own calls."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import commgrid
from commgrid.call_records import files as trace_files
from commgrid.cli import main
from commgrid.testing import run_on_ranks
from tests.docs import pages
from tests.waiting import comes, until_waits


def on_two_hosts(folder: str, is_whole: bool) -> None:
    """Ranks 2 and 3 have another folder of notes, as on another host. Rank 3 does not record."""
    faulthandler.unregister(signal.SIGUSR1)  # that of the tests' harness
    os.chdir(folder)  # where a rank that records in memory writes at the signal
    rank = int(os.environ["RANK"])
    tempfile.tempdir = f"{folder}/host_{rank // 2}"
    os.makedirs(tempfile.tempdir, exist_ok=True)
    grid = commgrid.initialize(dp=4, timeout=1000.0, trace=is_whole or rank != 3)
    if rank == 0:
        until_waits("rank 1", "rank 2", "rank 3")
        argv = ["dump", "--all-hosts", "--pid", str(os.getpid()), "-o", f"{folder}/dump"]
        assert main([*argv, "--timeout", "3"]) == (0 if is_whole else 1)
    else:
        comes(f"rank {rank}")
    dist.all_reduce(torch.ones(3), group=grid.get_group("dp"))
    commgrid.trace.stop()
    commgrid.shutdown()


@pytest.mark.parametrize("is_whole", [True, False])
def test_ranks_of_other_hosts_are_asked(
    tmp_path: Path, is_whole: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    run_on_ranks(
        on_two_hosts, 4, str(tmp_path), is_whole, backend=None, launcher="torchrun", check=False
    )
    said = capfd.readouterr().out.replace(f"{tmp_path}/dump", "commgrid_dump")
    blocks = pages.blocks(pages.DOCS / "debugging.md", "text")
    (shown,) = [each.text for each in blocks if "other_hosts" in each.comment]
    if is_whole:
        shown = shown.replace("calls of ranks 0-2", "calls of ranks 0-3", 1)
        shown = re.sub(r".* rank 3: .*\n(.*) rank 2:", r"\1 ranks 2-3:", shown)
    assert shown in said
    traces = trace_files.read(tmp_path / "dump")
    assert [trace.rank for trace in traces] == list(range(4 if is_whole else 3))
    assert {trace.state for trace in traces} == {"running"}
    assert [[call.operation for call in trace.calls] for trace in traces[:3]] == [
        [], ["all_reduce"], ["all_reduce"],
    ]  # fmt: skip


def test_a_job_without_a_trace(tmp_path: Path) -> None:
    """The page's program, in which rank 1 asks for the dump at the line where it hangs."""
    page = pages.DOCS / "debugging.md"
    pages.save_files(page, tmp_path)
    program, sleeps = tmp_path / "late.py", "time.sleep(600)"
    text = program.read_text()
    assert text.count(sleeps) == 1
    dump = "[sys.executable, '-m', 'commgrid', 'dump', '--pid', str(os.getpid())]"
    asks = f"import os, subprocess, sys; time.sleep(3); subprocess.run({dump})"
    program.write_text(text.replace(sleeps, asks))
    said, errors = pages.in_shell(
        "torchrun --standalone --nproc-per-node 2 late.py; commgrid diagnose commgrid_dump",
        tmp_path,
    )
    (shown,) = [
        each.text for each in pages.blocks(page, "text") if "without_a_trace" in each.comment
    ]
    assert pages.normal(said) == pages.normal(shown), said + errors
