"""Seeing a grid while it runs, and what it has done: traces and benches."""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["trace", "verify"]


def __getattr__(name: str) -> ModuleType:
    """They are loaded when asked for; `trace` imports torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
