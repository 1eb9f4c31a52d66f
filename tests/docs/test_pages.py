"""The documentation holds: its blocks run, its links lead somewhere, all of it is in the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from commgrid import Cluster, GridSpec
from commgrid.cost_model.model import Model
from commgrid.transfer import mapping
from tests.docs import pages
from tests.docs.pages import BESIDE, DOCS, FRONT, PAGES, ROOT, name_of
from tests.docs.public import public_names

RUN = [*BESIDE, *PAGES]


def site() -> dict[str, Any]:
    """What mkdocs is told, its Python tags left out."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    loaded: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)
    return loaded


def listed(nav: object) -> list[str]:
    """The pages of a nav, whatever sections they are in."""
    if isinstance(nav, str):
        return [nav]
    inner = nav.values() if isinstance(nav, dict) else nav
    assert isinstance(inner, type({}.values()) | list)
    return [page for one in inner for page in listed(one)]


def test_every_page_is_in_the_nav_once_and_nothing_else_is() -> None:
    assert sorted(listed(site()["nav"])) == sorted(map(name_of, PAGES))


@pytest.mark.parametrize("page", [*FRONT, ROOT / "CHANGELOG.md", *PAGES], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in pages.links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}, and there is no such file"
        assert target.is_relative_to(ROOT), f"{page.name} links out of the repository: {link}"
        if anchor:
            there = pages.anchors(target)
            assert anchor in there, f"{page.name} links to {link}; {path} has {there}"
            assert there.count(anchor) == 1, f"{link}: two headings of that name"


@pytest.mark.parametrize("page", [page for page in RUN if pages.blocks(page, "yaml")], ids=name_of)
def test_yaml_is_of_grids_clusters_and_names(page: Path) -> None:
    for held in pages.grids(page):
        assert isinstance(held, dict)
        if "levels" in held:
            Cluster.from_dict(held)
        elif "layers" in held:
            Model.from_dict(held)
        elif "axes" in held:
            GridSpec.from_dict(held)
        else:
            mapping(held, source=next(iter(held)))  # a table of names


@pytest.mark.parametrize("page", [page for page in RUN if any(pages.commands(page))], ids=name_of)
def test_commands_print_what_the_page_says(page: Path, tmp_path: Path) -> None:
    pages.save_files(page, tmp_path)
    for command, printed in pages.commands(page):
        said = pages.output(command, tmp_path)
        assert pages.prints(printed, said), f"$ {command}\n{said}"


@pytest.mark.full
@pytest.mark.parametrize("page", [page for page in RUN if pages.programs(page)], ids=name_of)
def test_python_of_the_docs_runs(page: Path, tmp_path: Path) -> None:
    printed = pages.normal("\n".join(pages.run_python(page, tmp_path)))
    for block in pages.outputs(page, "printed"):
        assert pages.normal(block.text) in printed, printed


def test_every_public_name_has_its_place_in_the_reference() -> None:
    written = {
        found
        for page in (DOCS / "reference").glob("*.md")
        for found in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.M)
    }
    missing = [
        name
        for name in public_names()
        if name not in written and name.rpartition(".")[0] not in written
    ]
    assert not missing, f"docs/reference has no `::: NAME` for {missing}"
    assert all(page.name in ("index.md", "json.md") or "\n::: " in page.read_text()
               for page in (DOCS / "reference").glob("*.md"))  # fmt: skip
