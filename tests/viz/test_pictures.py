"""Pictures: what is drawn is what the plan and the simulation say, and equal pictures are equal."""

from pathlib import Path

import pytest

from commgrid import GridSpec, SpecError
from commgrid.cli import main
from commgrid.pipeline import Times, make_schedule, simulate
from commgrid.viz.figure import colour
from commgrid.viz.grid_picture import draw_grid, place
from commgrid.viz.schedule_picture import draw_schedule
from commgrid.viz.view import GridView

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install matplotlib")

from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle


@pytest.mark.full("512")
@pytest.mark.parametrize("world", [8, 64, 512])
def test_every_rank_has_a_cell_of_its_groups_colour(world: int) -> None:
    view = GridView(GridSpec.build(tp=2, pp=2, cp=2).resolve(world))
    places = place(view)
    assert sorted(places.cells) == list(range(world))
    assert len(set(places.cells.values())) == world
    width, height = places.extent
    assert all(0 <= x < width and 0 <= y < height for x, y in places.cells.values())
    figure = draw_grid(view)
    panels = [axes for axes in figure.axes if axes.get_title(loc="left")]
    assert [axes.get_title(loc="left") for axes in panels] == list(map(view.describe, view.shown))
    for axes, name in zip(panels, view.shown, strict=True):
        drawn = {
            (round(p.get_x() - 0.04, 6), round(p.get_y() - 0.04, 6)): to_hex(p.get_facecolor())
            for p in axes.patches
            if isinstance(p, Rectangle) and p.get_fill()
        }
        for rank, (x, y) in places.cells.items():
            expected = colour(view.numbers(name)[rank]).lower()
            assert drawn[round(x, 6), round(y, 6)] == expected


def test_a_ranks_group_is_joined_and_what_leaves_its_node_is_red() -> None:
    view = GridView(GridSpec.build(tp=2, pp=2).resolve(16), rank=5)
    figure = draw_grid(view)
    lines = {
        axes.get_title(loc="left").partition(":")[0]: [line.get_color() for line in axes.lines]
        for axes in figure.axes
    }
    assert [len(lines[name]) for name in ("tp", "dp", "pp")] == [1, 3, 1]
    assert lines["pp"] == ["#b3261e"]
    assert set(lines["tp"] + lines["dp"]) == {"#1b1f24"}


def test_a_schedules_bars_are_its_spans() -> None:
    schedule = make_schedule("zb-h1", num_stages=4, num_microbatches=8)
    planned = simulate(schedule)
    run = simulate(schedule, Times(forward=1.0, backward_input=1.5, transfer=0.25))
    figure = draw_schedule(planned, {a: (s + 7.0, e + 7.0) for a, (s, e) in run.spans.items()})
    for axes, found in zip(figure.axes, (planned, run), strict=True):
        bars = {
            (round(p.get_y() + p.get_height() / 2), round(p.get_x(), 6), round(p.get_width(), 6))
            for p in axes.patches
            if isinstance(p, Rectangle) and not p.get_hatch()
        }
        assert bars == {
            (a.stage, round(s, 6), round(e - s, 6)) for a, (s, e) in found.spans.items()
        }
    assert "12.5 % bubble" in figure.axes[0].get_title(loc="left")


def test_measured_spans_are_those_of_the_schedule() -> None:
    planned = simulate(make_schedule("1f1b", num_stages=2, num_microbatches=2))
    of_one = {action: span for action, span in planned.spans.items() if action.stage == 0}
    with pytest.raises(SpecError, match="the measured spans lack B0 of stage 1, unlike schedule"):
        draw_schedule(planned, of_one)
    draw_schedule(planned, planned.spans)


def test_the_same_picture_is_the_same_file(tmp_path: Path) -> None:
    flags = ["show", "--tp", "2", "--pp", "2", "--world-size", "8", "--rank", "5"]
    for name in ("one.svg", "other.svg"):
        assert main([*flags, "-o", str(tmp_path / name)]) == 0
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "other.svg").read_bytes()
    for suffix in ("png", "pdf"):
        assert main([*flags, "-o", str(tmp_path / f"grid.{suffix}")]) == 0
        assert (tmp_path / f"grid.{suffix}").stat().st_size > 1000


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--tp", "2", "--world-size", "4", "-o", "grid.bmp"], "expected a file that ends in .svg"),
        (["--tp", "2", "--world-size", "4", "-o", "no/such/grid.svg"], "cannot be written"),
        (["--tp", "2", "--world-size", "4", "-o", "no/such/g.html"], "there is no such folder"),
        (["--tp", "2", "--world-size", "4", "--groups", "tpp"], "no group is named 'tpp'"),
        (["--tp", "2", "--world-size", "4", "--rank", "x"],
         "--rank x: expected a whole number from 0 on"),
        (["--stages", "2", "--tp", "2", "--world-size", "4"],
         "--stages 2: would change nothing; it goes with --schedule"),
        (["--schedule", "1f1b", "--stages", "2"], "needs --microbatches N"),
        (["--schedule", "2f2b", "--stages", "2", "--microbatches", "2"], "2f2b"),
        (["--schedule", "1f1b", "--stages", "2", "--microbatches", "2", "-o", "a.html"],
         "a page, .html, shows a grid"),
        (["--schedule", "1f1b", "--stages", "2", "--microbatches", "2", "--tp", "2"],
         "beside a grid: only a page shows both"),
        (["--tp", "2", "--world-size", "4", "--create", "dp", "--groups", "tp"],
         "group 'tp' is not created"),
        (["--tp", "2", "--world-size", "4", "--gpus-per-node", "0"], "--gpus-per-node 0: expected"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_line(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["show", *flags]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
