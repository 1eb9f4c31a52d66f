"""Names of foreign checkpoints, translated to commgrid's.

| written by | names | here |
|---|---|---|
| `dcp.save(model.state_dict())` | `0.weight` | with `prefix=""`, `model.0.weight` |
| `dcp.save({"model": …, "optimizer": …})` | `model.0.weight`, `optimizer.state.0.weight.exp_avg` | the same |
| with optimizer state that is not flattened | `optimizer.param_groups.0.lr`, `….0.params` | `optimizer.param_groups.0.weight.lr` |
| Megatron-core's `torch_dist` | `decoder.final_layernorm.weight` | with `prefix=""` and `rename=`, the model's |
| Hugging Face's safetensors | `model.norm.weight` | likewise |
"""  # noqa: E501

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from commgrid.checkpoint.reader import check_has
from commgrid.checkpoint.writer import Report
from commgrid.errors import CheckpointError
from commgrid.layout.box import Shape
from commgrid.resharding.dtypes import scales_beside, unscaled
from commgrid.resharding.item import Item, Value, key_of
from commgrid.resharding.layouts import Form
from commgrid.resharding.name_tables.parts import TensorParts
from commgrid.resharding.naming import MASTER, Naming, copy_of, split_name, with_twins

MODEL = "model."
_STATE, _OPTIONS = "optimizer.state.", "optimizer.param_groups."
_MEMBERS = re.compile(r"optimizer\.param_groups\.(\d+)\.params")


class Source(Protocol):
    """A checkpoint to load from.

    Attributes:
        forms: of its tensors by name; None: a value.
    """

    forms: Mapping[str, Form | None]

    def read(self, items: Iterable[Item | Value], report: Report, /) -> dict[str, Any]:
        """Fills the items' boxes; returns the values by key."""


class Renamed:
    """A source under the names of commgrid's own.

    Args:
        source: with its own names.
        naming: its names to the model's.
        with_optimizer: whether an optimizer is loaded.
        ties: the model's names of each tied weight, of which it may have one.

    Raises:
        CheckpointError: two of its tensors would have one name.
    """

    def __init__(
        self,
        source: Source,
        naming: Naming,
        with_optimizer: bool = True,
        ties: Sequence[set[str]] = (),
    ) -> None:
        self._source, self._prefix = source, naming.prefix
        self._stored: dict[str, str] = {}
        self._parts: dict[str, tuple[TensorParts, str]] = {}  # parts of stored tensors
        begin = naming.prefix
        self._known = {
            key.removeprefix(begin).removeprefix("."): key
            for key in source.forms if key.startswith(begin)
        }  # fmt: skip
        members: dict[str, str] = {}
        if with_optimizer:
            members = {key: match[1] for key in source.forms if (match := _MEMBERS.fullmatch(key))}
            _refuse_nested(getattr(source, "paths", {}))
        for key in source.forms:
            if key.startswith("optimizer.") and not (with_optimizer or self._is_copy(key)):
                self._name(key, key)
            else:
                self._add(naming, key, is_nested=bool(members))
        for key, group in members.items():
            self._add_group(naming, key, group)
        self._stored = with_twins(self._stored, ties)
        forms = {name: source.forms[stored] for name, stored in self._stored.items()}
        for name, (cut, part) in self._parts.items():
            if (form := forms[name]) is not None:
                forms[name] = replace(form, shape=cut.shapes[part])
        self._padded = dict(_without_padding(forms, naming.padded))
        self.forms: Mapping[str, Form | None] = forms | self._padded

    def _is_copy(self, key: str) -> bool:
        """Whether it is the fp32 copy of a parameter, which is read without an optimizer too."""
        name, last = split_name(key.removeprefix(_STATE), self._known)
        return last == MASTER and name in self._known

    def _add(self, naming: Naming, key: str, is_nested: bool) -> None:
        for begin in (_STATE, _OPTIONS):
            if key.startswith(begin):
                if begin == _STATE or not is_nested:
                    name, last = split_name(key.removeprefix(begin), self._known)
                    self._add_parts(naming, key, name, begin, f".{last}")
                return
        if key.startswith(("optimizer.", "extra.", "extra_per_rank.")) or key == "optimizer_class":
            self._name(key, key)
        elif key.startswith(naming.prefix) and (naming.prefix or key != "step"):
            name = key.removeprefix(naming.prefix).removeprefix(".")
            self._add_parts(naming, key, name, MODEL, "")
        elif not key.startswith(MODEL):  # another model's, by prefix=
            self._name(key, key)

    def _add_group(self, naming: Naming, key: str, group: str) -> None:
        """Options of one group for each of its parameters, as torch flattens them."""
        members = self._source.read([Value((key,))], lambda *_: None)[key]
        if not all(isinstance(name, str) for name in members):
            raise CheckpointError(
                "its optimizer state is by numbers of parameters, which say nothing of where they "
                "are now; save it with torch.distributed.checkpoint.state_dict."
                "get_optimizer_state_dict, which takes their names, or load the model alone"
            )
        begin = f"{_OPTIONS}{group}."
        for stored in self._source.forms:
            option = stored.removeprefix(begin)
            if not stored.startswith(begin) or option == "params" or "." in option:
                continue
            for name in members:
                for own in naming.source(name, self._shape(name)).names:
                    self._name(f"{_OPTIONS}{own}.{option}", stored)

    def _add_parts(self, naming: Naming, key: str, name: str, begin: str, end: str) -> None:
        """Name a parameter's tensor, or state of it."""
        cut = naming.source(name, self._shape(name))
        is_cut = cut.ranges and cut.shape == _shape_of(self._source.forms[key])
        for own in cut.names:
            self._name(f"{begin}{own}{end}", key)
            if is_cut:
                self._parts[f"{begin}{own}{end}"] = cut, own

    def _shape(self, name: str) -> Shape:
        """Of a stored parameter; (): it is none."""
        return _shape_of(self._source.forms.get(self._known.get(name, "")))

    def _name(self, name: str, stored: str) -> None:
        other = self._stored.setdefault(name, stored)
        if other != stored:
            raise CheckpointError(
                f"its {other} and {stored} are both {name} after prefix= and rename=; give each "
                "tensor a name of its own"
            )

    def is_one(self, key: str, other: str) -> bool:
        """Whether two names are of one tensor of the source."""
        return self._stored[key] == self._stored[other]

    def check(self, items: Iterable[Item | Value]) -> None:
        """Look whether it has these, in these shapes.

        Raises:
            CheckpointError: names what is missing, has another shape, or would be read without its
                scale.
        """
        wanted = list(items)
        ours = any(item.key.startswith(MODEL) for item in wanted)
        if ours and not any(key.startswith(MODEL) for key in self.forms):
            under = [key for key in self._source.forms if key.startswith(self._prefix)]
            if self._prefix and under:
                raise CheckpointError(f"rename= leaves out all of its names, such as {under[0]}")
            names = ", ".join(list(self._source.forms)[:3])
            raise CheckpointError(
                f"no name in it begins with prefix={self._prefix!r}: it has {names}; give the "
                "prefix= of the model's names, '' if they have none, and rename= if they are others"
            )
        check_has(self.forms, wanted)
        self._refuse_unscaled(wanted)

    def _refuse_unscaled(self, wanted: Sequence[Item | Value]) -> None:
        """Refuse numbers of eight bits that would be read without the scale beside them."""
        dtypes = {key: form.dtype for key, form in self._source.forms.items() if form is not None}
        beside = scales_beside(dtypes)
        taken = {self._stored[item.key] for item in wanted}
        for item in wanted if beside else ():
            key = self._stored[item.key]
            if not isinstance(item, Item) or key not in beside:
                continue
            scale = unscaled(dtypes[key], item.form.dtype, beside[key], taken)
            if scale and key_of(copy_of(item.path)) not in self.forms:
                raise CheckpointError(
                    f"{key} is {dtypes[key]}, to be multiplied by {scale}, which is not read; "
                    f"expected a model that has both, with {item.key} in the same dtype, or a file "
                    "of the products. Scales are multiplied in safetensors files alone: a "
                    "weight_scale of one number or one a row, and weight_scale_inv of square blocks"
                )

    def read(self, items: Iterable[Item | Value], report: Report) -> dict[str, Any]:
        """Fills the items' boxes; returns the values by key."""
        wanted = list(items)
        found = self._source.read([self._asked(item) for item in wanted], report)
        values = [item.key for item in wanted if isinstance(item, Value)]
        return {key: found[self._stored[key]] for key in values}

    def _asked(self, item: Item | Value) -> Item | Value:
        """The item to read from the source, into the same memory."""
        asked = replace(item, path=(self._stored[item.key],))
        if isinstance(asked, Item) and item.key in self._padded:
            return replace(asked, shape=_shape_of(self._source.forms[self._stored[item.key]]))
        if not isinstance(asked, Item) or item.key not in self._parts:
            return asked
        cut, part = self._parts[item.key]
        return replace(asked, shape=cut.shape, chunks=cut.whole(part, asked.chunks))


def _shape_of(form: Form | None) -> Shape:
    """Of a tensor; (): also of a value, and of nothing."""
    return () if form is None else form.shape


def _refuse_nested(paths: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse dicts and lists that torch has taken apart, whose keys' types it does not say."""
    for path in paths.values():
        if path[:2] == ("optimizer", "state") and len(path) > 4:
            raise CheckpointError(
                f"its optimizer keeps a dict or a list for {path[2]}, {path[3]}, whose parts torch "
                "has saved one by one and does not put together; save with commgrid.checkpoint, or "
                "load the model alone"
            )


def _without_padding(
    forms: Mapping[str, Form | None], padded: Mapping[str, int]
) -> Iterator[tuple[str, Form]]:
    """Forms of padded parameters, and of their optimizer state, as if they had no padding."""
    for name, rows in padded.items():
        shape = _shape_of(forms.get(MODEL + name))
        for key, form in forms.items() if shape and shape[0] > rows else ():
            ours = key == MODEL + name or key.startswith(f"{_STATE}{name}.")
            if ours and form is not None and form.shape == shape:
                yield key, replace(form, shape=(rows, *shape[1:]))
