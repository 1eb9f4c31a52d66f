"""An extension of griffe, which reads the docstrings: what it would not see as it is meant."""

from __future__ import annotations

import re

import griffe

_SEVERAL = re.compile(r"^( +)(\w+(?:, \w+)+)(: .*(?:\n\1 +.*)*)", re.M)


class ReadDocstrings(griffe.Extension):
    """Doctests get the section that griffe knows them by, and each argument a row."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _one_by_one(_with_examples(obj.docstring.value))


def _with_examples(text: str) -> str:
    """The docstring with its doctests under `Examples:`, indented."""
    paragraphs = re.sub(r"^Example:$", "Examples:", text, flags=re.M).split("\n\n")
    for place, paragraph in enumerate(paragraphs):
        if paragraph.startswith(">>> "):
            lines = [f"    {line}" for line in paragraph.splitlines()]
            paragraphs[place] = "\n".join(["Examples:", *lines])
    return "\n\n".join(paragraphs)


def _one_by_one(text: str) -> str:
    """`tp, pp: sizes` as two arguments, or two errors, with the same text."""
    paragraphs = text.split("\n\n")
    for place, paragraph in enumerate(paragraphs):
        if paragraph.startswith(("Args:", "Raises:")):
            paragraphs[place] = _SEVERAL.sub(
                lambda found: "\n".join(
                    f"{found[1]}{name}{found[3]}" for name in found[2].split(", ")
                ),
                paragraph,
            )
    return "\n\n".join(paragraphs)
