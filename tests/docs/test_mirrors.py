"""Lists that a page repeats from the code: both have the same entries."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import commgrid.errors
import megatron_adapter.errors
from commgrid.errors import CommGridError
from commgrid.planning.group_row import NCCL_OPTIONS
from commgrid.planning.yaml_keys import OPTIONS, REGION_OPTIONS, ROW_OPTIONS
from tests.docs import generate
from tests.docs.pages import DOCS, ROOT, entries, sections
from tests.house import ROOMS

CONTRIBUTING = ROOT / "CONTRIBUTING.md"
COMMANDS, YAML, ERRORS = (DOCS / f"{name}.md" for name in ("command_line", "yaml", "errors"))
CLASSES = [
    one
    for module in (commgrid.errors, megatron_adapter.errors)
    for one in vars(module).values()
    if inspect.isclass(one) and issubclass(one, CommGridError) and one.__module__ == module.__name__
]


@pytest.mark.parametrize("page", generate.PAGES, ids=lambda page: page.name)
def test_tables_are_made_from_the_source(page: Path) -> None:
    """`python tests/docs/generate.py` writes them."""
    text = page.read_text(encoding="utf-8")
    assert generate.made(text) == text


def test_every_table_is_on_a_page() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in generate.PAGES)
    missing = [t for t in generate.tables() if f"<!-- made from the source: {t} -->" not in pages]
    assert missing == []


def test_variables_that_the_code_reads() -> None:
    read = {"COLUMNS"}  # by Python, asked for the terminal's width
    for path in (ROOT / "commgrid").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        of_tests = path.parent.name in ("testing", "launching")
        if "environ" in text and path.name != "registry.py" and not of_tests:
            words = [n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant)]
            read |= {
                w for w in words if isinstance(w, str) and re.fullmatch("[A-Z][A-Z0-9_]{3,}", w)
            }
    assert set(entries(COMMANDS, r"`([A-Z][A-Z0-9_]{3,})`", "Environment")) == read


def test_commands_of_the_adapter() -> None:
    text = (ROOT / "megatron_adapter" / "__main__.py").read_text(encoding="utf-8")
    listed = entries(COMMANDS, r"^\| `(\w+)", "`python -m megatron_adapter`")
    assert listed == re.findall(r'add_parser\(\s*"(\w+)"', text)


def keys_of_a_file() -> list[str]:
    """Every key of a grid's YAML, as the page heads it."""
    return [
        *OPTIONS,
        *(f"regions.NAME.{key}" for key in REGION_OPTIONS),
        *(f"groups.NAME.{key}" for key in ROW_OPTIONS),
    ]


def test_keys_of_a_file_have_a_section() -> None:
    shown = {heading.strip("`") for heading in sections(YAML) if heading.startswith("`")}
    assert shown == set(keys_of_a_file())


def test_nccl_options() -> None:
    rows = entries(YAML, r"^\| `(\w+)` \| (?:bool|int|str) \|", "`groups.NAME.nccl`")
    kinds = entries(YAML, r"^\| `\w+` \| (bool|int|str) \|", "`groups.NAME.nccl`")
    assert list(zip(rows, kinds, strict=True)) == [
        (name, kind.__name__) for name, kind in NCCL_OPTIONS.items()
    ]


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_classes_of_errors_with_what_else_they_are(error: type[CommGridError]) -> None:
    (row,) = entries(ERRORS, rf"^\| \[?`{error.__name__}`.*\|$")
    for base in error.__bases__:
        assert base is CommGridError or f"`{base.__name__}`" in row


def test_files_that_contributing_names() -> None:
    named = entries(CONTRIBUTING, r"`([\w./-]+(?:/|\.py|\.md|\.yml))`")
    assert named
    for path in named:
        if "NAME" not in path and path != "__init__.py":
            folders = (ROOT, ROOT / "commgrid", ROOT / "examples")
            assert any((one / path).exists() for one in folders), path


def test_names_in_the_files_of_contributing() -> None:
    """`NAME` (`path`) says where a name is."""
    pattern = r"`\w+`\s+\(`[\w./]+`\)"
    named = [re.findall(r"`(.+?)`", one) for one in entries(CONTRIBUTING, pattern)]
    assert len(named) >= 9
    for name, path in named:
        assert re.search(rf"\b{name}\b", (ROOT / path).read_text(encoding="utf-8")), (name, path)


def test_rooms_of_the_picture_are_those_of_the_house() -> None:
    text = CONTRIBUTING.read_text(encoding="utf-8")
    picture = text.partition("<!-- made from the source: house -->")[2].partition("<!-- end -->")[0]
    drawn = re.findall(r"^ .{19}  (.*)$", picture, re.M)
    assert {name for line in drawn for name in line.split()} == {room.name for room in ROOMS}
