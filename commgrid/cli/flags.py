"""Types of flags: from a word of the command line to its value, or an error that says what fits."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable
from pathlib import Path

from commgrid.layout.axis_names import nearest

Whole = Callable[[str], int]
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def whole(least: int | None = None) -> Whole:
    """Whole numbers from `least` on; None: any."""

    def read(text: str) -> int:
        number = int(text) if re.fullmatch(r"[+-]?[0-9]{1,15}", text) else None
        if number is None or (least is not None and number < least):
            least_one = "" if least is None else f" from {least} on"
            long = ", of 15 digits at most" if len(text) > 15 else ""
            shown = text if len(text) <= 40 else f"{text[:20]}…"
            raise argparse.ArgumentTypeError(f"{shown}: expected a whole number{least_one}{long}")
        return number

    return read


def above_zero(what: str, least: float = 0.0) -> Callable[[str], float]:
    """Numbers above 0, from `least` on, of which an error says `what`, as `GB above 0`."""

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not 0 < number < math.inf or number < least:
            raise argparse.ArgumentTypeError(f"{text}: expected {what}")
        return number

    return read


def one_of(*words: str) -> Callable[[str], str]:
    """One of some words."""

    def read(text: str) -> str:
        if text not in words:
            listed = f"{', '.join(words[:-1])} or {words[-1]}"
            raise argparse.ArgumentTypeError(f"{text}: expected {listed}{nearest(text, words)}")
        return text

    return read


def names(text: str) -> list[str]:
    """Names with commas between."""
    found = [name for name in text.split(",") if name]
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}: expected names with commas")
    return found


def pair(text: str, *, such_as: str) -> tuple[str, str]:
    """Two words with `=` between; `such_as` is an example."""
    first, _, second = text.partition("=")
    if not (first and second):
        raise argparse.ArgumentTypeError(f"{text}: expected {such_as}")
    return first, second


def sized(text: str) -> tuple[str, int]:
    """A name and a whole number."""
    name, size = pair(text, such_as="NAME=N, such as --axis node=4")
    return name, whole()(size)


def count_of_bytes(text: str) -> int:
    """Bytes, as 65536, 64K or 1M."""
    found = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(f"{text}: expected bytes, such as 65536, 64K or 1M")
    return int(found[1]) * _UNITS[found[2].upper()]


def file_of(*suffixes: str) -> Callable[[str], Path]:
    """Files to write, whose names end in one of some suffixes, in a folder that is there."""

    def read(text: str) -> Path:
        path = Path(text)
        if path.suffix not in suffixes:
            listed = ", ".join(suffixes)
            raise argparse.ArgumentTypeError(f"{text}: expected a file that ends in {listed}")
        if not os.path.isdir(path.absolute().parent):  # unlike pathlib's, of any name
            raise argparse.ArgumentTypeError(
                f"{text}: cannot be written: there is no such folder; make it first"
            )
        return path

    return read
