"""Lists that a page repeats from the code: both have the same entries."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import commgrid.errors
import megatron_adapter.errors
from commgrid import GridSpec, SpecError, cli
from commgrid.errors import CommGridError
from commgrid.planning import groups, spec
from tests.docs.pages import DOCS, ROOT, entries, sections

ARCHITECTURE = DOCS / "architecture.md"
COMMANDS, YAML, ERRORS = (DOCS / f"{name}.md" for name in ("command_line", "yaml", "errors"))
COMMON = "Describing the grid"
FLAG = r"`(--?[a-z][\w-]*)"
CLASSES = [
    one
    for module in (commgrid.errors, megatron_adapter.errors)
    for one in vars(module).values()
    if inspect.isclass(one) and issubclass(one, CommGridError) and one.__module__ == module.__name__
]


def flags(command: str) -> set[str]:
    parser = cli._parsers()[1][command]
    every = {flag for action in parser._actions for flag in action.option_strings}
    return every - {"-h", "--help", "--output"}


def test_commands() -> None:
    listed = entries(COMMANDS, r"^\| \[`commgrid (\w+)`\]")
    assert sorted(listed) == sorted(cli._parsers()[1])
    every = set[str]().union(*map(flags, listed))
    assert set(entries(COMMANDS, FLAG + "[ `]", COMMON)) <= every


@pytest.mark.parametrize("command", cli._parsers()[1])
def test_flags_of_a_command(command: str) -> None:
    section = f"`commgrid {command}`"
    told = {*entries(COMMANDS, FLAG, section), *entries(COMMANDS, FLAG, COMMON)}
    rows = " ".join(entries(COMMANDS, r"^\| `-.*", section))
    assert flags(command) <= told
    assert set(re.findall(FLAG + "[ `]", rows)) <= flags(command)


def test_variables_that_the_code_reads() -> None:
    read = {"COLUMNS"}  # by Python, asked for the terminal's width
    for path in (ROOT / "commgrid").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "environ" in text and path.name != "registry.py" and path.parent.name != "testing":
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
    with pytest.raises(SpecError) as raised:
        GridSpec.from_dict({"axes": {"dp": 1}, "regions": {"expert": {"?": 1}}})
    of_region = re.search(r"expected (\w+) and (\w+)$", str(raised.value))
    assert of_region
    return [
        *spec._KEYS,
        *(f"regions.NAME.{key}" for key in of_region.groups()),
        *(f"groups.NAME.{key}" for key in groups._ENTRY_KEYS),
    ]


def test_keys_of_a_file_have_a_type_and_a_default() -> None:
    shown = {heading.strip("`") for heading in sections(YAML) if heading.startswith("`")}
    assert shown == set(keys_of_a_file())
    for key in shown:
        assert entries(YAML, r"^\| type \| .+ \|$", f"`{key}`"), key
        assert entries(YAML, r"^\| default \| .+ \|$", f"`{key}`"), key


def test_nccl_options() -> None:
    rows = entries(YAML, r"^\| `(\w+)` \| (?:bool|int|str) \|", "`groups.NAME.nccl`")
    kinds = entries(YAML, r"^\| `\w+` \| (bool|int|str) \|", "`groups.NAME.nccl`")
    assert list(zip(rows, kinds, strict=True)) == [
        (name, kind.__name__) for name, kind in groups.NCCL_OPTIONS.items()
    ]


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_classes_of_errors_with_what_else_they_are(error: type[CommGridError]) -> None:
    (row,) = entries(ERRORS, rf"^\| \[?`{error.__name__}`.*\|$")
    for base in error.__bases__:
        assert base is CommGridError or f"`{base.__name__}`" in row


@pytest.mark.parametrize("page", [ARCHITECTURE, ROOT / "CONTRIBUTING.md"], ids=lambda p: p.name)
def test_files_that_a_page_names(page: Path) -> None:
    named = entries(page, r"`([\w./-]+(?:/|\.py|\.md|\.yml))`")
    assert named
    for path in named:
        if "NAME" not in path and path != "__init__.py":
            folders = (ROOT, ROOT / "commgrid", ROOT / "examples")
            assert any((one / path).exists() for one in folders), path


def test_names_in_the_files_of_the_architecture() -> None:
    """`NAME` (`path`) says where a name is."""
    pattern = r"`\w+`\s+\(`[\w./]+`\)"
    named = [re.findall(r"`(.+?)`", one) for one in entries(ARCHITECTURE, pattern)]
    assert len(named) >= 9
    for name, path in named:
        assert re.search(rf"\b{name}\b", (ROOT / path).read_text(encoding="utf-8")), (name, path)


def test_rooms_of_the_picture_in_the_order_of_their_imports() -> None:
    from tests.test_layering import ROOMS

    rooms = {path.name + "/" for path in (ROOT / "commgrid").iterdir() if path.is_dir()}
    rooms |= {path.name for path in (ROOT / "commgrid").glob("*.py")}
    rooms -= {"__pycache__/", "__init__.py", "__main__.py"}
    text = ARCHITECTURE.read_text(encoding="utf-8")
    picture = text[text.index("errors.py, version.py") :].partition("```")[0]
    assert {room for room in rooms if room not in picture} == set()
    listed = re.findall(r"^  (\w+)(?:/|\.py)", picture[picture.index("torch\n  runtime") :], re.M)
    places = [ROOMS.index(room) for room in listed if room in ROOMS]
    assert places == sorted(places)
