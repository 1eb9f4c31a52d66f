"""`grid.show()`: the picture of a live grid, in a notebook or a file."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import commgrid
from commgrid import HyperCommGrid

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install matplotlib")


@pytest.fixture
def grid() -> Iterator[HyperCommGrid]:
    grid = commgrid.initialize(name="shown")
    assert grid is not None
    yield grid
    commgrid.shutdown()


def test_a_figure_comes_back(grid: HyperCommGrid) -> None:
    figure = grid.show(names=["dp", "tp"])
    assert figure is not None
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["dp: 1 group of 1, within a node", "tp: 1 group of 1, within a node"]
    assert figure.get_suptitle() == "1 rank\nrank 0 is tp 0, cp 0, dp 0, pp 0"


def test_a_notebook_shows_it_without_pyplot(grid: HyperCommGrid) -> None:
    figure = grid.show()
    drawn = figure._repr_svg_()  # type: ignore[union-attr]
    assert drawn.startswith("<?xml")
    assert "rank 0 is tp 0" in drawn
    assert drawn == figure._repr_svg_()  # type: ignore[union-attr]


@pytest.mark.full
def test_a_path_is_written(grid: HyperCommGrid, tmp_path: Path) -> None:
    for name in ("grid.svg", "grid.html"):
        assert grid.show(tmp_path / name) is None
        assert grid.show(str(tmp_path / name)) is None
        assert "rank 0 is tp 0" in (tmp_path / "grid.svg").read_text()
    assert "/*DATA*/" not in (tmp_path / "grid.html").read_text()
    with pytest.raises(commgrid.SpecError, match=r"no/grid.svg: cannot be written: No such"):
        grid.show(tmp_path / "no" / "grid.svg")
    with pytest.raises(commgrid.SpecError, match=r"grid.bmp: expected a file that ends in"):
        grid.show(tmp_path / "grid.bmp")


def test_nodes_are_the_launchers(grid: HyperCommGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def draw(view: object) -> None:
        seen.append(view)

    monkeypatch.setattr("commgrid.viz.live.draw_grid", draw)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    grid.show()
    grid.show(gpus_per_node=2)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    grid.show()
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "4(x2),2")  # uneven nodes stop no job that draws
    grid.show()
    assert [view.gpus_per_node for view in seen] == [4, 2, 8, 8]  # type: ignore[attr-defined]


def test_without_matplotlib_it_says_what_to_install(
    grid: HyperCommGrid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(commgrid.CommGridError, match="pip install matplotlib"):
        grid.show()
    grid.show(tmp_path / "grid.html")
    assert [path.name for path in tmp_path.iterdir()] == ["grid.html"]
