"""Shardings of packed documents, in letters and as a picture: what is shown is what is held."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from commgrid import SpecError
from commgrid.cli import main
from commgrid.context_parallel.balance import Mask, balance, balanced, pairs_of
from commgrid.context_parallel.ranges import Ranges
from commgrid.viz.figure import colour
from commgrid.viz.sharding_picture import draw_ranges, draw_sharding

LENGTHS = [30, 4, 9, 1, 20, 11]


def pairs(held: Sequence[Ranges], mask: Mask | None = None) -> list[int]:
    return [pairs_of(LENGTHS, own, mask or Mask()) for own in held]


def test_letters_stand_where_a_rank_holds_a_position() -> None:
    held = balanced(LENGTHS, 3)
    top, *rows = draw_ranges(LENGTHS, held, pairs(held), width=100).splitlines()
    assert top.split()[1] == "0" + "-" * 29 + "1---2--------34" + "-" * 19 + "5" + "-" * 10
    assert len(rows) == 3
    for rank, row in enumerate(rows):
        _, number, letters, tokens, *_ = row.split()
        assert int(number) == rank
        found = [position for position, letter in enumerate(letters) if letter == "#"]
        assert found == [p for start, stop in held[rank] for p in range(start, stop)]
        assert letters.count(".") == sum(LENGTHS) - len(found)
        assert int(tokens) == len(found)


@pytest.mark.parametrize("width", [1, 2, 7, 40])
def test_a_column_of_a_long_sequence_stands_for_several_positions(width: int) -> None:
    held = balanced(LENGTHS, 2)
    step = -(-sum(LENGTHS) // width)
    for rank, row in enumerate(
        draw_ranges(LENGTHS, held, pairs(held), width=width).splitlines()[1:]
    ):
        letters = row.split()[2]
        assert len(letters) <= width
        own = {p for start, stop in held[rank] for p in range(start, stop)}
        for column, letter in enumerate(letters):
            positions = range(column * step, min((column + 1) * step, sum(LENGTHS)))
            expected = {0: ".", len(positions): "#"}.get(len(own.intersection(positions)), "+")
            assert letter == expected


def test_a_picture_has_every_piece_in_its_documents_colour() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install matplotlib")
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_hex

    mask = Mask(window=8)
    held = balance(LENGTHS, 3, mask)
    document = [number for number, length in enumerate(LENGTHS) for _ in range(length)]
    figure = draw_sharding(LENGTHS, held, pairs(held, mask), str(mask))
    where, share = figure.axes
    assert "75 tokens in 6 documents over 3 ranks, window 8" in where.get_title(loc="left")
    rows = [one for one in where.collections if isinstance(one, PolyCollection)]
    assert len(rows) == 4  # the documents, and three ranks
    for row, own in zip(rows, [((0, 75),), *held], strict=True):
        drawn = []
        for path, face in zip(row.get_paths(), row.get_facecolor(), strict=True):
            box = path.get_extents()
            for position in range(round(box.x0), round(box.x1)):
                assert to_hex(face) == colour(document[position]).lower()
                drawn.append(position)
        assert drawn == [p for start, stop in own for p in range(start, stop)]
    assert len(share.patches) == 6
    assert {round(bar.get_width()) for bar in share.patches} == {1}


def test_the_command_line_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--sharding", "30,4,9,1,20,11", "--cp", "3"]) == 0
    held = balanced(LENGTHS, 3)
    assert capsys.readouterr().out.rstrip() == draw_ranges(LENGTHS, held, pairs(held))
    assert main(["show", "--sharding", "5x3,2", "--cp", "2", "--mask", "full", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["lengths"] == [5, 5, 5, 2]
    expected = balanced([5, 5, 5, 2], 2, causal=False)
    assert [[tuple(r) for r in rank["ranges"]] for rank in said["ranks"]] == list(
        map(list, expected)
    )
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install matplotlib")
    for name in ("one.svg", "two.svg"):
        target = str(tmp_path / name)
        assert main(["show", "--sharding", "5x3,2", "--cp", "2", "--mask", "3", "-o", target]) == 0
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--sharding", "5,6"], "--sharding 5,6: needs --cp N"),
        (["--sharding", "5,six", "--cp", "2"], "--sharding 5,six: 'six' is no length"),
        (["--sharding", "5x", "--cp", "2"], "'5x' is no length"),
        (["--sharding", "5x0", "--cp", "2"], "lengths is empty"),
        (["--mask", "full"], "--mask full: would change nothing; it goes with --sharding LENGTHS"),
        (["--sharding", "5,0", "--cp", "2"], r"lengths[1]=0"),
        (["--sharding", "5", "--cp", "two"], "--cp two: expected a whole number"),
        (["--sharding", "5", "--cp", "2", "--mask", "odd"], "--mask odd: expected causal, full"),
        (["--sharding", "5", "--cp", "2", "--mask", "0"], "window=0: expected 1 key"),
    ],
)
def test_what_cannot_be_shown_is_said(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", *flags]) != 0
    assert said in capsys.readouterr().err


def test_a_width_of_nothing_is_an_error() -> None:
    with pytest.raises(SpecError, match="width=0: expected 1 column"):
        draw_ranges([4], balanced([4], 2), [10, 0], width=0)
