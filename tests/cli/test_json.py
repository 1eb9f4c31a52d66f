"""The JSON of all commands is of one schema, which says its version."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from commgrid.cli import main
from commgrid.cli.output import JSON_VERSION
from commgrid.testing import run_on_ranks

GRID = ["--tp", "2", "--pp", "2", "--world-size", "8"]
SCHEDULE = ["--schedule", "1f1b", "--stages", "2", "--microbatches", "4"]


def said(*argv: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([*argv, "--json"]) == 0
    return out.getvalue()


def strict(text: str) -> dict[str, Any]:
    """One line that any JSON reader takes, and no NaN, which only Python's does."""
    assert text.count("\n") == 1

    def refuse(word: str) -> None:
        raise AssertionError(word)

    found = json.loads(text, parse_constant=refuse)
    assert isinstance(found, dict)
    return found


def checked() -> str:
    return said("check", "--tp", "2")


def test_every_command_says_its_version_first(tmp_path: Path) -> None:
    page = str(tmp_path / "grid.html")
    found = {
        "plan": said("plan", *GRID),
        "explain": said("explain", *GRID, "--rank", "5"),
        "check": run_on_ranks(checked, 2, backend=None, launcher="torchrun")[0],
        "show": said("show", *GRID),
        "show schedule": said("show", *SCHEDULE),
        "show -o": said("show", *GRID, "-o", page),
    }
    keys = {name: list(strict(text)) for name, text in found.items()}
    assert {held[0] for held in keys.values()} == {"version"}
    versions = {name: strict(text)["version"] for name, text in found.items()}
    assert versions == {**dict.fromkeys(found, JSON_VERSION), "plan": 2}
    assert {name: held[1:] for name, held in keys.items()} == {
        "plan": ["world_size", "spec", "groups", "communicators", "per_rank", "nccl_gb", "savings"],
        "explain": ["rank", "world_size", "coordinate", "groups", "communicators"],
        "check": ["world_size", "ok", "rank", "rows"],
        "show": ["commgrid", "title", "ranks", "nodes", "regions", "coordinates", "names", "shown",
                 "rank", "schedules"],
        "show schedule": ["schedule", "makespan", "bubble_fraction", "peak_live"],
        "show -o": ["written"],
    }  # fmt: skip
    assert strict(found["show -o"])["written"] == page


def test_wrong_input_prints_no_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--tp", "3", "--world-size", "16", "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
