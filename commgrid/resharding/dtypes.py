"""Conversions between dtypes that change no number; dtypes are torch's names, without `torch.`."""

from __future__ import annotations

import re

_FLOATS = {"float64": 53, "float32": 24, "bfloat16": 8, "float16": 11}
"""Binary digits of a number; whole numbers up to 2 to that power are exact."""
_SCALED = re.compile(r"float\d+_e\d+m(\d+)")
_PARTS = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}
"""The dtype of the real and the imaginary part."""


def keeps_numbers(source: str, target: str) -> bool:
    """Whether numbers of one dtype are what they were in another one, up to floating precision.

    Floats of eight bits and less are scaled; without a scale they hold no others' numbers.

    Example:
        >>> keeps_numbers("float32", "bfloat16"), keeps_numbers("uint8", "int64")
        (True, True)
        >>> keeps_numbers("float32", "int8"), keeps_numbers("bfloat16", "float8_e4m3fn")
        (False, False)
    """
    if source == target:
        return True
    digits = _digits(target)
    if source in _PARTS:
        return target in _PARTS
    if _digits(source):
        return digits > 0 and _SCALED.match(target) is None
    if digits:
        low, high = _range(source)
        return max(-low, high) <= 1 << digits
    if target == "bool":
        return False
    return _range(target)[0] <= _range(source)[0] and _range(source)[1] <= _range(target)[1]


def _digits(dtype: str) -> int:
    """Of floating numbers and parts of complex ones; 0 of other dtypes."""
    mantissa = _SCALED.match(dtype)
    return int(mantissa[1]) + 1 if mantissa else _FLOATS.get(_PARTS.get(dtype, dtype), 0)


def _range(dtype: str) -> tuple[int, int]:
    """Lowest and highest of whole numbers."""
    bits = int(re.sub(r"\D", "", dtype) or 1)
    if dtype.startswith("int"):
        return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    return 0, 2**bits - 1
