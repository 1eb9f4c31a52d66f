"""Checks of mappings that a file holds: their keys and numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from commgrid.errors import SpecError
from commgrid.planning.names import nearest


def check_keys(
    where: str, given: object, keys: Sequence[str], optional: Sequence[str] = ()
) -> None:
    """Refuse a mapping with unknown keys, or without needed ones.

    Args:
        where: the mapping's own key with a dot, such as `device.`; "": the whole file.
        given: as the file has it.
        keys: all of them.
        optional: those that may be absent.

    Raises:
        SpecError: naming the key.
    """
    if not isinstance(given, Mapping):
        raise SpecError(f"{where.rstrip('.') or 'cluster'}={given!r}: expected a mapping")
    for key in given:
        if key not in keys:
            raise SpecError(
                f"{where}{key}: unknown key, expected {', '.join(keys)}{nearest(str(key), keys)}"
            )
    for key in keys:
        if key not in given and key not in optional:
            raise SpecError(f"{where}{key}: missing; expected {', '.join(keys)}")


def named(where: str, given: Mapping[str, Any]) -> str:
    """The name of a mapping.

    Raises:
        SpecError: it is none.
    """
    if not isinstance(given["name"], str | int):
        raise SpecError(f"{where}name={given['name']!r}: expected a name")
    return str(given["name"])


def above_zero(where: str, given: Mapping[Any, Any], key: Any) -> float:
    """A number of a mapping.

    Raises:
        SpecError: it is none, or not above 0.
    """
    value = given[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        fix = ""
        if isinstance(value, str) and re.fullmatch(r"[\d.]+(e\d+)?", value):  # YAML 1.1's text
            fix = "; without quotes, and as 1000 or 1.0e+3, not 1e3"
        raise SpecError(f"{where}{key}={value!r}: expected a number above 0{fix}")
    return float(value)


def flag(where: str, given: Mapping[str, Any], key: str) -> bool:
    """Whether a mapping says true; False if it has no such key.

    Raises:
        SpecError: neither true nor false.
    """
    value = given.get(key, False)
    if type(value) is not bool:
        raise SpecError(f"{where}{key}={value!r}: expected true or false")
    return value
