"""The picture of ranks that cannot finish."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commgrid.call_analysis.program import Step
from commgrid.call_analysis.verification import Call, Group, check
from commgrid.cli import main
from commgrid.cli.commands import verify as command
from commgrid.viz.figure import ALERT, drawing
from commgrid.viz.verdict_picture import MOST, arrows, draw_verdict, rows_of

Programs = dict[int, list[Step]]


def in_a_ring(ranks: int) -> Programs:
    """Each rank begins with its right neighbour, which begins with its own."""
    groups = [Group(f"r{rank}", (rank, (rank + 1) % ranks)) for rank in range(ranks)]
    return {
        rank: [Call(groups[rank], "all_reduce", where="a.py:1"),
               Call(groups[rank - 1], "all_reduce", where="a.py:2")]
        for rank in range(ranks)
    }  # fmt: skip


def skipped(ranks: int, absent: int) -> Programs:
    dp = Group("dp", tuple(range(ranks)))
    return {rank: [] if rank == absent else [Call(dp, "all_reduce")] for rank in range(ranks)}


@pytest.mark.parametrize("ranks", [3, 8])
def test_an_arrow_goes_from_who_waits_to_whom_it_waits_for(ranks: int) -> None:
    verdict = check(in_a_ring(ranks))
    rows = rows_of(verdict)
    assert [who for who, _ in rows] == [(rank,) for rank in range(ranks)]
    said = {
        (rows[start[0]][0][0], rows[end[0]][0][0], rows[start[0]][1][start[1]].call)
        for start, end in arrows(rows)
    }
    told = set()
    for place in verdict.places:
        waits = place.why.partition(" for rank ")[2].partition(",")[0]
        told.add((place.rank, int(waits), place.call))
    assert said == told
    assert len(said) == ranks


def test_ranks_that_do_the_same_share_a_row() -> None:
    rows = rows_of(check(skipped(1_000, 5)))
    assert [(len(ranks), len(boxes)) for ranks, boxes in rows] == [(999, 1), (1, 0)]
    assert rows[1][0] == (5,)


def test_what_is_drawn() -> None:
    pytest.importorskip("matplotlib")
    with drawing():
        (axes,) = draw_verdict(check(in_a_ring(3))).axes
    framed = [patch for patch in axes.patches if patch.get_edgecolor()[:3] == _rgb(ALERT)]
    assert (len(axes.patches), len(framed)) == (6, 3)
    words = [text.get_text() for text in axes.texts]
    assert words.count("") == 3  # arrows
    assert {"rank 0", "rank 1", "rank 2", "r0 all_reduce 0", "a.py:2"} <= set(words)
    assert axes.get_title(loc="left").startswith("cannot finish under nccl's rules: 3 calls")


def _rgb(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))


def test_only_so_many_rows_are_drawn() -> None:
    pytest.importorskip("matplotlib")
    with drawing():
        (axes,) = draw_verdict(check(in_a_ring(MOST + 5))).axes
    assert axes.get_title(loc="left").endswith("; 5 more rows are not drawn")


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "why.svg"
    monkeypatch.setattr(command.trace_files, "read", lambda folder: [])
    monkeypatch.setattr(command, "from_traces", lambda found: in_a_ring(3))
    assert main(["verify", "runs", "-o", str(path)]) == 1
    assert capsys.readouterr().out.endswith(f"\nwrote {path}\n")
    assert "r0 all_reduce 0" in path.read_text()
    assert main(["verify", "runs", "-o", str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["written"] == str(path)
    for other in ("why.txt", "why.html"):
        assert main(["verify", "runs", "-o", str(tmp_path / other)]) == 2
        assert "expected a file that ends in .svg, .png, .pdf\n" in capsys.readouterr().err
    path.unlink()
    monkeypatch.setattr(command, "from_traces", lambda found: {0: [], 1: []})
    assert main(["verify", "runs", "-o", str(path)]) == 0
    assert f"{path} was not written: there is nothing to draw" in capsys.readouterr().out
    assert not path.exists()
