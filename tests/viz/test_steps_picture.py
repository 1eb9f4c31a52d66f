"""The best grids as bars, and a bench beside a cluster's prediction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commgrid import GridSpec
from commgrid.advisor.cluster import CLUSTERS
from commgrid.advisor.collectives import collective_time
from commgrid.advisor.models import MODELS
from commgrid.advisor.search import describe, tune
from commgrid.advisor.step import PARTS
from commgrid.cli import main
from commgrid.viz.figure import drawing
from commgrid.viz.steps_picture import draw_steps

JOB = ["--model", "llama3-8b", "--cluster", "h100", "--world-size", "64"]


def test_bars_are_as_long_as_the_steps_take() -> None:
    """Parts lie end to end from 0, and are those of the plan."""
    pytest.importorskip("matplotlib")
    rows = tune(MODELS["llama3-8b"], 64, CLUSTERS["h100"]).best[:6]
    with drawing():
        figure = draw_steps(rows)
    (axes,) = figure.axes
    bars: dict[float, list[Any]] = {}
    for bar in axes.patches:
        bars.setdefault(round(bar.get_y() + bar.get_height() / 2), []).append(bar)
    assert sorted(bars) == list(range(len(rows)))
    for place, row in enumerate(rows):
        ends = 0.0
        for bar in bars[place]:
            assert bar.get_x() == pytest.approx(ends)
            ends += bar.get_width()
        assert ends == pytest.approx(row.seconds, rel=2e-3 * len(PARTS))
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [describe(step.choice) for step in rows]


def test_a_plan_draws_its_steps_and_writes_its_grid(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for flags in (["--auto"], ["--tp", "8"]):
        grid, picture = tmp_path / "grid.yaml", tmp_path / "steps.svg"
        assert main(["plan", *JOB, *flags, "-o", str(grid), "-o", str(picture)]) == 0
        assert "llama3-8b on 64 devices of h100" in picture.read_text()
        assert GridSpec.from_yaml(grid).resolve(64).world_size == 64
        grid.unlink(), picture.unlink()


def test_a_bench_stands_beside_what_the_cluster_predicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {
        "group": "tp", "names": ["tp"], "ranks": 8, "groups": 1, "spread": [8, 1],
        "collective": "all_reduce", "size": 1 << 20, "count": 1 << 18, "type": "float",
        "time_us": 20.0, "least_us": 19.0, "most_us": 21.0, "algbw": 0.05, "busbw": 0.09,
    }  # fmt: skip
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"rows": [row]}))
    assert main(["show", "--bench", str(path), "--cluster", "h100", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["rows"]
    expected = collective_time("all_reduce", 1 << 20, (8, 1), CLUSTERS["h100"])
    assert found["measured_us"] == pytest.approx(20.0)
    assert found["predicted_us"] == pytest.approx(expected * 1e6)
    pytest.importorskip("matplotlib")
    out = tmp_path / "costs.svg"
    assert main(["show", "--bench", str(path), "--cluster", "h100", "-o", str(out)]) == 0
    assert "all_reduce" in out.read_text()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--bench", "x.json"], "--bench x.json: give the cluster that predicts it as well"),
        (["--bench", "x.json", "--cluster", "h100"], "x.json: cannot be read"),
        (
            ["--bench", "x.json", "--tp", "2"],
            "--tp 2: would change nothing; it does not go with --bench",
        ),
    ],
)
def test_wrong_flags_are_one_line(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
