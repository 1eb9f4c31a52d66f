"""The Megatron example under torchrun, as its user starts it."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from commgrid.testing import run_on_ranks

pytest.importorskip("megatron.core")
from examples import megatron_gpt

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "megatron_gpt.py")


def torchrun(ranks: int, *given: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
         str(ranks), EXAMPLE, *given],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def megatrons(job: list[str]) -> list[float]:
    """The losses with Megatron's own groups."""
    warnings.simplefilter("ignore")  # of Megatron, which has many
    args = megatron_gpt.parse([*job, "--groups", "megatron"])
    losses = megatron_gpt.train(args)
    megatron_gpt.finish(args)
    return losses


@pytest.mark.full
def test_under_torchrun(tmp_path: Path) -> None:
    """With commgrid's groups, against Megatron's own in forked ranks."""
    job = ["--tp", "2", "--layers", "2", "--steps", "3"]
    path = tmp_path / "metrics"
    done = torchrun(2, *job, "--groups", "commgrid", "--metrics", str(path))
    assert done.returncode == 0, done.stderr
    assert "step   3  loss" in done.stdout
    ours = [json.loads(line)["loss"] for line in path.read_text().splitlines()]
    assert len(ours) == 3
    # Megatron, or its stand-ins for CUDA, change torch and the environment.
    for theirs in run_on_ranks(megatrons, 2, job, backend=None, launcher="torchrun", check=False):
        assert ours == theirs


def test_lines_that_were_added_are_marked() -> None:
    lines = Path(EXAMPLE).read_text().splitlines()
    added = [line for line in lines if "megatron_adapter" in line]
    assert 1 < len(added) < 10
    assert all("# <- commgrid" in line for line in added), added


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        megatron_gpt.parse(["--help"])
    assert "--distributed-optimizer" in capsys.readouterr().out
