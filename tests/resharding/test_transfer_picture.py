"""A transfer's plan as a file, as text and as a picture: what is shown is what is planned."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from commgrid import SpecError
from commgrid.cli import main
from commgrid.resharding.layouts import Form, GridLayouts, LayoutEntry, pack
from commgrid.resharding.plan import TransferPlan
from commgrid.resharding.traffic import Traffic
from commgrid.resharding.transfer_picture import blocks_of, read_traffic


def rows(start: int, stop: int) -> bytes:
    """A layout of some rows of a weight of 12."""
    form = Form((12, 64), "float32", 4, (((start, 0), (stop - start, 64)),))
    return pack([LayoutEntry("weight", form)])


def plan() -> TransferPlan:
    """tp 4 on ranks 0 to 3 to tp 3 on ranks 2 to 4, none of which has what it needs."""
    source = {rank: rows(3 * rank, 3 * rank + 3) for rank in range(4)}
    target = {2 + rank: rows(4 * rank, 4 * rank + 4) for rank in (1, 0, 2)}
    return TransferPlan(GridLayouts.of(source), GridLayouts.of(target))


def large() -> Traffic:
    """200 ranks to 130 others, of which 10 are among them."""
    chosen = random.Random(0)
    pairs = {
        (chosen.randrange(200), chosen.randrange(190, 320)): chosen.randrange(1, 10**9)
        for _ in range(3000)
    }
    copied = {rank: 10**6 * rank for rank in range(190, 200)}
    return Traffic(7, tuple(range(200)), tuple(range(190, 320)), pairs, copied)


def test_a_saved_plan_is_shown_as_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = plan()
    saved.save(tmp_path / "plan.json")
    assert main(["show", "--transfer", str(tmp_path / "plan.json")]) == 0
    assert capsys.readouterr().out.rstrip() == str(saved)
    assert main(["show", "--transfer", str(tmp_path / "plan.json"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "plan.json").read_text())
    row = 64 * 4
    # Rank 2 needs rows 0-3 and holds 6-8, rank 3 needs 4-7 and holds 9-11, rank 4 needs 8-11.
    expected = [[0, 2, 3 * row], [1, 2, row], [1, 3, 2 * row], [2, 3, 2 * row],
                [2, 4, row], [3, 4, 3 * row]]  # fmt: skip
    assert found == {
        "version": 1, "tensors": 1, "source": [0, 1, 2, 3], "target": [2, 3, 4],
        "pairs": expected, "copied": [], "on_one_host": 0,
    }  # fmt: skip


def test_a_file_has_all_of_a_plan(tmp_path: Path) -> None:
    large().save(tmp_path / "plan.json")
    assert read_traffic(tmp_path / "plan.json") == large()


def draw(traffic: Traffic) -> Any:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install matplotlib")
    from commgrid.resharding.transfer_picture import draw_transfer

    figure: Any = draw_transfer(traffic)
    top, _, middle, right = figure.axes
    heights = [bar.get_height() for bar in top.patches]
    half = len(heights) // 2
    (mesh, *rings) = middle.collections
    return {
        "cells": mesh.get_array().tolist(),
        "rings": sorted(tuple(map(int, at)) for ring in rings for at in ring.get_offsets()),
        "received": heights[:half],
        "copied": heights[half:],
        "sent": [bar.get_width() for bar in right.patches],
        "texts": {text.get_text() for text in middle.texts},
        "title": figure.get_suptitle(),
    }


def test_a_cell_is_what_a_rank_sends_to_another() -> None:
    whole = pack([LayoutEntry("weight", Form((12, 64), "float32", 4, (((0, 0), (12, 64)),)))])
    planned = TransferPlan(
        GridLayouts.of({0: whole, 1: whole}), GridLayouts.of({1: whole, 2: whole})
    )
    found = draw(planned.traffic)
    assert found["cells"] == [
        [planned.pairs.get((sender, receiver), 0) for receiver in (1, 2)] for sender in (0, 1)
    ]
    assert found["sent"] == list(planned.sent.values())
    assert found["received"] == [0, 12 * 64 * 4]
    assert found["copied"] == [12 * 64 * 4, 0]
    assert found["rings"] == [(0, 1)]  # the column of rank 1, its row
    assert found["texts"] == {"1.54 kB"}
    assert found["title"] == str(planned).splitlines()[0].replace(": ", ":\n", 1)


def test_a_block_is_the_sum_of_its_ranks() -> None:
    traffic = large()
    found = draw(traffic)
    senders, receivers = 50, 44  # 200 ranks in fours, and 130 in threes
    cells = [[0] * receivers for _ in range(senders)]
    for (sender, receiver), size in traffic.pairs.items():
        cells[sender // 4][(receiver - 190) // 3] += size
    assert found["cells"] == cells
    assert found["sent"] == list(map(sum, cells))
    assert found["received"] == [sum(column) for column in zip(*cells, strict=True)]
    assert sum(found["copied"]) == sum(traffic.copied.values())
    marked = {((rank - 190) // 3, rank // 4) for rank in range(190, 200)}
    assert found["rings"] == sorted(marked)
    assert found["texts"] == set()


@pytest.mark.parametrize("count", [1, 63, 64, 65, 1000])
def test_blocks_have_every_rank_once_and_are_few(count: int) -> None:
    ranks = [3 * number for number in range(count)]
    blocks = blocks_of(ranks)
    assert [rank for block in blocks for rank in block] == ranks
    assert len(blocks) <= 64
    assert len({len(block) for block in blocks[:-1]}) <= 1


def test_nothing_sent_is_a_picture_too() -> None:
    whole = {0: rows(0, 12)}
    found = draw(TransferPlan(GridLayouts.of(whole), GridLayouts.of(whole)).traffic)
    assert found["cells"] == [[0]]
    assert found["rings"] == [(0, 0)]


def test_equal_plans_are_equal_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install matplotlib")
    plan().save(tmp_path / "plan.json")
    for name in ("one.svg", "two.svg", "one.png"):
        argv = ["show", "--transfer", str(tmp_path / "plan.json"), "-o", str(tmp_path / name)]
        assert main(argv) == 0
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert "from rank" in (tmp_path / "one.svg").read_text()


GOOD = Traffic(1, (0,), (1,), {(0, 1): 8}, {}).as_dict()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "plan.json: cannot be read: No such file"),
        ("rows", "plan.json: expected what transfer.plan.save(FILE) writes"),
        ("[]", "expected what transfer.plan.save(FILE) writes"),
        ({"version": 1}, "KeyError: 'source'"),
        ({"version": 2, **GOOD}, "has version 2, this commgrid reads 1; save the plan again"),
        ({"version": 1, **GOOD, "pairs": [[0, 5, 8]]}, "ranks [5] are on neither side"),
        ({"version": 1, **GOOD, "pairs": [[0, 1, "8"]]}, "[0, 1, '8'] is no list of numbers"),
        ({"version": 1, **GOOD, "pairs": [[0, 1]]}, "ValueError: not enough values"),
        ({"version": 1, **GOOD, "copied": [[1]]}, "expected what transfer.plan.save(FILE)"),
        ({"version": 1, **GOOD, "source": [], "pairs": []}, "ValueError: no ranks"),
    ],
)
def test_another_file_is_an_error(
    text: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "plan.json").write_text(text if isinstance(text, str) else json.dumps(text))
    assert main(["show", "--transfer", str(tmp_path / "plan.json")]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--tp", "2"], ["--schedule", "1f1b"], ["--sharding", "5,6"]])
def test_a_plan_is_drawn_alone(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--transfer", "plan.json", *more]) == 2
    assert "would change nothing; it does not go with --transfer" in capsys.readouterr().err


def test_a_plan_is_no_page_and_needs_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan().save(tmp_path / "plan.json")
    page = str(tmp_path / "plan.html")
    assert main(["show", "--transfer", str(tmp_path / "plan.json"), "-o", page]) == 2
    assert "a page, .html, shows a grid" in capsys.readouterr().err
    with pytest.raises(SpecError, match=r"plan\.json: cannot be written: No such file"):
        plan().save(tmp_path / "none" / "plan.json")
