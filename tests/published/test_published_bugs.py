"""Published bugs: the command that finds each, and the mended program passing."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from commgrid.testing import GridsDiffer, RanksWait, finishes, same_on_grids
from tests.published.programs import PUBLISHED, STEPS, Published

FOUND = [each for each in PUBLISHED if each.command]


def run(bug: Published, mended: bool) -> None:
    assert bug.program is not None
    program = functools.partial(bug.program, mended)
    if bug.command == "audit":
        same_on_grids(program, bug.grids, steps=STEPS)
    else:
        finishes(program, bug.grids[0], backend="nccl")


@pytest.mark.parametrize("bug", FOUND, ids=[each.source for each in FOUND])
def test_it_is_found(bug: Published) -> None:
    with pytest.raises(GridsDiffer if bug.command == "audit" else RanksWait) as raised:
        run(bug, mended=False)
    for said in bug.said:
        assert said in str(raised.value), str(raised.value)


@pytest.mark.parametrize("bug", FOUND, ids=[each.source for each in FOUND])
def test_the_mended_program_passes(bug: Published) -> None:
    run(bug, mended=True)


def test_the_page_says_how_many_are_found() -> None:
    words = " ".join((Path(__file__).parents[2] / "docs" / "debugging.md").read_text().split())
    numbers = {3: "three", 9: "nine"}
    commands = [each.command for each in PUBLISHED]
    assert f"has {numbers[len(PUBLISHED)]} bugs" in words
    for command in ("audit", "verify", ""):
        said = f"`commgrid {command}` finds" if command == "audit" else f"`commgrid {command}`"
        said = said if command else "The other"
        assert f"{said} {numbers[commands.count(command)]}" in words
