"""The long description, which depends on README.md; everything else is in pyproject.toml."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def long_description() -> str:
    """README.md without pictures; links into the repository lead to the source's URL.

    While `project.urls` names no `source`, such a link is its text and its path.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    source = project.get("urls", {}).get("source")
    link = rf"[\1]({source}/blob/HEAD/\2)" if source else r"\1 (`\3`)"
    parts = re.split(r"(^```.*?^```$)", (ROOT / "README.md").read_text("utf-8"), flags=re.M | re.S)
    for i in range(0, len(parts), 2):  # between the blocks of code
        text = re.sub(r"!\[[^]]*\]\((?!https?:)[^)]*\)\n?", "", parts[i])
        text = re.sub(r"<(?:img|source)\b(?![^>]*https?:)[^>]*>\n?|</?picture>\n?", "", text)
        text = re.sub(r"\[\]\([^)]*\)", "", text)  # a link around a picture
        parts[i] = re.sub(r"\[([^]]+)\]\((?!https?:|#)(([^)#]+)[^)]*)\)", link, text)
    return "".join(parts)


setup(long_description=long_description(), long_description_content_type="text/markdown")
