"""Durations, as users give them."""

from __future__ import annotations

from datetime import timedelta

from commgrid.errors import SpecError

Seconds = float | timedelta


def as_seconds(key: str, value: Seconds) -> float:
    """A duration given as seconds or timedelta, in seconds.

    Raises:
        SpecError: not above 0, endless, or no duration.
    """
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if type(seconds) not in (int, float) or not 0 < seconds < 1e9:
        raise SpecError(f"{key}={value!r}: expected seconds above 0, or a timedelta")
    return float(seconds)
