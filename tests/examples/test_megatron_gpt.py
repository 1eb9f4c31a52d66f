"""The Megatron example under torchrun, as its user starts it."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "megatron_gpt.py")


def torchrun(ranks: int, *given: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
         str(ranks), EXAMPLE, *given],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_under_torchrun(tmp_path: Path) -> None:
    curves = []
    for groups in ("megatron", "commgrid"):
        path = tmp_path / f"{groups}.jsonl"
        done = torchrun(
            2, "--tp", "2", "--layers", "2", "--steps", "3", "--groups", groups,
            "--metrics", str(path),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "step   3  loss" in done.stdout
        curves.append([json.loads(line)["loss"] for line in path.read_text().splitlines()])
    assert len(curves[0]) == 3
    assert curves[0] == curves[1]


def test_lines_that_were_added_are_marked() -> None:
    lines = Path(EXAMPLE).read_text().splitlines()
    added = [line for line in lines if "megatron_adapter" in line]
    assert 1 < len(added) < 10
    assert all("# <- commgrid" in line for line in added), added


def test_help() -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--help"], capture_output=True, text=True, timeout=120, check=True
    )
    assert "--distributed-optimizer" in done.stdout
