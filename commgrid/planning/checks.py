"""Checks of mappings that a file holds: their keys and numbers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from commgrid.errors import SpecError
from commgrid.layout.axis_names import nearest


def refuse_unknown(
    where: str,
    given: Iterable[object],
    known: Collection[str],
    hints: Mapping[str, str] | None = None,
) -> None:
    """Refuse keys that there are not, with the nearest one.

    Args:
        where: what they stand under with a dot, such as `device.`; "": nothing.
        given: the keys.
        known: every key that there is.
        hints: for some keys, how the error ends.

    Raises:
        SpecError: naming the key.
    """
    for key in given:
        if key not in known:
            hint = (hints or {}).get(str(key)) or nearest(str(key), known)
            raise SpecError(f"{where}{key}: unknown key, expected some of {', '.join(known)}{hint}")


def check_keys(
    where: str, given: object, keys: Sequence[str], optional: Collection[str] = ()
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
        raise SpecError(f"{where.rstrip('.') or 'config'}={given!r}: expected a mapping")
    refuse_unknown(where, given, keys)
    needed = [key for key in keys if key not in optional]
    for key in needed:
        if key not in given:
            raise SpecError(f"{where}{key}: missing; expected {', '.join(needed)}")


def named(where: str, given: Mapping[str, Any]) -> str:
    """The name of a mapping.

    Raises:
        SpecError: it is none.
    """
    if not isinstance(given["name"], str | int):
        raise SpecError(f"{where}name={given['name']!r}: expected a name")
    return str(given["name"])


_LEAST, _MOST = 1e-15, 1e15
"""Of numbers, whose products with units stay finite."""


def above_zero(where: str, given: Mapping[Any, Any], key: Any) -> float:
    """A number of a mapping.

    Raises:
        SpecError: it is none, or not above 0.
    """
    value = given[key]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and _LEAST <= value <= _MOST):
        fix = f" ({_LEAST:g} to {_MOST:g})" if is_number and value > 0 else ""
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
