"""Text on a terminal: its width, and colours if it has them."""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from collections.abc import Mapping
from typing import TextIO

BOLD, DIM, RED, GREEN, YELLOW, BLUE, CYAN = "1", "2", "1;31", "32", "33", "34", "1;36"

Marks = Mapping[str, str]
"""Colours by regular expressions of lines."""

NARROWEST = 20
"""Columns below which nothing is wrapped any further."""


def is_completing() -> bool:
    """Whether a shell asks for completions of its command line, by argcomplete."""
    return "_ARGCOMPLETE" in os.environ


def columns(stream: TextIO) -> int | None:
    """How wide text on a stream may be: on a terminal COLUMNS or its own width; else None, any.

    Output to a file or a pipe is for programs. COLUMNS does not count there: a Python that has
    loaded readline hands its terminal's on to every process that it starts.
    """
    return max(shutil.get_terminal_size().columns, NARROWEST) if stream.isatty() else None


def has_colour(stream: TextIO) -> bool:
    """Whether to write colours: on a terminal, unless NO_COLOR; elsewhere where FORCE_COLOR is."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return os.environ.get("TERM") != "dumb" and stream.isatty()


def fit(text: str, width: int | None) -> str:
    """The text with longer lines wrapped, each continued below its own column.

    >>> print(fit("  size  names\\n     2  tp, cp_tp, dp_tp, pp_tp", 22))
      size  names
         2  tp, cp_tp,
            dp_tp, pp_tp
    """
    if width is None:
        return text
    return "\n".join(_wrap(line, width) for line in text.split("\n"))


def _wrap(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    lead = len(line) - len(line.lstrip())
    # Two spaces part the columns of a table; a late column has no room for continued lines.
    starts = [m.end() for m in re.finditer(r"\S {2,}(?=\S)", line) if m.end() <= width // 2]
    hang = " " * (starts[-1] if starts else lead + 2)
    return "\n".join(
        textwrap.wrap(
            line, width, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False
        )
    )


def paint(text: str, marks: Marks) -> str:
    """The text with colours; of marks that overlap the first counts.

    >>> paint("rank [5]", {r"\\[\\d+\\]": CYAN})
    'rank \\x1b[1;36m[5]\\x1b[0m'
    """
    colours = list(marks.values())
    pattern = "|".join(f"({mark})" for mark in marks)

    def paint_one(found: re.Match[str]) -> str:
        assert found.lastindex is not None
        return f"\x1b[{colours[found.lastindex - 1]}m{found[0]}\x1b[0m"

    return re.sub(pattern, paint_one, text, flags=re.MULTILINE)
