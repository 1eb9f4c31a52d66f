"""The best grids as bars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from commgrid import GridSpec
from commgrid.cli import main
from commgrid.cost_model.cluster import CLUSTERS
from commgrid.cost_model.model import MODELS
from commgrid.cost_model.search import describe, search
from commgrid.cost_model.term import PARTS
from commgrid.viz.figure import drawing
from commgrid.viz.steps_picture import draw_steps

JOB = ["--model", "llama3-8b", "--cluster", "h100", "--world-size", "64"]


def test_bars_are_as_long_as_the_steps_take() -> None:
    """Parts lie end to end from 0, and are those of the plan."""
    pytest.importorskip("matplotlib")
    rows = search(MODELS["llama3-8b"], 64, CLUSTERS["h100"]).best[:6]
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
    assert labels == [describe(step.config) for step in rows]


def test_a_plan_draws_its_steps_and_writes_its_grid(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for flags in (["--auto"], ["--tp", "8"]):
        grid, picture = tmp_path / "grid.yaml", tmp_path / "steps.svg"
        assert main(["plan", *JOB, *flags, "-o", str(grid), "-o", str(picture)]) == 0
        assert "llama3-8b on 64 devices of h100" in picture.read_text()
        assert GridSpec.from_yaml(grid).resolve(64).world_size == 64
        grid.unlink(), picture.unlink()
