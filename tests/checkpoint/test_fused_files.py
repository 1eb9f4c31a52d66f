"""Checkpoints whose tensors are fused or stacked otherwise than the model's."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import commgrid
from commgrid import checkpoint
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.errors import CheckpointError, SpecError
from commgrid.expert import MoELayer
from commgrid.tensor_parallel import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from commgrid.testing import run_on_ranks
from commgrid.transfer import Transfer, mapping
from tests.checkpoint.test_others_files import LLAMA, Mlp, said
from tests.transfer.test_model_families import transformers_model

CONFIG = {**LLAMA, "head_dim": 4}
TABLE = {
    "fused": {
        "qkv.weight": {"parts": ["q.weight", "k.weight", "v.weight"], "sizes": [4, 1, 1]},
        "{rest}": "{rest}",
    }
}


@pytest.fixture
def grid() -> Iterator[Any]:
    yield commgrid.initialize()
    commgrid.shutdown()


class Attention(nn.Module):
    """Attention with rotary positions, whose keys and values are one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(16, 4, num_kv_heads=2, bias=False)
        self.o_proj = RowParallelLinear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in self.qkv_proj(x))
        angles = torch.outer(torch.arange(x.shape[1]), 10_000 ** -torch.arange(0, 1, 0.5))
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

        def turned(part: Tensor) -> Tensor:
            one, other = part.chunk(2, -1)
            return part * cos + torch.cat((-other, one), -1) * sin

        mixed = F.scaled_dot_product_attention(
            turned(q), turned(k), v, is_causal=True, enable_gqa=True
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(16, eps=1e-6)
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(16, eps=1e-6)
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """A Llama of commgrid's layers, with Hugging Face's names but for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = VocabParallelEmbedding(32, 16)
        self.model.layers = nn.ModuleList(Block() for _ in range(2))
        self.model.norm = nn.RMSNorm(16, eps=1e-6)
        self.lm_head = ColumnParallelLinear(16, 32, bias=False, gather_output=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model.embed_tokens(tokens)  # type: ignore[operator]
        for block in self.model.layers:  # type: ignore[union-attr]
            x = block(x)
        return self.lm_head(self.model.norm(x))  # type: ignore[no-any-return, operator]


def starts_from_files(folder: str, saved: str, tokens: Tensor) -> Tensor:
    commgrid.initialize(tp=2)
    model = Llama()
    names = mapping("llama", source="hf", target="commgrid", config=CONFIG)
    checkpoint.load(folder, model, prefix="", rename=names, progress=False)
    checkpoint.save(saved, 1, model, progress=False)
    with torch.no_grad():
        found = model(tokens)
    commgrid.shutdown()
    return found  # type: ignore[no-any-return]


def test_hugging_faces_files_start_a_model_with_fused_keys_and_go_back(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers (group interop)")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**LLAMA, tie_word_embeddings=False, rms_norm_eps=1e-6)
    model = transformers.LlamaForCausalLM(config).eval()
    folder, back = tmp_path / "llama", tmp_path / "back"
    model.save_pretrained(folder)
    tokens = torch.randint(32, (2, 10), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = model(tokens).logits
    for found in run_on_ranks(starts_from_files, 2, str(folder), str(tmp_path / "runs"), tokens):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)

    names = mapping("llama", source="commgrid", config=CONFIG)
    checkpoint.export(tmp_path / "runs", back, rename=names)
    shutil.copy(folder / "config.json", back)
    again = type(model).from_pretrained(back).state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(again[name], value), name
    both = mapping("llama", source="commgrid", target="vllm", config=CONFIG)
    with pytest.raises(SpecError, match="leave target= of mapping"):
        checkpoint.export(tmp_path / "runs", tmp_path / "other", rename=both)


def experts_of(folder: str, config: dict[str, Any]) -> list[Tensor]:
    """This rank's experts of the first layer, and all ranks' router."""
    commgrid.initialize(ep=2, etp=1)
    model = nn.Module()
    model.model = nn.ModuleDict({"layers": nn.ModuleList([nn.Module()])})
    layer = MoELayer(16, 6, 4, 2, activation=F.silu, gated=True, cp=None)
    model.model["layers"][0].mlp = layer  # type: ignore[index]
    names = mapping("qwen3_moe", source="hf", target="commgrid", config=config)
    restored = checkpoint.load(folder, model, prefix="", rename=names, strict=False, progress=False)
    assert restored.missing == ()
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in restored.unexpected
    assert "model.layers.0.mlp.experts.3.down_proj.weight" not in restored.unexpected
    found = [layer.router.weight, layer.experts.up, layer.experts.down]
    commgrid.shutdown()
    return [tensor.detach().clone() for tensor in found]


def test_files_with_a_tensor_for_each_expert_fill_stacked_ones(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers (group interop)")
    config = transformers.Qwen3MoeConfig(
        **LLAMA, head_dim=4, num_experts=4, moe_intermediate_size=6, num_experts_per_tok=2
    )
    torch.manual_seed(3)
    model, other = (transformers.Qwen3MoeForCausalLM(config) for _ in range(2))
    model.save_pretrained(tmp_path)
    names = mapping("qwen3_moe", source="hf", target="hf", config=config.to_dict())
    commgrid.initialize()
    checkpoint.load(tmp_path, other, prefix="", rename=names, progress=False)
    commgrid.shutdown()
    own = model.state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in other.state_dict().items())

    ranks = run_on_ranks(experts_of, 2, str(tmp_path), config.to_dict())
    mlp = model.model.layers[0].mlp
    assert all(torch.equal(router, mlp.gate.weight) for router, _, _ in ranks)
    up, down = (torch.cat([rank[i] for rank in ranks]) for i in (1, 2))
    assert torch.equal(up.flatten(1, 2), mlp.experts.gate_up_proj)
    assert torch.equal(down, mlp.experts.down_proj)


def fused(dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.ModuleDict({"qkv": nn.Linear(3, 12, bias=False), "out": nn.Linear(3, 3)}).to(dtype)


def split() -> nn.Module:
    sizes = (("q", 8), ("k", 2), ("v", 2))
    made = {name: nn.Linear(3, size, bias=False) for name, size in sizes}
    return nn.ModuleDict({**made, "out": nn.Linear(3, 3)}).double()


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.arange(parameter.numel()).view_as(parameter).to(parameter) + number
    optimizer.step()


def test_optimizer_state_of_a_fused_weight_goes_to_its_parts(grid: Any, tmp_path: Path) -> None:
    whole, parts = fused(), split()
    own, other = torch.optim.AdamW(whole.parameters()), torch.optim.AdamW(parts.parameters())
    stepped(whole, own)
    checkpoint.save(tmp_path, 1, whole, own, progress=False)
    names = mapping(TABLE, source="fused")
    checkpoint.load(tmp_path, parts, other, rename=names, progress=False)
    first = [parts[name].weight for name in "qkv"]
    assert torch.equal(torch.cat(first), whole["qkv"].weight)
    for key in ("exp_avg", "exp_avg_sq"):
        joined = torch.cat([other.state[weight][key] for weight in first])
        assert torch.equal(joined, own.state[whole["qkv"].weight][key])
    assert all(other.state[weight]["step"] == 1 for weight in first)

    stepped(parts, other)
    checkpoint.save(tmp_path, 2, parts, other, progress=False)
    names = mapping(TABLE, target="fused")
    with pytest.raises(CheckpointError, match=r"optimizer= does not go with a rename= that cuts"):
        checkpoint.load(tmp_path, whole, own, rename=names, progress=False)
    checkpoint.load(tmp_path, whole, rename=names, progress=False)
    assert torch.equal(torch.cat([parts[name].weight for name in "qkv"]), whole["qkv"].weight)


def test_wider_parts_come_from_a_fused_weights_fp32_copy(grid: Any, tmp_path: Path) -> None:
    whole, parts = fused(torch.bfloat16), split()
    reducer = GradientReducer(whole)
    optimizer = ShardedOptimizer(reducer, torch.optim.AdamW, lr=1e-3)
    whole["qkv"](torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    whole["out"](torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    reducer.finish()
    optimizer.step()
    checkpoint.save(tmp_path, 1, whole, optimizer, progress=False)
    checkpoint.load(tmp_path, parts, rename=mapping(TABLE, source="fused"), progress=False)
    joined = torch.cat([parts[name].weight for name in "qkv"])
    assert torch.equal(joined.bfloat16(), whole["qkv"].weight)
    assert not torch.equal(joined.bfloat16().double(), joined)  # more digits than bf16 has
    plain = nn.ModuleDict({"all": nn.Linear(3, 12, bias=False), "out": nn.Linear(3, 3)}).double()
    checkpoint.load(tmp_path, plain, rename={"qkv.weight": "all.weight"}, progress=False)
    assert torch.equal(plain["all"].weight, joined)


def test_what_a_table_lacks_is_told(grid: Any, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, fused(), progress=False)
    strict = {"fused": {"qkv.weight": TABLE["fused"]["qkv.weight"]}}
    told = said(tmp_path, split(), rename=mapping(strict, source="fused"))
    assert "rename=fused has no row for this name" in told
    told = said(tmp_path, split(), rename=mapping({"fused": {"{rest}": "{rest}"}}, source="fused"))
    assert "it has no model.q.weight, model.k.weight, model.v.weight" in told
    other = {"fused": {**TABLE["fused"], "qkv.weight": ["q.weight", "k.weight", "v.weight"]}}
    told = said(tmp_path, split(), rename=mapping(other, source="fused"))
    assert "model.q.weight is (4, 3), here (8, 3)" in told


def saved_by_megatron(family: str, tp: int, folder: str) -> None:
    """Megatron's own checkpoint of a model with Transformers' weights."""
    from tests.transfer.megatron_families import megatron_model

    model = transformers_model(family, 1)
    megatron, grid = megatron_model(model.config, tp)
    from megatron.core import dist_checkpointing

    names = mapping(family, source="hf", target="megatron", config=model.config)
    Transfer(model, megatron, target_grid=grid, rename=names).run()
    metadata = {"singleton_local_shards": False, "dp_cp_group": megatron.pg_collection.dp_cp}
    dist_checkpointing.save(megatron.sharded_state_dict(metadata=metadata), folder)
    commgrid.shutdown()


@pytest.mark.full
@pytest.mark.parametrize(("family", "tp"), [("qwen3", 2), ("qwen3_moe", 1), ("deepseek_v3", 1)])
def test_megatrons_stacked_layers_fill_transformers_model(
    family: str, tp: int, tmp_path: Path
) -> None:
    pytest.importorskip("megatron.core")
    arguments = family, tp, str(tmp_path)
    run_on_ranks(saved_by_megatron, tp, *arguments, backend=None, launcher="torchrun", check=False)
    model, other = transformers_model(family, 1), transformers_model(family, 2)
    names = mapping(family, source="megatron", target="hf", config=model.config)
    commgrid.initialize()
    checkpoint.load(tmp_path, other, prefix="", rename=names, progress=False)
    commgrid.shutdown()
    own = model.state_dict()
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, own[name]), name
