"""Tables of pages that are made from the source: commands, flags, keys of a file, errors.

    python tests/docs/generate.py

writes them anew, each between its two comments. A test compares.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

from commgrid.cli.parser import parsers

sys.path.insert(0, str(Path(__file__).parents[2]))

import commgrid.errors
from commgrid.cli.parser import COMMANDS
from commgrid.planning.yaml_keys import OPTIONS, REGION_OPTIONS, ROW_OPTIONS, Option
from tests.docs.pages import DOCS
from tests.house import FLOORS, ROOMS

PAGES = tuple(DOCS / f"{name}.md" for name in ("architecture", "command_line", "errors", "yaml"))
_TABLE = re.compile(r"<!-- made from the source: ([^>]+) -->\n.*?<!-- end -->\n", re.DOTALL)
_OF_A_GRID = "grid"


def tables() -> dict[str, str]:
    """Every table by the name that its first comment has."""
    found = {
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
    for name, parser in parsers()[1].items():
        groups = {group.title: group for group in parser._action_groups}
        shared = groups[_OF_A_GRID]._group_actions if _OF_A_GRID in groups else []
        if name == "plan":
            found["flags of a grid"] = _flags(parser, [*shared, *_json(parser)])
        own = [a for a in parser._actions if a not in shared and "--help" not in a.option_strings]
        found[f"flags of {name}"] = _flags(
            parser, [a for a in own if not shared or a.dest != "json"]
        )
    return found


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
            link, also = f"[`{name}`](#{name.lower()})", error.__bases__[-1].__name__
            lines.append(f"| {link} | `{also}` | {means} | {cure} |")
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


def _json(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.dest == "json"]


def _flags(parser: argparse.ArgumentParser, actions: Iterable[argparse.Action]) -> str:
    formatter = parser._get_formatter()
    rows = []
    for action in actions:
        value = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
        if not action.option_strings:
            shown = f"`{value}`"
        else:
            takes = "" if action.nargs == 0 else f" {value}"
            *others, last = action.option_strings
            shown = ", ".join([*(f"`{flag}`" for flag in others), f"`{last}{takes}`"])
        rows.append((shown.replace("|", "\\|"), formatter._expand_help(action)))
    return _table("flag", "means", rows)


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
