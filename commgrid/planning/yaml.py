"""YAML read safely and strictly: no Python tags, no key given twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from commgrid.errors import SpecError
from commgrid.layout.axis_names import nearest

T = TypeVar("T")


_ODD = (ValueError, TypeError, AttributeError, KeyError, IndexError, OverflowError)
"""What PyYAML raises beside its own errors: of a date of month 13, of a number of more digits than
Python reads."""


def _loaded(text: str, refused: str) -> Any:
    """Parse a text.

    Raises:
        SpecError: it is no YAML, after the words of `refused`; a key is given twice, or it is
            nested very deep.
    """
    import yaml  # slow, and most commands read none

    from commgrid.planning.yaml_loader import Loader

    try:
        return yaml.load(text, Loader=Loader)
    except SpecError:
        raise
    except (yaml.YAMLError, *_ODD) as error:
        invalid = "an invalid value: " if isinstance(error, _ODD) else ""
        what = " ".join(f"{invalid}{error}".split())  # PyYAML's message has several lines
        raise SpecError(f"{refused}: {what}") from error


_SUCH_AS = "axes: {tp: 2, dp: -1}"


def load_yaml(path: Path, such_as: str = _SUCH_AS) -> dict[str, Any]:
    """The mapping in a YAML file.

    Args:
        path: of the file.
        such_as: how a right one begins, for the error.

    Raises:
        SpecError: the file cannot be read, is not safe YAML, or is no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SpecError("there is no such file") from None
    except OSError as error:
        raise SpecError(f"cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # not text, or a path that no file can have
        raise SpecError(f"cannot be read: {error}") from error
    loaded = _loaded(text, "not plain YAML (no Python tags)")
    if not isinstance(loaded, dict):
        kind = "nothing" if loaded is None else type(loaded).__name__
        raise SpecError(f"expected a mapping such as `{such_as}`, found {kind}")
    return loaded


def from_file(path: str | Path, read: Callable[[dict[str, Any]], T], such_as: str = _SUCH_AS) -> T:
    """What `read` makes of the mapping in a YAML file.

    Args:
        path, such_as: as of `load_yaml`.

    Raises:
        SpecError: beginning with the path; that of `load_yaml`, or of `read`.
    """
    try:
        return read(load_yaml(Path(path), such_as))
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from error


class Table(Mapping[str, T]):
    """The entries of a YAML file beside the code, by name, read on first use.

    Args:
        what: begins errors about one of them, such as `model `.
        path: of the file, a mapping of names to mappings.
        make: one of them, from its name and its mapping.
    """

    def __init__(self, what: str, path: Path, make: Callable[[str, Mapping[str, Any]], T]) -> None:
        self._what, self._path, self._make = what, path, make

    @cached_property
    def _all(self) -> dict[str, T]:
        return {name: self._make(name, row) for name, row in load_yaml(self._path).items()}

    def __getitem__(self, name: str) -> T:
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def find(self, given: str | Path, from_yaml: Callable[[str], T] | None = None) -> T:
        """The one of a name, or of a file.

        Args:
            given: its name, or where files do as well, a path.
            from_yaml: what reads a file; None: files do not.

        Raises:
            SpecError: there is none, or the file describes none.
        """
        given = str(given)
        if given in self:
            return self[given]
        if from_yaml is not None and (given.endswith((".yaml", ".yml")) or "/" in given):
            return from_yaml(given)
        file = "" if from_yaml is None else ", or the path of a YAML file"
        raise SpecError(
            f"{self._what}{given!r}: expected one of {', '.join(self)}{file}{nearest(given, self)}"
        )


def changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a mapping with some values replaced.

    Args:
        config: stays as it is.
        changes: by key, a dot between the keys of nested mappings; missing keys are added.

    Raises:
        SpecError: a key below what is no mapping.

    >>> changed({"axes": {"tp": 8, "dp": -1}}, {"axes.tp": 2, "share": "all"})
    {'axes': {'tp': 2, 'dp': -1}, 'share': 'all'}
    """
    made = dict(config)
    for key, value in changes.items():
        inner = made
        *path, last = key.split(".")
        for place, name in enumerate(path, 1):
            found = inner.get(name) or {}
            if not isinstance(found, Mapping):
                raise SpecError(
                    f"{key}={value!r}: {'.'.join(path[:place])} is {found!r}, which has no keys; "
                    "give it a mapping first"
                )
            inner[name] = inner = dict(found)
        inner[last] = value
    return made


def read_change(text: str) -> tuple[str, Any]:
    """A key and its value, as `KEY=VALUE` of a command line has them, the value in YAML.

    Raises:
        SpecError: not that.

    >>> read_change("groups.dp.timeout=600")
    ('groups.dp.timeout', 600)
    >>> read_change("create=[tp, dp]")
    ('create', ['tp', 'dp'])
    """
    key, sign, value = text.partition("=")
    if not sign or not all(key.split(".")):
        raise SpecError(f"--set {text}: expected KEY=VALUE, such as --set axes.tp=2")
    return key, _loaded(value, f"--set {text}: the value is not plain YAML")
