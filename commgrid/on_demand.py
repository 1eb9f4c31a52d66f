"""Names of a package that import torch, and do so when they are first asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType


def on_demand(
    module: dict[str, object],
    where: Mapping[str, Sequence[str]],
    modules: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__`, by which its names are found (PEP 562).

    `dir` shows what is public.

    Args:
        module: the package's `globals()`.
        where: module to the names in it.
        modules: name to the module that it stands for.

    Example:
        >>> package = {"__name__": "package", "__all__": ["sqrt"], "json": None}
        >>> get, listed = on_demand(package, {"math": ("sqrt",)})
        >>> get("sqrt")(9.0), listed()
        (3.0, ['sqrt'])
    """
    home = {name: path for path, names in where.items() for name in names}

    def get(name: str) -> object:
        if name in modules:
            value = importlib.import_module(modules[name])
        elif name in home:
            value = getattr(importlib.import_module(home[name]), name)
        else:
            raise AttributeError(f"module {module['__name__']!r} has no attribute {name!r}")
        module[name] = value
        return value

    def listed() -> list[str]:
        public = module["__all__"]
        assert isinstance(public, list)
        return sorted({*public, *({"__version__"} & module.keys())})

    return get, listed
