"""Names of tensors: how others' become a model's, and how keys of optimizer state become names."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from commgrid.errors import CheckpointError, SpecError
from commgrid.layout.axis_names import nearest
from commgrid.layout.box import Shape
from commgrid.resharding.item import Item, Path, Value, key_of
from commgrid.resharding.layouts import Form
from commgrid.resharding.name_tables.parts import TensorParts
from commgrid.resharding.name_tables.table import NameTable

Entry = TypeVar("Entry")
Rename = Mapping[str, str | Sequence[str]] | Callable[[str], str | Sequence[str] | None] | NameTable
"""Others' names to the model's; a name that is not in the mapping stays, a tensor for whose name a
function returns None is left out. Several names are those of tied weights. With a table both sides'
names become the common ones, and tensors their parts."""


class Naming:
    """How others' names become a model's.

    Args:
        prefix: what a checkpoint's names of the model's tensors begin with.
        rename: what follows it to the model's names.
        padded: by the model's names, how many entries along dim 0 are no padding.

    Raises:
        SpecError: values of other types.
    """

    def __init__(
        self, prefix: str, rename: Rename | None, padded: Mapping[str, int] | None = None
    ) -> None:
        if not isinstance(prefix, str):
            raise SpecError(f"prefix={prefix!r}: expected a text, as 'model.' or ''")
        self.prefix = prefix
        self._table = rename if isinstance(rename, NameTable) else None
        self._rename = None if isinstance(rename, NameTable) else rename
        if (
            rename is not None
            and not callable(rename)
            and not isinstance(rename, Mapping | NameTable)
        ):
            raise SpecError(
                f"rename={rename!r}: expected a mapping of names, a function, or "
                "commgrid.transfer.mapping(…)"
            )

        self.padded = padded or {}
        if not isinstance(self.padded, Mapping) or not all(
            isinstance(name, str) and type(rows) is int and rows > 0
            for name, rows in self.padded.items()
        ):
            raise SpecError(
                f"padded={padded!r}: expected the model's names, each with how many entries along "
                "dim 0 are no padding, as {'embedding.weight': 128256}"
            )
        if self._table is not None and self.padded:
            raise SpecError("padded= does not go with a table as rename=; say it there with rows:")

    def rows_of_source(self, name: str) -> int | None:
        """How many entries of another's tensor are no padding; None: all."""
        own = self.source(name).names if self.padded else ()
        return next((self.padded[each] for each in own if each in self.padded), None)

    def check_padded(self, names: Collection[str]) -> None:
        """Refuse names in `padded` that no tensor of the model has.

        Args:
            names: the model's, of all ranks.
        """
        for name in self.padded:
            if name not in names:
                raise SpecError(
                    f"padded= has {name!r}, which is no tensor of the model"
                    f"{nearest(name, names)}; give the model's names"
                )

    @property
    def cuts_target(self) -> bool:
        """Whether the model's tensors have parts."""
        return self._table is not None and bool(self._table.target.rows)

    @property
    def cuts_source_alone(self) -> bool:
        """Whether others' tensors have parts, whose names on the target are not known here."""
        return self._table is not None and not self._table.target.rows

    def source(self, name: str, shape: Shape = ()) -> TensorParts:
        """A tensor under the model's names, or its parts under the common ones.

        Args:
            name: others'.
            shape: of the tensor; (): also of a plain value.

        Raises:
            SpecError: there is no such name, or it gets none that is a text.
        """
        if self._table is not None:
            return self._table.source.cut(name, shape)
        return TensorParts(shape, tuple(self._names(name)))

    def target(self, name: str, shape: Shape = ()) -> TensorParts:
        """A tensor of the model, or its parts under the common names.

        Raises:
            SpecError: there is no such name.
        """
        if self._table is not None:
            return self._table.target.cut(name, shape)
        return TensorParts(shape, (name,))

    def on_target(self, part: str) -> list[str]:
        """The tensors of the model that have a part, by its common name."""
        return [part] if self._table is None else self._table.target.names_of(part)

    def tied(self, side: str, aliases: Iterable[set[str]]) -> list[set[str]]:
        """The names of a side's tied weights after renaming; weights in parts are left out."""
        cut = self.source if side == "source" else self.target
        each = [[cut(name).names for name in names] for names in aliases]
        return [{*chain(*names)} for names in each if all(len(own) == 1 for own in names)]

    def _names(self, name: str) -> Sequence[str]:
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
            raise SpecError(f"{gave} {given!r}: expected a name, or None")
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


SharedNames = dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]]
"""The weights of which other stages have copies: by ranks and full shape their names, in order."""

Tied = tuple[SharedNames, list[set[str]]]
"""A rank's weights of which other stages have copies, and the names of those that modules share."""


def shared_in(items: Iterable[Item | Value]) -> SharedNames:
    """The weights of which other stages have copies, which they may give other names."""
    found: SharedNames = {}
    for item in items:
        if isinstance(item, Item) and item.shared is not None:
            ranks = tuple(dist.get_process_group_ranks(item.shared))
            found.setdefault((ranks, tuple(item.shape)), []).append(item.path[-1])
    return found


def ties_of(told: Iterable[SharedNames], aliases: Iterable[set[str]] = ()) -> list[set[str]]:
    """The names of each weight that has several.

    Args:
        told: of each rank; copies that have different names come in the same order on all.
        aliases: names of one parameter of a model.

    >>> key = (0, 1), (8, 4)
    >>> [sorted(names) for names in ties_of([{key: ["tokens"]}, {key: ["head"]}])]
    [['head', 'tokens']]
    """
    lists: dict[Any, list[list[str]]] = {}
    for one in told:
        for key, listed in one.items():
            lists.setdefault(key, []).append(listed)
    ties = list(aliases)
    for each in lists.values():
        alike = set(each[0]).intersection(*each)
        ties += map(set, zip(*([n for n in one if n not in alike] for one in each), strict=False))
    found: list[set[str]] = []
    for names in ties:
        others = [each for each in found if each & names]
        found = [each for each in found if not each & names] + [names.union(*others)]
    return found


def ties_of_all(told: Sequence[Tied]) -> list[set[str]]:
    """The names of each weight that has several, as all ranks have told them."""
    shared, aliases = zip(*told, strict=True)
    return ties_of(shared, chain.from_iterable(aliases))


def twins(key: str, ties: Iterable[set[str]]) -> Iterator[str]:
    """The keys of a tied weight's entry under its other names.

    >>> list(twins("optimizer.state.head.weight.step", [{"head.weight", "tokens.weight"}]))
    ['optimizer.state.tokens.weight.step']
    """
    for names in ties:
        for name in names:
            for begin, end in _ENTRIES.items():
                start = f"{begin}{name}{end}"
                if key.startswith(start) if end else key == start:
                    rest = key.removeprefix(start)
                    yield from (f"{begin}{each}{end}{rest}" for each in sorted(names - {name}))


def with_twins(entries: Mapping[str, Entry], ties: Sequence[set[str]]) -> dict[str, Entry]:
    """Entries by key, those of a tied weight under each of its names.

    >>> with_twins({"model.head.weight": 1}, [{"head.weight", "tokens.weight"}])
    {'model.head.weight': 1, 'model.tokens.weight': 1}
    """
    found = dict(entries)
    for key, entry in entries.items() if ties else ():
        for twin in twins(key, ties):
            found.setdefault(twin, entry)
    return found


def first_name(key: str, ties: Iterable[set[str]]) -> str:
    """A tensor's key under the first name of a tied weight, without `model.`.

    >>> first_name("optimizer.state.tokens.weight.step", [{"head.weight", "tokens.weight"}])
    'optimizer.state.head.weight.step'
    """
    for names in ties:
        for name in names:
            if key == name:
                return min(names)
            start = f"optimizer.state.{name}."
            if key.startswith(start):
                return f"optimizer.state.{min(names)}.{key.removeprefix(start)}"
    return key


_ENTRIES = {"model.": "", "optimizer.state.": ".", "optimizer.param_groups.": "."}
MASTER = "master"
"""The key of the fp32 copy of a parameter in half precision."""


def not_taken(stored: Iterable[str], updated: Container[str]) -> list[str]:
    """Names of an optimizer's entries that are of no parameter which is updated.

    Args:
        stored: names of a checkpoint.
        updated: parameters, of all ranks.

    Returns:
        Of options one for each parameter, `optimizer.param_groups.<parameter>`.
    """
    found: dict[str, None] = {}
    for kind in ("param_groups", "state"):
        prefix = f"optimizer.{kind}."
        for key in stored:
            if not key.startswith(prefix):
                continue
            name, _ = split_name(key.removeprefix(prefix), updated)
            if name not in updated:
                group = f"optimizer.param_groups.{name}"
                found[group if kind == "param_groups" or group in found else key] = None
    return list(found)


def copy_of(path: Path) -> Path:
    """The name of the fp32 copy of a parameter of the model."""
    return "optimizer", f"state.{path[-1]}.{MASTER}"


def read_from(item: Item, stored: Mapping[str, Form | None]) -> Path:
    """The name that a tensor of the model is read from: its fp32 copy's if that is of use.

    It is where the tensor holds more than the dtype that it was stored in.

    Args:
        item: the tensor.
        stored: forms of what there is to read, by key.
    """
    form, copy = stored.get(item.key), stored.get(key_of(copy_of(item.path)))
    if form is None or copy is None:
        return item.path
    dtype = form.torch_dtype
    return copy_of(item.path) if torch.promote_types(item.dtype, dtype) != dtype else item.path


def text_of(parameter: str, key: Any) -> str:
    """A key of a parameter's state as part of a name.

    Raises:
        SpecError: it is none that can be read back.
    """
    if type(key) is str and key.isprintable() and key[:1] not in ("", "[") and key != MASTER:
        return key
    with suppress(ValueError, SyntaxError):
        if ast.literal_eval(repr(key)) == key:
            return f"[{key!r}]"
    raise SpecError(
        f"{parameter}: the optimizer's state has the key {key!r}; expected a text, a number, "
        "or a tuple of these"
    )


def key_of_text(text: str, own: Mapping[str, Any], is_torchs: bool = False) -> Any:
    """The key that a text is of; torch writes numbers and tuples as texts.

    Args:
        own: by text the keys that the optimizer has already.
        is_torchs: whether torch has written it.

    Raises:
        CheckpointError: it may be of a number or a tuple.
    """
    with suppress(ValueError, SyntaxError):
        if text[:1] == "[":
            return ast.literal_eval(text[1:-1])
        if is_torchs and text not in own and not isinstance(ast.literal_eval(text), str):
            raise CheckpointError(
                f"its optimizer state has the key {text}, a text or the value that it stands for, "
                "which torch's files do not tell; call step() of the optimizer once before the "
                "load, so that it has its keys"
            )
    return own.get(text, text)


def refuse_further_state(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that keeps more than state of parameters and options of groups."""
    kept = [f"state[{key!r}]" for key in optimizer.state if not isinstance(key, Tensor)]
    with suppress(KeyError):  # torch's, of state of a parameter that is in no group
        more = optimizer.state_dict().keys() - {"state", "param_groups"}
        kept += [f"state_dict()[{key!r}]" for key in sorted(more, key=str)]
    if kept:
        raise SpecError(
            f"{type(optimizer).__name__} keeps {kept[0]}, which belongs to no parameter and would "
            "be lost; keep it in param_groups or in state[parameter], or give it as extra="
        )
