"""Name tables: rows that say which tensors of others' names each tensor is made of.

A row is a name, and what it is called in the family's common names, which for the families here are
those in Hugging Face's files:

    mlp.fc1.weight: {parts: [mlp.gate_proj.weight, mlp.up_proj.weight]}

| key | says |
|---|---|
| `parts` | the common names of the parts, in their order; none: the tensor is left out |
| `sizes` | lengths of the parts in relation to each other; without it they are equal |
| `groups` | how often the parts follow each other, as in Megatron's queries, keys and values |
| `unit` | the length of a part of size 1, where that is known: it is compared |
| `dim` | along which they lie |
| `rows` | how many entries of dim `dim` are real; those behind them are padding |
| `index` | dim 0 counts what `{index}` stands for in the parts' names, such as experts |
| `stacked` | the parts lie in a dim of their own, as `torch.stack` makes it |
| `transposed` | the last two dims are exchanged |
| `tied` | the part's name in models that tie the head to the embedding |

Numbers may be sums of words, which the model's configuration has: `kv_lora_rank + qk_rope_head_dim`.
Scales of blocks have the name of their tensor and `_scale_inv` behind it, and are cut as it is.
In names `{layer}` stands for a number, `{weight|bias}` for one of two words, `{rest}` and `{rest_2}` for
anything. `{layer?}.` is a number with its dot that may be absent: then the tensor has all layers, in dim 0.
"""  # noqa: E501

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path
from typing import Any

from commgrid.errors import SpecError
from commgrid.layout.axis_names import nearest
from commgrid.layout.box import Shape
from commgrid.layout.ranks import whole_number
from commgrid.planning.yaml import from_file, load_yaml
from commgrid.planning.yaml_keys import check_keys
from commgrid.resharding.name_tables.parts import Range, TensorParts

SCALES = "_scale_inv"
_PLACE = re.compile(r"\{([^{}?]+)(?:(\?)\}\.|\})")
_FOLDER, _INCLUDE = Path(__file__).parent, "include"
_NUMBERS = ("groups", "unit", "rows")
_TIED = "tie_word_embeddings"
_KEYS = (
    "parts", "sizes", "groups", "unit", "dim", "rows", "index", "stacked", "transposed", "tied",
)  # fmt: skip
_SUCH_AS = "megatron: {decoder.final_layernorm.weight: model.norm.weight}"


class Template:
    """A name with places for numbers and words.

    Args:
        text: as `layers.{layer}.up.{weight|bias}`.

    Example:
        >>> up = Template("layers.{layer}.up.{weight|bias}")
        >>> up.match("layers.12.up.bias"), up.match("layers.12.down.bias")
        ({'layer': '12', 'weight|bias': 'bias'}, None)
        >>> Template("h.{layer}.{weight|bias}").fill(up.match("layers.12.up.bias"))
        'h.12.bias'
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.places = list(dict.fromkeys(place for place, _ in _PLACE.findall(text)))
        pattern, end = "", 0
        for found in _PLACE.finditer(text):
            place, number = found[1], self.places.index(found[1])
            kind = ".+" if place in ("rest", "rest_2") else r"\d+"
            kind = "|".join(map(re.escape, place.split("|"))) if "|" in place else kind
            group = f"(?P=p{number})" if f"(?P<p{number}>" in pattern else f"(?P<p{number}>{kind})"
            group = rf"(?:{group}\.)?" if found[2] else group
            pattern += re.escape(text[end : found.start()]) + group
            end = found.end()
        self._pattern = re.compile(pattern + re.escape(text[end:]))

    def match(self, name: str) -> dict[str, str] | None:
        """The values of its places in a name; None: it is another name."""
        found = self._pattern.fullmatch(name)
        if found is None:
            return None
        values = {place: found[f"p{number}"] for number, place in enumerate(self.places)}
        return {place: value for place, value in values.items() if value is not None}

    def fill(self, values: Mapping[str, Any]) -> str:
        """The name with these in its places."""
        return _PLACE.sub(lambda place: f"{values[place[1]]}{'.' * bool(place[2])}", self.text)


@dataclass(frozen=True)
class NameRow:
    """How tensors of one kind are made of others.

    Args:
        name: theirs.
        parts: the others', in their order.
        options: other keys of the row.
        config: of the model.
    """

    name: Template
    parts: tuple[Template, ...]
    options: Mapping[str, Any]
    config: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, given: Any, config: Mapping[str, Any]) -> NameRow:
        """A row of a table.

        Raises:
            SpecError: keys that there are not, or parts whose places the name does not fill.
        """
        row = given if isinstance(given, Mapping) else {"parts": given}
        check_keys(f"{name}.", row, _KEYS, _KEYS[1:])
        parts = row["tied"] if "tied" in row and config.get(_TIED) else row["parts"]
        texts = [parts] if isinstance(parts, str) else parts
        if not isinstance(texts, list | tuple) or not all(isinstance(t, str) for t in texts):
            raise SpecError(f"{name}.parts={parts!r}: expected a name, or a list of names")
        if len({*texts}) < len(texts):
            raise SpecError(f"{name}.parts={parts!r}: expected each part once")
        dim, sizes = row.get("dim", 0), row.get("sizes", texts)
        dim = whole_number(f"{name}.dim", dim, 0)
        if not isinstance(sizes, list | tuple) or len(sizes) != len(texts):
            raise SpecError(f"{name}.sizes={sizes!r}: expected a list of one for each of its parts")
        made = cls(Template(name), tuple(map(Template, texts)), row, config)
        places = {*made.name.places, *([row["index"]] if "index" in row else [])}
        for part in made.parts:
            if {*part.places} != places:
                told = ", ".join(sorted(f"{{{place}}}" for place in places)) or "none"
                raise SpecError(
                    f"{name}.parts: {part.text} has other places than the row's name and index, "
                    f"which have {told}; write the same ones into each part"
                )
        return made

    def cut(self, name: str, values: Mapping[str, str], shape: Shape, end: str) -> TensorParts:
        """The parts of a tensor.

        Args:
            name: the tensor's.
            values: what the places of the row's name stand for in it.
            shape: the tensor's.
            end: of its name and its parts': "", or SCALES.

        Raises:
            SpecError: a shape that has no such parts, or a configuration without their sizes.
        """
        options = self.options
        indexes = [place for place in self.name.places if place not in values]
        indexes += [options["index"]] if "index" in options else []
        is_whole = len(self.parts) == 1 and not indexes and not options.keys() - {"parts", "tied"}
        if is_whole or not self.parts:
            return TensorParts(shape, tuple(part.fill(values) + end for part in self.parts))
        counts, entry = shape[: len(indexes)], shape[len(indexes) :]
        dim, turned = options.get("dim", 0), bool(options.get("transposed"))
        if dim >= len(entry) or (turned and len(entry) < 2):
            more = [f"{key}={options[key]!r}" for key in ("dim", "transposed") if key in options]
            more += [f"{{{place}}} counts dim {number}" for number, place in enumerate(indexes)]
            raise SpecError(
                f"{name} has shape {shape}, and its row says {' and '.join(more) or 'dim=0'}; "
                "expected a tensor of more dims, or another row"
            )
        if turned:
            entry = (*entry[:-2], *reversed(entry[-2:]))
        names = [
            part.fill({**values, **dict(zip(indexes, place, strict=True))}) + end
            for place in product(*map(range, counts))
            for part in self.parts
        ]
        ranges = self._ranges(f"{name} has shape {shape}", entry[dim], is_scale=bool(end))
        stacked = bool(options.get("stacked"))
        return TensorParts(shape, tuple(names), ranges, dim, len(indexes), turned, stacked)

    def _ranges(self, what: str, length: int, is_scale: bool) -> tuple[Range, ...]:
        """The parts along the dim that is cut, group after group.

        Args:
            what: begins errors.
            length: of the dim.
            is_scale: whether it counts blocks, and no entries.
        """
        options = self.options
        sizes = [self._value("sizes", n) for n in options.get("sizes", [1] * len(self.parts))]
        numbers = {key: self._value(key, options[key]) for key in _NUMBERS if key in options}
        rows, groups = numbers.get("rows", length), numbers.get("groups", 1)
        lengths = [size * rows // (sum(sizes) * groups) for size in sizes]
        fits = rows <= length and sum(lengths) * groups == rows
        if "unit" in numbers and not is_scale:
            fits = fits and numbers["unit"] * sum(sizes) == rows
        if not fits or (options.get("stacked") and lengths != [1] * len(lengths)):
            said = "".join(f", {key}={options[key]} ({n})" for key, n in numbers.items())
            raise SpecError(
                f"{what}, and its row makes {len(sizes)} parts of sizes "
                f"{', '.join(map(str, sizes))} of dim {options.get('dim', 0)}{said}; give config= "
                "of this model, or correct the row"
            )
        starts = accumulate([0, *lengths * groups])
        return tuple(
            Range(part, start, group * lengths[part], lengths[part])
            for (group, part), start in zip(
                product(range(groups), range(len(sizes))), starts, strict=False
            )
        )

    def _value(self, key: str, given: Any) -> int:
        """A number, or the sum of words of the configuration.

        Raises:
            SpecError: names the word that it has not.
        """
        total = 0
        for word in str(given).split("+"):
            word = word.strip()
            found = int(word) if word.isdecimal() else self.config.get(word)
            if type(found) is not int or found < 1:
                raise SpecError(
                    f"{self.name.text}.{key}={given!r}: config has {word}={found!r}, expected a "
                    "whole number from 1; give config= of the model, such as its config.json"
                )
            total += found
        return total


@dataclass(frozen=True)
class Side:
    """The names of one side.

    Args:
        what: the side's, in messages.
        rows: from its names to the common ones; (): it has the common ones.
    """

    what: str
    rows: tuple[NameRow, ...] = ()

    def cut(self, name: str, shape: Shape) -> TensorParts:
        """The parts of one of its tensors, under their common names.

        Raises:
            SpecError: no row takes the name, or the shape does not fit its row.
        """
        for row in self.rows:
            for end in _ends(name):
                values = row.name.match(name.removesuffix(end))
                if values is not None:
                    return row.cut(name, values, shape, end)
        if not self.rows:
            return TensorParts(shape, (name,))
        known = [row.name.text for row in self.rows]
        raise SpecError(
            f"{name}: {self.what} has no row for this name{nearest(name, known)}; add one, "
            f"or give the tensor one of these names: {', '.join(known[:3])}, …"
        )

    def names_of(self, part: str) -> list[str]:
        """Its tensors of which a part may be."""
        if not self.rows:
            return [part]
        return [
            row.name.fill(values) + end
            for row in self.rows
            for template in row.parts
            for end in _ends(part)
            if (values := template.match(part.removesuffix(end))) is not None
        ]


def _ends(name: str) -> tuple[str, ...]:
    return ("", SCALES) if name.endswith(SCALES) else ("",)


@dataclass(frozen=True)
class NameTable:
    """The names of two sides, which meet in common ones.

    Args:
        source: of the side that is read.
        target: of the side that is written.
    """

    source: Side
    target: Side


def families() -> list[str]:
    """The families of models that there are tables of."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def mapping(
    table: str | Path | Mapping[str, Any],
    *,
    source: str | None = None,
    target: str | None = None,
    config: Any = None,
) -> NameTable:
    """Names of two sides whose tensors are fused, stacked, transposed or padded otherwise.

    It is given as `rename=` of a Transfer or of `checkpoint.load`. Both sides' tensors are cut into
    the parts that have names in common, so that messages and errors have these.

    Args:
        table: a family of models, such as "llama"; a path of a YAML file, or a mapping, as a
            family's file has it: of conventions to rows.
        source, target: a convention of the table, such as "megatron"; None: the common names,
            which of the families here are those in Hugging Face's files.
        config: of the model, with the numbers that rows name, as a mapping, such as a Hugging Face
            `config.json`, or as Transformers' object.

    Raises:
        SpecError: no such family or convention, or a row that is wrong.

    Example:
        >>> table = mapping({"fused": {"gate_up": ["gate", "up"]}}, source="fused")
        >>> table.source.cut("gate_up", (4, 3)).shapes
        {'gate': (2, 3), 'up': (2, 3)}
    """
    given = config.to_dict() if hasattr(config, "to_dict") else {} if config is None else config
    if not isinstance(given, Mapping):
        raise SpecError(f"config={config!r}: expected a mapping of words to numbers")
    numbers = dict(given)
    if {"hidden_size", "num_attention_heads"} <= numbers.keys() and not numbers.get("head_dim"):
        numbers["head_dim"] = numbers["hidden_size"] // numbers["num_attention_heads"]
    if isinstance(table, Mapping):
        return _table("rename=", table, source, target, numbers)
    if str(table).endswith((".yaml", ".yml")):
        return from_file(table, lambda read: _table("", read, source, target, numbers), _SUCH_AS)
    return _table(f"{table}'s ", _family(str(table)), source, target, numbers)


def _family(name: str) -> dict[str, Any]:
    """The table of a family, with the rows of the families that it includes."""
    known = families()
    if name not in known:
        raise SpecError(
            f"mapping({name!r}): expected one of {', '.join(known)}, or the path of a YAML file"
            f"{nearest(name, known)}"
        )
    found: dict[str, Any] = load_yaml(_FOLDER / f"{name}.yaml", _SUCH_AS)
    for included in found.pop(_INCLUDE, []):
        for convention, rows in _family(included).items():
            own = found.setdefault(convention, {})
            own.update((name, row) for name, row in rows.items() if name not in own)
    return found


def _table(
    what: str, table: Mapping[str, Any], source: str | None, target: str | None, config: Any
) -> NameTable:
    sides = []
    for key, name in (("source", source), ("target", target)):
        if name is not None and name not in table:
            raise SpecError(
                f"{key}={name!r}: expected one of {', '.join(table)}, or None for the common names"
                f"{nearest(name, table)}"
            )
        rows = {} if name is None else table[name]
        if not isinstance(rows, Mapping):
            raise SpecError(f"{name}={rows!r}: expected a mapping of names to their parts")
        made = tuple(NameRow.of(each, given, config) for each, given in rows.items())
        sides.append(Side(f"{what}{name}", made))
    return NameTable(*sides)
