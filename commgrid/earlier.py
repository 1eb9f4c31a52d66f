"""Earlier import paths: a module that has moved is found by its earlier name until release 0.3.

`earlier.yaml` is the table of them. A program that imports one gets a warning that names the path
of today, and a pickle that names a class by one is read as before.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


@cache
def table() -> Mapping[str, Sequence[str]]:
    """By a module's earlier name, the modules that have its names now; none of a mere package."""
    import yaml  # only a program that uses such a path reads the table

    rows = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {
        f"commgrid.{old}": [f"commgrid.{each}".rstrip(".") for each in now]
        for old, now in rows.items()
    }


def find_spec(name: str) -> ModuleSpec | None:
    """The spec of a module by its earlier name; None: the table does not have it."""
    return ModuleSpec(name, _Loader(), is_package=True) if name in table() else None  # type: ignore[arg-type]


class _Loader:
    def create_module(self, spec: ModuleSpec) -> None:
        """Python makes the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Look names up in the modules of today, after a warning."""
        homes = table()[module.__name__]
        if homes:
            told = f"{module.__name__} is in {' and '.join(homes)} now"
            warnings.warn(
                f"{told}, and its earlier name goes with 0.3", DeprecationWarning, stacklevel=2
            )

        def get(name: str) -> object:
            for home in () if name.startswith("__") else homes:
                if hasattr(found := import_module(home), name):
                    return getattr(found, name)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        vars(module)["__getattr__"] = get
