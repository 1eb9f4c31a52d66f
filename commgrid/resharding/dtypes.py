"""Conversions between dtypes that change no number; dtypes are torch's names, without `torch.`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_FLOATS = {"float64": 53, "float32": 24, "bfloat16": 8, "float16": 11}
"""Binary digits of a number; whole numbers up to 2 to that power are exact."""
_SCALED = re.compile(r"float\d+_e\d+m(\d+)")
_PARTS = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}
"""The dtype of the real and the imaginary part."""


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name."""
    import torch  # which planning does without

    found: torch.dtype = getattr(torch, name)
    return found


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


def scales_beside(dtypes: Mapping[str, str]) -> dict[str, list[str]]:
    """The scales that lie beside tensors of eight bits, in the module of each, by its name.

    A name such as `w_scale` or `scale_w` is of `w`; one that says of no tensor, such as
    `input_scale`, is of floats of eight bits that have no scale of their name.

    Args:
        dtypes: of tensors by name.

    Example:
        >>> fp8, wide = "float8_e4m3fn", "float32"
        >>> scales_beside({"a.w": fp8, "a.w_scale_inv": wide, "b.w": fp8, "b.norm": wide})
        {'a.w': ['a.w_scale_inv']}
    """
    modules: dict[str, list[str]] = {}
    for name in dtypes:
        modules.setdefault(name.rpartition(".")[0], []).append(name.rpartition(".")[2])
    found = {}
    for name, dtype in dtypes.items():
        module, _, own = name.rpartition(".")
        if not _EIGHT_BITS.fullmatch(dtype) or "scale" in own:
            continue
        deeper = [f"{own}.{last}" for last in modules.get(name, ())]  # such as w.scale
        scales = [each for each in modules[module] + deeper if "scale" in each]
        others = [each for each in modules[module] if "scale" not in each]
        mine = [each for each in scales if _owner(each, others) == own]
        if not mine and _SCALED.match(dtype):
            mine = [each for each in scales if not _owner(each, others)]
        if mine:
            found[name] = [f"{module}.{each}" if module else each for each in mine]
    return found


def unscaled(source: str, target: str, scales: Collection[str], taken: Collection[str]) -> str:
    """The scale without which numbers of eight bits would go into wider floats; "": none.

    Args:
        source, target: dtypes.
        scales: of the tensor, by name.
        taken: those names that something takes.
    """
    if source == target or not _digits(target):
        return ""
    return next((scale for scale in scales if scale not in taken), "")


_EIGHT_BITS = re.compile(r"float[48]_\w+|u?int8")


def _owner(scale: str, others: Collection[str]) -> str:
    """The tensor of whose name a scale's has all words, the longest; "": none."""
    words = re.sub(r"[._]+", "_", f"_{scale}_")
    return max((each for each in others if f"_{each.strip('_')}_" in words), key=len, default="")


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
