"""Parts of fused, stacked, transposed and padded tensors, against torch's own cat and stack."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from commgrid.errors import SpecError
from commgrid.resharding.item import Chunk, Item
from commgrid.resharding.name_tables.table import mapping


def made(row: dict[str, Any], parts: list[list[Tensor]], padding: int) -> Tensor:
    """The whole tensor of each entry's parts, as a framework makes it; layers come first."""
    entries = []
    for entry in parts:
        if row.get("stacked"):
            whole = torch.stack(entry, row["dim"])
        else:
            groups = [part.chunk(row["groups"], row["dim"]) for part in entry]
            whole = torch.cat(
                [one for group in zip(*groups, strict=True) for one in group], row["dim"]
            )
        if padding:
            shape = list(whole.shape)
            shape[row["dim"]] = padding
            whole = torch.cat([whole, torch.full(shape, -1.0)], row["dim"])
        entries.append(whole.mT if row.get("transposed") else whole)
    whole = torch.stack(entries) if row.get("index") or row["layers"] else entries[0]
    both = row.get("index") and row["layers"]
    return whole.unflatten(0, (row["layers"], -1)) if both else whole


def boxes(shape: tuple[int, ...], data: st.DataObject) -> Iterator[tuple[slice, ...]]:
    """A tensor in boxes, cut in two at a place of each dim."""
    found: list[tuple[slice, ...]] = [()]
    for size in shape:
        at = data.draw(st.integers(0, size))
        found = [(*box, one) for box in found for one in (slice(0, at), slice(at, size))]
    yield from (box for box in found if all(one.start < one.stop for one in box))


@st.composite
def rows(draw: st.DrawFn) -> tuple[dict[str, Any], list[list[Tensor]], int]:
    """A row, each entry's parts, and how many entries are padding."""
    dims, stacked, index = draw(st.integers(1, 3)), draw(st.booleans()), draw(st.booleans())
    count, layers = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    entries = max(layers, 1) * (draw(st.integers(1, 3)) if index else 1)
    dim, groups = draw(st.integers(0, dims - 1)), 1 if stacked else draw(st.integers(1, 3))
    sizes = [1 if stacked else draw(st.integers(1, 3)) for _ in range(count)]
    unit = 1 if stacked else groups * draw(st.integers(1, 2))
    shape = [draw(st.integers(1, 3)) for _ in range(dims)]
    row: dict[str, Any] = {
        "parts": [f"{{layer}}.p{part}" for part in range(count)],
        "dim": dim,
        "groups": groups,
    }
    row |= {"sizes": sizes, "stacked": stacked, "layers": layers}
    if index:
        row |= {"parts": [f"{name}.{{e}}" for name in row["parts"]], "index": "e"}
    if dims + stacked > 1:
        row["transposed"] = draw(st.booleans())
    padding = 0 if stacked or count * groups > 1 else draw(st.integers(0, 2))
    if padding:
        row["rows"] = sizes[0] * unit
    parts: list[list[Tensor]] = []
    first = 0
    for _ in range(entries):
        parts.append([])
        for size in sizes:
            own = shape if stacked else [*shape[:dim], size * unit, *shape[dim + 1 :]]
            numbers = torch.arange(first, first + torch.Size(own).numel())
            parts[-1].append(numbers.view(own).float())
            first += numbers.numel()
    return row, parts, padding


@given(rows(), st.data())
def test_any_boxes_of_a_whole_are_boxes_of_its_parts_and_back(
    drawn: tuple[dict[str, Any], list[list[Tensor]], int], data: st.DataObject
) -> None:
    row, parts, padding = drawn
    whole = made(row, parts, padding)
    layers = row.pop("layers")
    table = mapping({"fused": {"l.{layer?}.w": row}}, source="fused")
    cut = table.source.cut("l.w" if layers else "l.7.w", tuple(whole.shape))
    flat = [part for entry in parts for part in entry]
    assert list(cut.shapes.values()) == [tuple(part.shape) for part in flat]

    held = [
        Chunk(tuple(one.start for one in box), whole[box].clone())
        for box in boxes(tuple(whole.shape), data)
    ]
    items = cut.items(Item(("model", "w"), tuple(whole.shape), held, whole.dtype))
    assert [item.path for item in items] == [("model", name) for name in cut.names]
    for item, part in zip(items, flat, strict=True):
        found = torch.full_like(part, -2)
        for offset, box in item.chunks:
            found[tuple(slice(o, o + n) for o, n in zip(offset, box.shape, strict=True))] = box
            box.fill_(-3)  # a view: the whole tensor is written
        assert torch.equal(found, part)
    assert all((chunk.data < 0).all() for chunk in held)

    back = torch.full_like(whole, -1)
    for name, part in zip(cut.names, flat, strict=True):
        some = [Chunk(tuple(one.start for one in box), part[box])
                for box in boxes(tuple(part.shape), data)]  # fmt: skip
        for offset, box in cut.whole(name, some):
            back[tuple(slice(o, o + n) for o, n in zip(offset, box.shape, strict=True))] = box
    assert torch.equal(back, whole)


CONFIG = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16, "vocab_size": 10,
}  # fmt: skip
QKV = "decoder.layers.3.self_attention.linear_qkv.weight"


@pytest.mark.parametrize(
    ("name", "shape", "told"),
    [
        (QKV, (64, 16), "groups=num_key_value_heads (2), unit=head_dim (4); give config="),
        (QKV, (30, 16), "has shape (30, 16), and its row makes 3 parts of sizes 4, 2, 2 of dim 0"),
        (QKV, (), "and its row says dim=0; expected a tensor of more"),
        (QKV.replace("qkv", "kqv"), (32, 16), "llama's megatron has no row for this name; did you"),
        ("embedding.word_embeddings.weight", (8, 16), "of dim 0, rows=vocab_size (10); give"),
    ],
)  # fmt: skip
def test_a_tensor_of_another_model_is_refused(name: str, shape: tuple[int, ...], told: str) -> None:
    table = mapping("llama", source="megatron", config=CONFIG)
    with pytest.raises(SpecError) as error:
        table.source.cut(name, shape)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("name", "shape"), [(QKV, (32, 16)), (QKV.replace("weight", "bias"), (32,)),
                        ("embedding.word_embeddings.weight", (12, 16))],
)  # fmt: skip
def test_a_tensor_of_this_model_is_taken(name: str, shape: tuple[int, ...]) -> None:
    table = mapping("llama", source="megatron", config=CONFIG)
    assert sum(part[0] for part in table.source.cut(name, shape).shapes.values()) in (32, 10)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"table": "lama"}, "mapping('lama'): expected one of deepseek_v3, llama, qwen3"),
        ({"table": "llama", "source": "megatrn"}, "source='megatrn': expected one of hf, commgrid"),
        ({"table": {"a": {"x": {"part": "y"}}}, "source": "a"}, "x.part: unknown key"),
        ({"table": {"a": {"x": {"parts": 3}}}, "source": "a"}, "x.parts=3: expected a name"),
        ({"table": {"a": {"x": ["y", 3]}}, "source": "a"}, "x.parts=['y', 3]: expected a name"),
        ({"table": {"a": {"x": ["y", "y"]}}, "source": "a"}, "x.parts=['y', 'y']: expected each"),
        ({"table": {"a": {"x": {"parts": "y", "dim": -1}}}, "source": "a"}, "x.dim=-1: expected"),
        ({"table": {"a": {"x": {"parts": "y", "sizes": [1, 2]}}}, "source": "a"},
         "x.sizes=[1, 2]: expected a list of one for each"),
        ({"table": {"a": {"x.{n}": "y"}}, "source": "a"},
         "x.{n}.parts: y has other places than the row's name and index, which have {n}"),
        ({"table": {"a": ["x"]}, "source": "a"}, "a=['x']: expected a mapping of names"),
        ({"table": "llama", "config": "8b"}, "config='8b': expected a mapping of words"),
        ({"table": "nowhere.yaml"}, "nowhere.yaml: there is no such file"),
    ],
)  # fmt: skip
def test_a_table_that_is_wrong_is_refused(given: dict[str, Any], told: str) -> None:
    table = given.pop("table")
    with pytest.raises(SpecError) as error:
        mapping(table, **given)
    assert told in str(error.value)


def test_a_word_that_the_configuration_has_not_is_named() -> None:
    table = mapping("llama", source="megatron", config={"num_attention_heads": 4})
    with pytest.raises(
        SpecError, match=r"num_key_value_heads=None, expected a whole number from 1"
    ):
        table.source.cut(QKV, (32, 16))


def test_a_table_of_ones_own_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("fused: {'l.{i}.gate_up': ['l.{i}.gate', 'l.{i}.up'], '{rest}': '{rest}'}")
    table = mapping(path, target="fused")
    assert table.target.cut("l.3.gate_up", (4,)).shapes == {"l.3.gate": (2,), "l.3.up": (2,)}
    assert table.target.cut("norm", (4,)).shapes == {"norm": (4,)}
    assert table.target.names_of("l.3.up") == ["l.3.gate_up", "l.3.up"]
