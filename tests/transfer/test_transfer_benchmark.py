"""The benchmark of transfers runs, and counts bytes; nothing here compares times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "transfer.py"
WIDTH, LAYERS = 512, 2
CUT = 2 * 4 * WIDTH * WIDTH + 4 * WIDTH  # numbers of a layer that tp cuts: up, its bias and down
WHOLE = 3 * WIDTH  # the others: a norm and a bias


@pytest.mark.full
def test_two_programs_stand_beside_one_world() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--only", "two programs, fsdp", "--megabytes", "1",
         "--repeats", "1", "--json"],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert {row["case"] for row in rows} == {"two programs, fsdp 2 → tp 2"}
    assert {row["peer"] for row in rows} == {"one world"}
    by_metric = {row["metric"]: row for row in rows}
    assert {metric: row["unit"] for metric, row in by_metric.items()} == {
        "run": "ms", "bytes": "MB", "peak above the tensors": "MiB"
    }  # fmt: skip
    assert all(row["ours"] > 0 and row["peer_value"] > 0 for row in rows)
    received = 4 * LAYERS * (CUT + 2 * WHOLE) / 1e6  # all of it from other ranks
    assert by_metric["bytes"]["ours"] == by_metric["bytes"]["peer_value"] == received
