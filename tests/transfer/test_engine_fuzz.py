"""Drawn cuts of both sides: fp8 blocks and fused names are those of the uncut tensors."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import commgrid
from commgrid.testing import run_on_ranks
from commgrid.transfer import Fp8Blocks, Part, Transfer, mapping

RANKS, PART = 4, 6
Box = tuple[tuple[int, ...], tuple[int, ...]]


def boxes_of(draw: random.Random, shape: tuple[int, ...]) -> list[list[Box]]:
    """Offset and size of every rank's parts of a tensor, cut anywhere along any dim."""
    dim = draw.randrange(len(shape))
    inner = min(draw.randrange(RANKS), shape[dim] - 1)
    cuts = [0, *sorted(draw.sample(range(1, shape[dim]), inner)), shape[dim]]
    found: list[dict[Box, None]] = [{} for _ in range(RANKS)]
    for number, begin in enumerate(cuts[:-1]):
        size, offset = list(shape), [0] * len(shape)
        size[dim], offset[dim] = cuts[number + 1] - begin, begin
        found[number][tuple(offset), tuple(size)] = None
        if draw.random() < 0.3:
            found[draw.randrange(RANKS)][tuple(offset), tuple(size)] = None
    order = draw.sample(found, RANKS)
    return [[*boxes] for boxes in order]


def part_of(full: Tensor, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    return full[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]


def cut(draw: random.Random, rank: int, tensors: dict[str, Tensor]) -> dict[str, list[Part]]:
    """This rank's parts of every tensor."""
    return {
        name: [
            Part(part_of(full, *box).clone(), tuple(full.shape), box[0])
            for box in boxes_of(draw, tuple(full.shape))[rank]
        ]
        for name, full in tensors.items()
    }


def wrong(held: dict[str, list[Part]], right: dict[str, Tensor]) -> list[str]:
    """The tensors of which some part has other numbers."""
    return [
        name
        for name, parts in held.items()
        for part in parts
        if not torch.equal(
            part.tensor.float(),
            part_of(right[name], tuple(part.offset), tuple(part.tensor.shape)).float(),
        )
    ]


def moved(source: Any, target: Any, **how: Any) -> None:
    grid = commgrid.get_grid()
    Transfer(source, target, source_grid=grid, target_grid=grid, timeout=60, **how).run()


def quantized(weight: Tensor, block: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    """An uncut weight in float8, block by block, and its scales."""
    count = [-(-size // of) for size, of in zip(weight.shape, block, strict=True)]
    numbers, scales = torch.empty(weight.shape, dtype=dtype), torch.ones(count)
    for row in range(count[0]):
        for column in range(count[1]):
            place = (
                slice(row * block[0], (row + 1) * block[0]),
                slice(column * block[1], (column + 1) * block[1]),
            )
            largest = weight[place].float().abs().max()
            if largest:
                scales[row, column] = largest / torch.finfo(dtype).max
            numbers[place] = (weight[place].float() / scales[row, column]).to(dtype)
    return {"w": numbers, "w_scale_inv": scales}


def in_blocks(part: int) -> list[str]:
    """Weights in drawn blocks, which drawn cuts split."""
    grid, found = commgrid.initialize(), []
    for number in range(part * PART, (part + 1) * PART):
        draw = random.Random(f"blocks {number}")
        shape = draw.randint(1, 90), draw.randint(1, 90)
        block = draw.choice([1, 4, 16, 32]), draw.choice([1, 4, 16, 32])
        dtype = draw.choice([torch.float8_e4m3fn, torch.float8_e5m2])
        generator = torch.Generator().manual_seed(number)
        weight = torch.randn(shape, generator=generator) * 10.0 ** draw.randint(-3, 3)
        weight[: draw.choice([0, 0, shape[0] // 2])] = 0
        weight = weight.to(draw.choice([torch.float32, torch.bfloat16]))
        right = quantized(weight, block, dtype)
        source = cut(draw, grid.rank, {"w": weight})
        empty = {name: torch.full(t.shape, 2.0).to(t.dtype) for name, t in right.items()}
        target = cut(draw, grid.rank, empty)
        most = draw.choice([1, 1000, 1 << 20])
        moved(source, target, convert=Fp8Blocks(block=block, dtype=dtype), max_bytes=most)
        found += [f"{number}: {name}" for name in wrong(target, right)]
    commgrid.shutdown()
    return found


@pytest.mark.full
@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_drawn_blocks_are_those_of_the_whole_weight(part: int) -> None:
    assert run_on_ranks(in_blocks, RANKS, part, timeout=300) == [[]] * RANKS


def llama(sizes: dict[str, int], seed: int) -> dict[str, Tensor]:
    """A layer and the ends of a model, by Hugging Face's names."""
    heads, kv, hidden, inner = (sizes[key] for key in ("heads", "kv", "hidden", "inner"))
    layer, generator = "model.layers.0", torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        f"{layer}.self_attn.q_proj.weight": (heads * 4, hidden),
        f"{layer}.self_attn.k_proj.weight": (kv * 4, hidden),
        f"{layer}.self_attn.v_proj.weight": (kv * 4, hidden),
        f"{layer}.self_attn.o_proj.weight": (hidden, heads * 4),
        f"{layer}.mlp.gate_proj.weight": (inner, hidden),
        f"{layer}.mlp.up_proj.weight": (inner, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, inner),
        f"{layer}.input_layernorm.weight": (hidden,),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        "model.norm.weight": (hidden,),
        "model.embed_tokens.weight": (sizes["vocabulary"], hidden),
        "lm_head.weight": (sizes["vocabulary"], hidden),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def of_megatron(hf: dict[str, Tensor], kv: int, padded: int) -> dict[str, Tensor]:
    """The same by Megatron-core's names: a group of queries, its key and its value, in turn."""
    ours, theirs = "model.layers.0", "decoder.layers.0"
    heads = (hf[f"{ours}.self_attn.{each}_proj.weight"].chunk(kv) for each in "qkv")
    gate, up = (hf[f"{ours}.mlp.{each}_proj.weight"] for each in ("gate", "up"))
    fused = f"{theirs}.self_attention.linear_qkv"
    found = {
        f"{fused}.weight": torch.cat(
            [each for group in zip(*heads, strict=True) for each in group]
        ),
        f"{fused}.layer_norm_weight": hf[f"{ours}.input_layernorm.weight"],
        f"{theirs}.self_attention.linear_proj.weight": hf[f"{ours}.self_attn.o_proj.weight"],
        f"{theirs}.mlp.linear_fc1.weight": torch.cat([gate, up]),
        f"{theirs}.mlp.linear_fc1.layer_norm_weight": hf[f"{ours}.post_attention_layernorm.weight"],
        f"{theirs}.mlp.linear_fc2.weight": hf[f"{ours}.mlp.down_proj.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
    }
    for name, own in (
        ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        ("output_layer.weight", "lm_head.weight"),
    ):
        rows = torch.zeros(padded, hf[own].shape[1])
        rows[: len(hf[own])] = hf[own]
        found[name] = rows
    return found


def by_name(part: int) -> list[str]:
    """Hugging Face's layer to Megatron-core's, to vLLM's, and back, in drawn sizes and cuts."""
    grid, found = commgrid.initialize(), []
    for number in range(part * PART, (part + 1) * PART):
        draw = random.Random(f"names {number}")
        kv = draw.choice([1, 2, 3])
        sizes = {
            "heads": kv * draw.choice([1, 2, 4]), "kv": kv, "hidden": draw.choice([4, 7]),
            "inner": draw.choice([3, 10]), "vocabulary": draw.choice([10, 13]),
        }  # fmt: skip
        config = {
            "num_attention_heads": sizes["heads"], "num_key_value_heads": kv, "head_dim": 4,
            "vocab_size": sizes["vocabulary"],
        }  # fmt: skip
        hf = llama(sizes, number)
        megatron = of_megatron(hf, kv, 16)
        fused = {"qkv": "self_attn", "gate_up": "mlp"}
        vllm = {name: t for name, t in hf.items() if name.split(".")[-2][:-5] not in
                ("q", "k", "v", "gate", "up")}  # fmt: skip
        for name, module in fused.items():
            pieces = name.split("_") if "_" in name else [*name]
            vllm[f"model.layers.0.{module}.{name}_proj.weight"] = torch.cat(
                [hf[f"model.layers.0.{module}.{piece}_proj.weight"] for piece in pieces]
            )
        held = cut(draw, grid.rank, hf)
        conventions = ("hf", hf), ("megatron", megatron), ("vllm", vllm), ("hf", hf)
        for (before, _), (after, right) in pairwise(conventions):
            names = mapping("llama", source=before, target=after, config=config)
            got = cut(draw, grid.rank, {name: torch.zeros_like(t) for name, t in right.items()})
            moved(held, got, rename=names)
            found += [f"{number}, {before} to {after}: {name}" for name in wrong(got, right)]
            held = got
    commgrid.shutdown()
    return found


@pytest.mark.full
@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_drawn_layers_through_three_conventions_and_back(part: int) -> None:
    assert run_on_ranks(by_name, RANKS, part, timeout=300) == [[]] * RANKS
