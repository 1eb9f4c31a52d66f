"""Output that pages show is printed by the Python, the commands or the test that the page names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from commgrid import GridSpec, GroupPlan
from tests.docs import pages
from tests.docs.pages import BESIDE, DOCS, FRONT, PAGES, ROOT, Block, name_of

MOST_NOT_RUN = 17
"""Blocks of all pages without a test that runs or compares them; lower it with their number."""

RUN = [
    pytest.param(page, block, id=f"{name_of(page)}:{number}")
    for page in [*BESIDE, *PAGES]
    for number, block in enumerate(pages.outputs(page, "run"))
]


def test_all_output_says_where_it_comes_from() -> None:
    for page in [*FRONT, *PAGES]:
        for block in pages.outputs(page):
            kind, _, rest = block.comment.partition(": ")
            where = f"{name_of(page)}:{block.line}"
            assert kind in ("printed", "run", "checked", "drawing", "not run"), where
            if kind == "checked":
                file, _, test = rest.partition("::")
                assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), where


def test_every_block_has_a_language() -> None:
    for page in [*FRONT, *PAGES]:
        for block in pages.blocks(page):
            assert block.language, f"{name_of(page)}:{block.line}"


def test_blocks_that_are_not_run_say_why_and_are_rare() -> None:
    reasons = [why for page in [*BESIDE, *PAGES] for why in pages.not_run(page)]
    assert all(len(why.split()) >= 2 for why in reasons), reasons
    assert len(reasons) <= MOST_NOT_RUN, reasons


@pytest.mark.nightly
@pytest.mark.parametrize(("page", "block"), RUN)
def test_commands_print_the_text_below_them(page: Path, block: Block, tmp_path: Path) -> None:
    said, errors, shown = pages.run_in_shell(page, block, tmp_path)
    assert pages.prints(f"…\n{pages.normal(shown)}\n…", pages.normal(said)), said + errors


def plan_of(text: str, ranks: int, rank: int) -> GroupPlan:
    """The plan of one rank for the arguments of `commgrid.initialize` that a page shows."""
    call = re.search(r"initialize\((.+?)\)", text)
    assert call
    sizes = {key: int(size) for key, size in re.findall(r"(\w+)=(\d+)", call[1])}
    return GroupPlan.for_rank(GridSpec.build(**sizes).resolve(ranks), rank)


def drawing(page: str, test: str) -> str:
    """The block of a page that this test checks."""
    (found,) = [b for b in pages.outputs(DOCS / page, "checked") if b.comment.endswith(f"::{test}")]
    return found.text


def test_groups_in_the_drawing_of_concepts() -> None:
    text = drawing("concepts.md", "test_groups_in_the_drawing_of_concepts")
    groups = plan_of(text, 8, 5).groups
    named = re.findall(r'get_group\("(\w+)"\) +([\d ]+)$', text, re.M)
    assert len(named) == 4
    assert {name: groups[name] for name, _ in named} == {
        name: tuple(map(int, ranks.split())) for name, ranks in named
    }


def test_groups_in_the_drawing_of_experts() -> None:
    text = drawing("experts.md", "test_groups_in_the_drawing_of_experts")
    for name in ("tp", "ep"):
        row = re.search(rf"\b{name} +(\d[\d |]+)", text)
        assert row
        for shown in row[1].split("|"):
            ranks = tuple(map(int, shown.split()))
            assert {plan_of(text, 8, rank).groups[name] for rank in ranks} == {ranks}
    replicas = re.search(r"edp (\d+) (\d+)", text)
    assert replicas
    assert plan_of(text, 8, 0).groups["edp"] == tuple(map(int, replicas.groups()))


def test_rows_in_the_drawing_of_bridges() -> None:
    """Which rank has each row; the page says that parts are cut as `torch.tensor_split` cuts."""
    text = drawing("between_grids.md", "test_rows_in_the_drawing_of_bridges")
    for ranks, shown in re.findall(r"(\d+) ranks +([\d ]+)$", text, re.M):
        parts = torch.arange(10).tensor_split(int(ranks))
        assert [rank for rank, part in enumerate(parts) for _ in part] == [
            int(rank) for rank in shown.split()
        ]
