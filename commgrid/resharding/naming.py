"""One rule by which names of tensors become a model's, of a checkpoint or of another model."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from commgrid.errors import SpecError

Rename = Mapping[str, str | Sequence[str]] | Callable[[str], str | Sequence[str] | None]
"""Others' names to the model's; a name that is not in the mapping stays, a tensor for whose name a
function returns None is left out. Several names are those of tied weights."""


class Naming:
    """How others' names become a model's.

    Args:
        prefix: what a checkpoint's names of the model's tensors begin with.
        rename: what follows it to the model's names.

    Raises:
        SpecError: values of other types.
    """

    def __init__(self, prefix: str, rename: Rename | None) -> None:
        if not isinstance(prefix, str):
            raise SpecError(f"prefix={prefix!r}: expected a text, as 'model.' or ''")
        if rename is not None and not callable(rename) and not isinstance(rename, Mapping):
            raise SpecError(f"rename={rename!r}: expected a mapping of names, or a function")
        self.prefix, self._rename = prefix, rename

    def of_model(self, name: str) -> str | None:
        """The model's name of a tensor; None: it is left out.

        Raises:
            SpecError: it is neither a text nor None.
        """
        found = self.all_of_model(name)
        if len(found) > 1:
            raise SpecError(
                f"rename= gives {name!r} the names {', '.join(found)}; expected one here, several "
                "are for checkpoint.load"
            )
        return found[0] if found else None

    def all_of_model(self, name: str) -> Sequence[str]:
        """The model's names of a tensor, several of tied weights; none: it is left out.

        Raises:
            SpecError: they are not texts.
        """
        if self._rename is None:
            return [name]
        given: Any
        given = self._rename(name) if callable(self._rename) else self._rename.get(name, name)
        found = [] if given is None else [given] if isinstance(given, str) else given
        if not isinstance(found, list | tuple) or not all(isinstance(one, str) for one in found):
            gave = (
                f"rename({name!r}) returned" if callable(self._rename) else f"rename[{name!r}] is"
            )
            raise SpecError(f"{gave} {given!r}: expected a name, a list of names, or None")
        return found


def split_name(text: str, names: Container[str]) -> tuple[str, str]:
    """Split `<parameter>.<key>` after a known parameter; after the last dot if none is known.

    >>> split_name("up.weight.ema.fast", {"up.weight"}), split_name("up.weight.step", set())
    (('up.weight', 'ema.fast'), ('up.weight', 'step'))
    """
    last = end = text.rfind(".")
    while end > 0:
        if text[:end] in names:
            return text[:end], text[end + 1 :]
        end = text.rfind(".", 0, end)
    return text[: max(last, 0)], text[last + 1 :]
