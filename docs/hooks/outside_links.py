"""A hook of mkdocs: links to files outside docs/, which GitHub follows, are text on the site."""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>\.\./[^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Leaves the text of each link that leads out of docs/."""
    folder = posixpath.dirname(page.file.src_uri)

    def shown(link: re.Match[str]) -> str:
        inside = not posixpath.normpath(posixpath.join(folder, link["target"])).startswith("..")
        return link[0] if inside else link["text"]

    return _LINK.sub(shown, markdown)
