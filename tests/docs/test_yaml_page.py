"""docs/yaml.md has examples of every key, and every mistake in a file has its error."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from commgrid import GridSpec, SpecError
from tests.docs.pages import DOCS, ROOT
from tests.docs.test_mirrors import keys_of_a_file

PAGE = DOCS / "yaml.md"
TEXT = PAGE.read_text(encoding="utf-8")
WRONG: list[dict[str, str]] = yaml.safe_load(
    (ROOT / "tests" / "data" / "wrong_grids.yaml").read_text(encoding="utf-8")
)
BLOCKS: list[dict[str, Any]] = [
    yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", TEXT, re.S)
]


def keys_in(held: dict[str, Any]) -> set[str]:
    """The keys that a file has, in the page's spelling."""
    found = set(held)
    for table in ("regions", "groups"):
        for row in held.get(table, {}).values():
            found |= {f"{table}.NAME.{key}" for key in row} if isinstance(row, dict) else set()
    return found


@pytest.mark.parametrize("key", keys_of_a_file())
def test_every_key_has_an_example_and_an_error(key: str) -> None:
    """An example is a block that has the key; what is wrong with it, an error that begins so."""
    with_it = [held for held in BLOCKS if key in keys_in(held)]
    assert len(with_it) >= 2, f"{key} needs an example beside the full one"
    begins = re.escape(key).replace("NAME", r"\w+") + r"\b"
    assert any(re.match(begins, row["error"]) for row in WRONG), key


@pytest.mark.parametrize("row", WRONG, ids=lambda row: row["wrong"])
def test_what_is_wrong_says_so(row: dict[str, str]) -> None:
    with pytest.raises(SpecError) as raised:
        GridSpec.from_dict(yaml.safe_load(f"{{{row['wrong']}}}")).resolve(8)
    assert str(raised.value) == row["error"]


def test_the_full_example_has_every_key_and_is_valid_on_32_ranks() -> None:
    full = BLOCKS[1]
    assert keys_in(full) == set(keys_of_a_file())
    assert GridSpec.from_dict(full).resolve(32).world_size == 32
