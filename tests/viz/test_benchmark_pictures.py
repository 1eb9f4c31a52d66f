"""Pictures of benchmarks and of runs' losses."""

import json
import math
from pathlib import Path

import pytest

from commgrid import SpecError
from tests.benchmarks.benchmark_picture import as_text, draw_benchmark, read_benchmark
from tests.benchmarks.curves_picture import Curve, difference, read_curve, read_curves
from tests.benchmarks.draw import main as draw

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install matplotlib")


def test_curves_say_how_far_they_are_apart(tmp_path: Path) -> None:
    paths = []
    for name, shift in (("dp8", 0.0), ("tp2", 1e-9)):
        paths.append(tmp_path / f"{name}.jsonl")
        rows = ({"step": i, "loss": 5.0 / i + shift} for i in range(1, 6))
        paths[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    one, other = map(read_curve, paths)
    assert one == Curve("dp8", (1, 2, 3, 4, 5), (5.0, 2.5, 5 / 3, 1.25, 1.0))
    assert difference(one, other) == pytest.approx(1e-9, rel=1e-6)
    picture = tmp_path / "loss.svg"
    assert draw(["--metrics", *map(str, paths), "-o", str(picture)]) == 0
    assert "tp2 (within 1.0e-09 of dp8)" in picture.read_text()
    broken = Curve("broken", (1, 2), (5.0, math.nan))
    assert difference(one, broken) == difference(broken, one) == math.inf
    assert difference(one, Curve("later", (9,), (1.0,))) is None
    paths[0].write_text("")
    with pytest.raises(SpecError, match="has no steps"):
        read_curve(paths[0])


def test_runs_of_one_name_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / part / "metrics.jsonl" for part in ("a/run", "b/run", "c")]
    for place, path in enumerate(paths):
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"step": 1, "loss": place + 1.0}) + "\n")
    names = [curve.name for curve in read_curves(paths)]
    assert len(set(names)) == 3
    assert names[0].endswith("a/run/metrics")
    picture = str(tmp_path / "x.svg")
    assert draw(["--metrics", str(paths[0]), str(paths[0]), "-o", picture]) == 2
    assert "is given twice; give each run once" in capsys.readouterr().err


ROWS = [
    {"case": "8 ranks", "metric": "calls", "unit": "calls", "ours": 15.0, "peer": "a peer",
     "peer_value": 317.0, "ratio": 0.05, "spread": None},
    {"case": "64 ranks", "metric": "calls", "unit": "calls", "ours": 15.0, "peer": "a peer",
     "peer_value": None, "ratio": None, "spread": None},
    {"case": "8 ranks", "metric": "time", "unit": "s", "ours": 0.25, "peer": "a peer",
     "peer_value": 0.5, "ratio": 0.5, "spread": [0.4, 0.6]},
]  # fmt: skip


def test_a_benchmarks_bars_are_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "startup.json"
    path.write_text(json.dumps({"machine": "one", "versions": {}, "rows": ROWS}))
    rows = read_benchmark(path)
    figure = draw_benchmark(rows)
    bars = [[round(p.get_width(), 6) for p in axes.patches] for axes in figure.axes]
    assert bars == [[15.0, 317.0, 15.0, 0.0], [0.25, 0.5]]
    said = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    assert said[0] == ["15", "317", "15", "not run", "■ commgrid", "■ a peer"]
    assert as_text(rows).splitlines() == [
        "8 ranks: calls   15 calls   a peer 317 calls",
        "64 ranks: calls  15 calls",
        "8 ranks: time    0.25 s   a peer 0.5 s",
    ]
    assert [row.metric for row in read_benchmark(path, ["time"])] == ["time"]
    with pytest.raises(SpecError, match="no row of memory; its metrics are 'calls', 'time'"):
        read_benchmark(path, ["memory"])
    path.write_text("[1]")
    with pytest.raises(SpecError, match="expected the object that a benchmark prints"):
        read_benchmark(path)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([], "it has no rows"),
        ([{"ours": float("inf")}], "Infinity is no number of JSON's"),
    ],
)
def test_a_file_without_numbers_is_refused(
    rows: list[object], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "held.json"
    path.write_text(json.dumps({"rows": rows}))
    assert draw(["--benchmark", str(path), "-o", str(tmp_path / "x.svg")]) == 2
    assert told in capsys.readouterr().err
