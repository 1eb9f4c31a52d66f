"""docs/architecture.md and CONTRIBUTING.md speak of files and names that are there."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT

PAGE = DOCS / "architecture.md"
TEXT = PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", [PAGE, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_every_file_it_names_is_there(page: Path) -> None:
    named = re.findall(r"`([\w./-]+(?:/|\.py|\.md|\.yml))`", page.read_text(encoding="utf-8"))
    assert named
    for path in named:
        if "NAME" in path or path == "__init__.py":
            continue
        found = [ROOT / path, ROOT / "commgrid" / path, ROOT / "examples" / path]
        assert any(one.exists() for one in found), f"{page.name} names {path}"


def test_every_name_is_in_its_file() -> None:
    """`NAME` (`path`) says where a name is."""
    named = re.findall(r"`(\w+)`\s+\(`([\w./]+)`\)", TEXT)
    assert len(named) >= 10
    for name, path in named:
        assert re.search(rf"\b{name}\b", (ROOT / path).read_text(encoding="utf-8")), (name, path)


def test_the_picture_has_every_room_in_the_order_of_its_imports() -> None:
    from tests.test_layering import ROOMS

    rooms = {path.name + "/" for path in (ROOT / "commgrid").iterdir() if path.is_dir()}
    rooms |= {path.name for path in (ROOT / "commgrid").glob("*.py")}
    rooms -= {"__pycache__/", "__init__.py", "__main__.py"}
    picture = TEXT[TEXT.index("errors.py, version.py") :]
    picture = picture[: picture.index("```")]
    assert {room for room in rooms if room not in picture} == set()
    listed = re.findall(r"^  (\w+)(?:/|\.py)", picture[picture.index("torch\n  runtime") :], re.M)
    places = [ROOMS.index(room) for room in listed if room in ROOMS]
    assert places == sorted(places)
