"""docs/yaml.md has every key that the code takes, and its errors are those that come."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from commgrid import GridSpec, SpecError
from commgrid.planning import groups, spec
from tests.docs.pages import DOCS

PAGE = DOCS / "yaml.md"
TEXT = PAGE.read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^#+ `(.+?)`\n(.*?)(?=^##|\Z)", TEXT, re.M | re.S))
WRONG = re.findall(r"^\| `(axes.*?|order.*?|tp: .*?)` \| (`+)(.+?)\2 \|$", TEXT, re.M)
BLOCKS: list[dict[str, Any]] = [
    yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", TEXT, re.S)
]


def known_keys() -> list[str]:
    """Every key of a file, as the page heads it."""
    with pytest.raises(SpecError) as raised:
        GridSpec.from_dict({"axes": {"dp": 1}, "regions": {"expert": {"?": 1}}})
    of_region = re.search(r"expected (\w+) and (\w+)$", str(raised.value))
    assert of_region
    return [
        *spec._KEYS,
        *(f"regions.NAME.{key}" for key in of_region.groups()),
        *(f"groups.NAME.{key}" for key in groups._ENTRY_KEYS),
    ]


def keys_in(held: dict[str, Any]) -> set[str]:
    """The keys that a file has, in the page's spelling."""
    found = set(held)
    for table in ("regions", "groups"):
        for row in held.get(table, {}).values():
            found |= {f"{table}.NAME.{key}" for key in row} if isinstance(row, dict) else set()
    return found


def test_every_key_has_its_section_with_type_and_default() -> None:
    assert sorted(SECTIONS) == sorted(known_keys())
    for key, section in SECTIONS.items():
        assert re.search(r"^\| type \| .+ \|$", section, re.M), key
        assert re.search(r"^\| default \| .+ \|$", section, re.M), key


@pytest.mark.parametrize("key", known_keys())
def test_every_key_has_an_example_and_an_error(key: str) -> None:
    """An example is a block that has the key; what is wrong with it, an error that begins so."""
    with_it = [held for held in BLOCKS if key in keys_in(held)]
    assert len(with_it) >= 2, f"{key} needs an example beside the full one"
    begins = re.escape(key).replace("NAME", r"\w+") + r"\b"
    assert any(re.match(begins, said) for _, _, said in WRONG), key


def test_every_nccl_option_has_its_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (bool|int|str) \|", SECTIONS["groups.NAME.nccl"], re.M)
    assert rows == [(name, kind.__name__) for name, kind in groups.NCCL_OPTIONS.items()]


@pytest.mark.parametrize(("written", "said"), [(one, said) for one, _, said in WRONG])
def test_what_is_wrong_says_so(written: str, said: str) -> None:
    with pytest.raises(SpecError) as raised:
        GridSpec.from_dict(yaml.safe_load(f"{{{written}}}")).resolve(8)
    assert str(raised.value) == said


def test_the_full_example_has_every_key_and_is_valid_on_32_ranks() -> None:
    full = BLOCKS[1]
    assert keys_in(full) == set(known_keys())
    assert GridSpec.from_dict(full).resolve(32).world_size == 32
