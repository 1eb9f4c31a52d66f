"""The scripts of docs/between_grids.md as two jobs of torchrun, in both orders of arrival."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from commgrid.launching.process import free_port
from tests.docs import pages

PAGE = pages.DOCS / "between_grids.md"
SIZES = {"trainer": 2, "engine": 4}
SECONDS = 200.0


@contextlib.contextmanager
def started(folder: Path, program: str) -> Iterator[subprocess.Popen[str]]:
    """A job of torchrun's, with a line of its output as soon as it is there."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(SIZES[program]), f"{program}.py",
    ]  # fmt: skip
    environ = {**os.environ, "PYTHONPATH": str(pages.ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as job:
        try:
            yield job
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, 9)


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """The page's, at a port that is free; each says when its ranks are about to meet."""
    port = free_port()
    pages.save_files(PAGE, tmp_path)
    for program in SIZES:
        file = tmp_path / f"{program}.py"
        text = file.read_text().replace("29900", str(port))
        assert str(port) in text
        before, store, after = text.partition("store = dist.TCPStore(")
        file.write_text(f"{before}print('comes', flush=True)\n{store}{after}")
    return tmp_path


@pytest.mark.full
@pytest.mark.parametrize("first", SIZES)
def test_the_page_runs_in_either_order(first: str, scripts: Path) -> None:
    (second,) = {*SIZES} - {first}
    with started(scripts, first) as one:
        assert one.stdout is not None
        assert one.stdout.readline() == "comes\n"
        with started(scripts, second) as other:
            printed = {second: other.communicate(timeout=SECONDS)[0]}
            printed[first] = one.communicate(timeout=SECONDS)[0]
            assert (one.returncode, other.returncode) == (0, 0)
    assert "2 tensors from 2 ranks (0-1) to 4 (2-5): 576 B sent" in printed["trainer"]
