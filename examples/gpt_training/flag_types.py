"""The types of train_gpt's flags: each says what it expects of a value."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def positive(text: str) -> int:
    """argparse's type of a size."""
    return whole(text, 1)


def count(text: str) -> int:
    """argparse's type of a number of steps."""
    return whole(text, 0)


def whole(text: str, least: int) -> int:
    if not text.lstrip("+-").isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number, {least} or more")
    return int(text)


def probability(text: str) -> float:
    """argparse's type of a share, from 0 to below 1."""
    return number(text, lambda value: 0 <= value < 1, "0 or more, and less than 1")


def inner_share(text: str) -> float:
    """argparse's type of a share that leaves something on both sides."""
    return number(text, lambda value: 0 < value < 1, "above 0 and below 1, such as 0.1")


def not_negative(text: str) -> float:
    """argparse's type of a bound that 0 switches off."""
    return number(text, lambda value: 0 <= value < float("inf"), "0 or more")


def above_zero(text: str) -> float:
    """argparse's type of a factor."""
    return number(text, lambda value: 0 < value < float("inf"), "above 0, such as 1.25")


def number(text: str, fits: Callable[[float], bool], expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not fits(value):
        raise argparse.ArgumentTypeError(f"{text}: expected {expected}")
    return value
