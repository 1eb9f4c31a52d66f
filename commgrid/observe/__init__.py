"""Seeing a grid while it runs, and what it has done: traces and benches."""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["trace"]


def __getattr__(name: str) -> ModuleType:
    """`trace` imports torch, which reading what was recorded does without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
