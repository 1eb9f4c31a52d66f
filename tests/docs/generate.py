"""Tables of pages that are made from the source: commands, keys of a file, errors.

    python tests/docs/generate.py

writes them anew, each between its two comments. A test compares.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import commgrid.errors
from commgrid.cli.parser import COMMANDS
from commgrid.planning.yaml_keys import OPTIONS, REGION_OPTIONS, ROW_OPTIONS, Option
from tests.docs.pages import DOCS, ROOT
from tests.house import FLOORS, ROOMS

PAGES = (
    ROOT / "CONTRIBUTING.md",
    *(DOCS / f"{name}.md" for name in ("command_line", "errors", "yaml")),
)
_TABLE = re.compile(r"<!-- made from the source: ([^>]+) -->\n.*?<!-- end -->\n", re.DOTALL)


def tables() -> dict[str, str]:
    """Every table by the name that its first comment has."""
    return {
        "commands": _table(
            "command", "does",
            ((f"[`commgrid {name}`](#commgrid-{name})", text) for name, text in COMMANDS.items()),
        ),
        "keys": _keys(OPTIONS),
        "keys of a region": _keys(REGION_OPTIONS),
        "keys of a row": _keys(ROW_OPTIONS),
        "errors": _errors(),
        "house": _house(),
        "rooms": _rooms(),
    }  # fmt: skip


def made(page: str) -> str:
    """A page with its tables as they are now."""
    found = tables()
    return _TABLE.sub(
        lambda at: f"<!-- made from the source: {at[1]} -->\n{found[at[1]]}<!-- end -->\n", page
    )


def _errors() -> str:
    lines = ["| class | also a | means | usual cure |", "|---|---|---|---|"]
    for name, error in vars(commgrid.errors).items():
        if isinstance(error, type) and issubclass(error, commgrid.errors.CommGridError):
            means, _, cure = inspect.cleandoc(error.__doc__ or "").partition("\n\nFix: ")
            means = " ".join(means.split())
            lines.append(f"| `{name}` | `{error.__bases__[-1].__name__}` | {means} | {cure} |")
    return "\n".join(lines) + "\n"


def _house() -> str:
    """The floors as a picture, the ground at the bottom."""
    width = max(map(len, FLOORS))
    lines = []
    for floor, rooms in reversed(FLOORS.items()):
        names = textwrap.wrap(" ".join(room.name for room in rooms), 84)
        lines.append("─" * (width + 88))
        lines += [f" {floor if not i else '':{width}}  {row}" for i, row in enumerate(names)]
    return "\n".join(["<!-- drawing -->", "```text", *lines, "─" * (width + 88), "```", ""])


def _rooms() -> str:
    lines = ["| room | holds | takes | gives |", "|---|---|---|---|"]
    for room in ROOMS:
        lines.append(f"| `{room.name}` | {room.noun} | {room.takes} | {room.gives} |")
    return "\n".join(lines) + "\n"


def _keys(options: Mapping[str, Option]) -> str:
    lines = ["| key | says | type | default |", "|---|---|---|---|"]
    for key, option in options.items():
        words = ", ".join(f"`{word}`" for word in option.words)
        kind = ", or ".join(filter(None, (words, option.value)))
        lines.append(f"| `{key}` | {option.about} | {kind} | {option.shown} |")
    return "\n".join(lines) + "\n"


def _table(first: str, second: str, rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"| {first} | {second} |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(made(path.read_text(encoding="utf-8")), encoding="utf-8")
