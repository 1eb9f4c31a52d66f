"""Clients that others wrote, on a grid's groups: the losses they have without, bit by bit."""

from __future__ import annotations

import importlib
import json
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

import commgrid
from commgrid.testing import run_on_ranks
from tests.examples.curves import ROOT, load
from tests.process_groups import group_count

LAYOUTS: dict[str, list[list[str]]] = {
    "accelerate": [["--dp-shard", "4"], ["--dp-replicate", "2", "--dp-shard", "2"]],
    "lightning": [["--dp", "4"], ["--dp", "2", "--tp", "2"]],
    "deepspeed": [["--zero", "2"], ["--tp", "2", "--zero", "1"]],
    "torchtitan": [["--dp-shard", "4"], ["--dp-shard", "2", "--tp", "2"]],
}
CASES = [(client, layout) for client, layouts in LAYOUTS.items() for layout in layouts]
PAGE = (ROOT / "docs" / "meshes.md").read_text()


@pytest.fixture
def loud() -> Iterator[None]:
    """Clients warn of what is not commgrid's to change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def run(client: str, arguments: list[str]) -> int | None:
    """How many groups there were at its end beyond WORLD and the grid's; None without a grid."""
    warnings.simplefilter("ignore")
    made: list[int] = []

    def counted(end: Callable[..., None], *names: str) -> None:
        made.append(group_count() - 1 - len(commgrid.get_grid(*names).communicators))
        end(*names)

    commgrid.destroy = partial(counted, commgrid.destroy)
    commgrid.shutdown = partial(counted, commgrid.shutdown)
    example = load(f"clients/with_{client}")
    example.train(example.parse(arguments))
    return made[0] if made else None


@pytest.mark.full("accelerate *", "deepspeed *", "lightning *", "torchtitan *")
@pytest.mark.usefixtures("loud")
@pytest.mark.parametrize(("client", "layout"), CASES, ids=[" ".join((c, *o)) for c, o in CASES])
def test_losses_are_those_without_commgrid(client: str, layout: list[str], tmp_path: Path) -> None:
    try:
        importlib.import_module(client)
    except ImportError as error:
        pytest.skip(f"{error}: pip install --group clients")
    losses = {}
    for kind in ("ours", "plain"):
        path = tmp_path / kind
        arguments = [*layout, "--metrics", str(path), *(["--plain"] if kind == "plain" else [])]
        # The ranks set variables of the environment.
        made = run_on_ranks(
            run, 4, client, arguments, backend=None, launcher="torchrun", timeout=300,
            environ={"TORCHELASTIC_RUN_ID": "tests"}, check=False,
        )  # fmt: skip
        assert made == [0 if kind == "ours" else None] * 4
        losses[kind] = [json.loads(line)["loss"] for line in path.read_text().splitlines()]
    assert len(losses["plain"]) == 10
    assert losses["plain"][-1] < losses["plain"][0]
    assert losses["ours"] == losses["plain"]


@pytest.mark.parametrize("client", LAYOUTS)
def test_the_page_says_how_many_lines_a_user_adds(client: str) -> None:
    source = (ROOT / "examples" / "clients" / f"with_{client}.py").read_text()
    marked = len(re.findall(r"  # commgrid$", source, re.MULTILINE))
    (row,) = re.findall(rf"^\| .*\(`with_{client}\.py`\) .*$", PAGE, re.MULTILINE)
    assert f"| {marked} |" in row
    assert all(f"`{' '.join(layout)}`" in row for layout in LAYOUTS[client])
