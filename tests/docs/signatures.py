"""Public signatures of the last release, which a change of them is compared with.

`python -m tests.docs.signatures` writes `signatures.txt`; a release does.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from commgrid.earlier import table
from commgrid.version import VERSION
from tests.docs.public import public_names
from tests.house import PACKAGES

FILE = Path(__file__).with_name("signatures.txt")
PLAIN = (bool, int, float, str, type(None))


class Ellipsed:
    """A default that is no plain value."""

    def __repr__(self) -> str:
        return "…"


def signatures() -> dict[str, str]:
    """Return the parameters of every public function, class and method, by dotted name."""
    named = [(name, pkgutil.resolve_name(name)) for name in public_names()]
    return {
        _imported(path): _parameters(call)
        for name, value in named
        for path, call in _calls(name, value)
    }


def released() -> tuple[str, dict[str, str]]:
    """Return the version of the last release, and its signatures."""
    version, *lines = FILE.read_text(encoding="utf-8").splitlines()
    paths = [line.partition("(")[0] for line in lines]
    found = {path: line[len(path) :] for path, line in zip(paths, lines, strict=True)}
    return version, {_imported(path): parameters for path, parameters in found.items()}


def _imported(path: str) -> str:
    """Where programs import a name from: Megatron's functions from the package, not its files.

    A name of the last release whose module has moved is where it is now.
    """
    module, _, rest = path.rpartition(".")
    for home in table().get(module, ()):
        if hasattr(importlib.import_module(home), rest):
            return f"{home}.{rest}"
    package, file, name = (["", "", *path.rsplit(".", 2)])[-3:]
    return f"{package}.{name}" if package == "megatron_adapter.parallel_state" and file else path


def _calls(name: str, value: object) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The function or class, and the public methods that it or a base of the project's defines."""
    if inspect.isfunction(value):
        yield name, value
    if inspect.isclass(value):
        if inspect.isfunction(value.__init__):
            yield name, value.__init__
        own = [b for b in value.__mro__ if b.__module__.partition(".")[0] in PACKAGES]
        for key, member in {k: m for base in reversed(own) for k, m in vars(base).items()}.items():
            member = getattr(member, "__func__", member)  # of static and class methods
            if inspect.isfunction(member) and not key.startswith("_"):
                yield f"{name}.{key}", member


def _parameters(call: Callable[..., Any]) -> str:
    """Names, kinds and defaults, for example `(data, group=None, *, dim=0)`."""
    signature = inspect.signature(call)
    empty = inspect.Parameter.empty
    parameters = [
        one.replace(
            annotation=empty,
            default=one.default if one.default is empty or isinstance(one.default, PLAIN)
            else Ellipsed(),
        )
        for one in signature.parameters.values()
    ]  # fmt: skip
    return str(signature.replace(parameters=parameters, return_annotation=empty))


if __name__ == "__main__":
    lines = [VERSION, *(path + parameters for path, parameters in signatures().items())]
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")
