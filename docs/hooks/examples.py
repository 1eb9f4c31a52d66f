"""An extension of griffe, which reads the docstrings: `Example:` and bare `>>>` are code."""

from __future__ import annotations

import re

import griffe


class ShowExamples(griffe.Extension):
    """Gives doctests the section that griffe knows them by."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _as_section(obj.docstring.value)


def _as_section(text: str) -> str:
    """The docstring with its doctests under `Examples:`, indented."""
    paragraphs = re.sub(r"^Example:$", "Examples:", text, flags=re.M).split("\n\n")
    for place, paragraph in enumerate(paragraphs):
        if paragraph.startswith(">>> "):
            lines = [f"    {line}" for line in paragraph.splitlines()]
            paragraphs[place] = "\n".join(["Examples:", *lines])
    return "\n\n".join(paragraphs)
