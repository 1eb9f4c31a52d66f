"""YAML read safely and strictly: no Python tags, no key given twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from commgrid.errors import SpecError


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, but a key given twice is an error instead of a silent loss."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise SpecError(f"line {key.start_mark.line + 1}: a key must be a name")
            if key.value in seen:
                line = key.start_mark.line + 1
                raise SpecError(f"line {line}: key {key.value!r} is given twice; keep one")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        SpecError: the file cannot be read, is not safe YAML, or is no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SpecError("there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"cannot be read: {error}") from error
    try:
        loaded = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise SpecError(f"not plain YAML (no Python tags): {error}") from error
    if not isinstance(loaded, dict):
        kind = "nothing" if loaded is None else type(loaded).__name__
        raise SpecError(f"expected a mapping such as `axes: {{tp: 2, dp: -1}}`, found {kind}")
    return loaded
