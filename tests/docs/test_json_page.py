"""docs/reference/json.md has every key of the JSON that commands print, with its type."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from commgrid import cli
from commgrid.audit.auditing import Audit
from commgrid.audit.dry import Dry
from commgrid.audit.finding import Comparison, Divergence
from commgrid.call_records.call import Call, Group
from commgrid.call_records.trace import Trace
from commgrid.cli.output import JSON_VERSION, as_json
from commgrid.testing import run_on_ranks
from tests.docs.pages import DOCS, entries
from tests.records import save

PAGE = DOCS / "reference" / "json.md"
TYPES = {
    "int": int,
    "float": float | int,
    "str": str,
    "bool": bool,
    "mapping": dict,
    "list": object,
}

GRID = ["--tp", "2", "--pp", "2", "--ep", "2", "--world-size", "8"]
TP = Group("tp", (0,), "1", "gloo")
TRACE = Trace(
    0, (Call(TP, "all_reduce", shape=(4,), dtype="float32", where="a.py:1 f", issued=1.0),),
    entered={TP: 1}, at=2.0, steps=((0, 0.5),),
)  # fmt: skip
MODEL = ["--model", "mixtral-8x22b", "--cluster", "h100"]


def said(*argv: str) -> Any:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert cli.main([*argv, "--json"]) == 0
    return json.loads(out.getvalue())


def paths(value: Any, known: dict[str, str], at: str = "") -> dict[str, list[Any]]:
    """The keys of a JSON value in the page's spelling, with their values."""
    found: dict[str, list[Any]] = {}
    if known.get(at) in ("mapping", "list"):
        return {at: [value]}
    if isinstance(value, dict) and value:
        is_open = any(re.match(rf"{re.escape(at)}\.NAME(\W|$)", key) for key in known)
        inner = [
            (f"{at}.NAME" if is_open and at else f"{at}.{key}".lstrip("."), one)
            for key, one in value.items()
        ]
    elif isinstance(value, list) and value:
        inner = [(f"{at}[]", v) for v in value]
    else:
        return {at: [value]}
    for key, one in inner:
        for path, values in paths(one, known, key).items():
            found.setdefault(path, []).extend(values)
    return found


def printed(which: str, folder: Path) -> Any:
    save(folder, TRACE)
    argv = {
        "plan": ["plan", *GRID, "--cluster", "h100", "--gpus-per-node", "1"],
        "plan --model": ["plan", *MODEL, "--world-size", "128", "--pp", "4", "--tp", "4"],
        "plan --auto": ["plan", "--auto", *MODEL, "--world-size", "128", "--pp", "4"],
        "explain": ["explain", *GRID, "--rank", "5", "--cluster", "h100"],
        "show for a grid": ["show", *GRID, "--rank", "5"],
        "show --schedule": ["show", "--schedule", "1f1b", "--stages", "2", "--microbatches", "4"],
        "trace": ["trace", str(folder)],
        "diagnose": ["diagnose", str(folder)],
        "verify": ["verify", str(folder)],
    }
    return said(*argv[which])


def schema(which: str) -> dict[str, str]:
    heading = "`show` for a grid" if which == "show for a grid" else f"`{which}`"
    rows = entries(PAGE, r"^\| `.+? \| \w+ \| .+ \|$", f"JSON of {heading}")
    cells = [row.split(" | ") for row in rows]
    found = {key: kind for keys, kind, *_ in cells for key in re.findall(r"`(.+?)`", keys)}
    if which == "plan --auto":
        step = {key: kind for key, kind in schema("plan --model").items() if key[:5] == "step."}
        found |= {key.replace("step", "best[]", 1): kind for key, kind in step.items()}
    return found


@pytest.mark.parametrize(
    "which",
    [
        "plan", "plan --model", "plan --auto", "explain", "show for a grid", "show --schedule",
        "trace", "diagnose", "verify",
    ],
)  # fmt: skip
def test_json_is_as_the_page_says(which: str, tmp_path: Path) -> None:
    holds(which, printed(which, tmp_path))


def test_json_of_audit_is_as_the_page_says() -> None:
    finding = Divergence(
        "dp=2", 1, "gradient", "a", "not reduced", ("dp",), 0.5, "b", (("c", "d", "e"),)
    )
    found = Comparison("dp=2", 1, {"weights": 3}, (finding,), 0.0, ("a note",), 1e-9)
    made = Audit("train.py", "float64", (found,)).as_dict()
    holds("audit", json.loads(as_json(made)))
    dry = Dry("train.py", "tp=2", 64, 64, 1000, "runs/dry").as_dict()
    holds("audit --dry", json.loads(as_json(dry)))


def test_json_of_check_is_as_the_page_says(tmp_path: Path) -> None:
    def on_rank() -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert cli.main(["check", "--tp", "2", "--json"]) == 0
        return out.getvalue()

    first, second = run_on_ranks(on_rank, 2, backend=None, launcher="torchrun")
    assert second == ""
    holds("check", json.loads(first.splitlines()[-1]))


def test_json_of_bench_is_as_the_page_says() -> None:
    def on_rank() -> str:
        out = io.StringIO()
        argv = ["bench", "--tp", "2", "--sizes", "64", "--iters", "1", "--repeats", "1", "--json"]
        with contextlib.redirect_stdout(out):
            assert cli.main(argv) == 0
        return out.getvalue()

    holds("bench", json.loads(run_on_ranks(on_rank, 2, backend=None, launcher="torchrun")[0]))


def holds(which: str, found: Any) -> None:
    known = schema(which)
    there = paths(found, known)
    assert set(there) == set(known)
    for path, values in there.items():
        kind = TYPES[known[path]]
        assert all(value is None or isinstance(value, kind) for value in values), path
    assert entries(PAGE, rf"`version` is {JSON_VERSION}\.")
    assert next(iter(found)) == "version"
