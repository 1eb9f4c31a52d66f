"""PyYAML's safe loader, made strict."""

from __future__ import annotations

from typing import Any

import yaml

from commgrid.errors import SpecError

_DEEPEST = 50  # far more than anything has that means something
_LARGEST = 10**30  # Python does not even print numbers of thousands of digits


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader, but a key given twice is an error instead of a silent loss; and what is
    nested very deep is, on which PyYAML would spend seconds, and then all of Python's stack."""

    _depth = 0

    def fetch_flow_collection_start(self, token: Any) -> None:
        if self.flow_level >= _DEEPEST:
            raise _too_deep(self.get_mark().line)
        super().fetch_flow_collection_start(token)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self._depth >= _DEEPEST:
            raise _too_deep(self.get_mark().line)
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        number: int = super().construct_yaml_int(node)
        if abs(number) > _LARGEST:
            raise SpecError(
                f"line {node.start_mark.line + 1}: a number of more than 30 digits; "
                "write a shorter one, or text in quotes"
            )
        return number

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


def _too_deep(line: int) -> SpecError:
    return SpecError(f"line {line + 1}: nested more than {_DEEPEST} deep; a bracket is not closed")


Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
