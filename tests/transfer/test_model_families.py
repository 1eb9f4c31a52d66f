"""Model families: names of Transformers, of an engine that fuses, of Megatron-core, of commgrid.

Each model comes from Transformers with a tiny configuration. Another one gets its weights through
another's names, and has the same logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import commgrid
from commgrid.testing import run_on_ranks
from commgrid.transfer import Transfer, mapping

TINY = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 22, "intermediate_size": 12, "max_position_embeddings": 32, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 6}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False, "attention_bias": True}),
    "tied llama": ("Llama", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 6}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 4, "num_experts": 4, "norm_topk_prob": True, **EXPERTS}),
    "deepseek_v3": ("DeepseekV3", {
        "num_key_value_heads": 4, "n_routed_experts": 4, "q_lora_rank": 8, "kv_lora_rank": 6,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 2, "v_head_dim": 4, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, **EXPERTS,
    }),
}  # fmt: skip
TOKENS = torch.arange(12).view(2, 6) % 22
PADDED = 24  # rows of the engine's and Megatron's embedding


def transformers_model(family: str, seed: int) -> Any:
    transformers = pytest.importorskip("transformers", reason="needs transformers (group interop)")
    name, more = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**TINY, **more})
    config._experts_implementation = "eager"  # others do not compute in fp64
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1).copy_(buffer.float())  # of which Megatron makes fp32
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(TOKENS).logits
    return found


def tables(family: str, model: Any, **sides: Any) -> Any:
    return mapping(family.split()[-1], config=model.config, **sides)


def engine(model: Any, family: str) -> dict[str, Tensor]:
    """The weights as an engine has them, joined by hand."""
    found: dict[str, Tensor] = {}
    own = {name: tensor.detach() for name, tensor in model.named_parameters()}
    own |= {n: b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
    if "lm_head.weight" not in own:
        own["lm_head.weight"] = own["model.embed_tokens.weight"]
    for name, tensor in own.items():
        before, _, last = name.rpartition("self_attn.")
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            found[name] = torch.cat([tensor, torch.zeros(PADDED - len(tensor), 16)])
        elif last in ("q_proj.weight", "q_proj.bias") and family != "deepseek_v3":
            parts = [own[f"{before}self_attn.{one}{last[1:]}"] for one in "qkv"]
            found[f"{before}self_attn.qkv{last[1:]}"] = torch.cat(parts)
        elif last == "q_a_proj.weight":
            parts = [tensor, own[f"{before}self_attn.kv_a_proj_with_mqa.weight"]]
            found[f"{before}self_attn.fused_qkv_a_proj.weight"] = torch.cat(parts)
        elif last in ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias",
                      "kv_a_proj_with_mqa.weight") or ".up_proj." in name:  # fmt: skip
            continue
        elif ".gate_proj." in name:
            other = own[name.replace("gate_proj", "up_proj")]
            found[name.replace("gate_proj", "gate_up_proj")] = torch.cat([tensor, other])
        elif name.endswith("experts.gate_up_proj"):
            found[name.replace("gate_up_proj", "w13_weight")] = tensor
        elif name.endswith("experts.down_proj"):
            found[name.replace("down_proj", "w2_weight")] = tensor
        else:
            found[name] = tensor
    return {name: tensor.clone() for name, tensor in found.items()}


@pytest.fixture
def grid() -> Iterator[Any]:
    yield commgrid.initialize()
    commgrid.shutdown()


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_go_into_an_engine_that_fuses_them_and_back(family: str, grid: Any) -> None:
    model, other = transformers_model(family, 1), transformers_model(family, 2)
    expected = engine(model, family)
    served = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    table = tables(family, model, source="hf", target="vllm")
    Transfer(model, served, rename=table).run()
    for name, tensor in expected.items():
        assert torch.equal(served[name], tensor), name
    if "tied" in family:
        del served["lm_head.weight"]
    assert not torch.equal(logits(other), logits(model))
    back = tables(family, model, source="vllm", target="hf")
    Transfer(served, other, rename=back, name="back").run()
    assert torch.equal(logits(other), logits(model))


def moved(name: str) -> bool:
    """Whether Megatron has it too: a bias of queries, keys and values goes without an output's."""
    return not name.endswith(("o_proj.bias", "linear_proj.bias"))


def through_megatron(family: str, tp: int) -> dict[str, bool]:
    """There from Transformers' model, the same logits, and back into another one."""
    from tests.transfer.megatron_families import megatron_logits, megatron_model

    model, other = transformers_model(family, 1), transformers_model(family, 2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not moved(name):
                parameter.zero_()
    megatron, grid = megatron_model(model.config, tp)
    names = tables(family, model, source="hf", target="megatron")
    Transfer(model, megatron, target_grid=grid, rename=names, only=moved).run()
    found = megatron_logits(megatron, TOKENS)
    there = torch.allclose(found, logits(model), rtol=0, atol=1e-6)  # its rotary table is fp32
    names = tables(family, model, source="megatron", target="hf")
    Transfer(megatron, other, source_grid=grid, rename=names, only=moved, name="back").run()
    own = model.state_dict()
    back = all(torch.equal(own[n], t) for n, t in other.state_dict().items() if moved(n))
    commgrid.shutdown()
    return {"there": there, "back": back}


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "tp"),
    [(family, 1) for family in FAMILIES] + [("llama", 2), ("tied llama", 2), ("qwen3", 2)],
)
def test_megatron_computes_with_them_what_transformers_does(family: str, tp: int) -> None:
    pytest.importorskip("megatron.core")
    ranks = run_on_ranks(
        through_megatron, tp, family, tp, backend=None, launcher="torchrun", check=False
    )  # Megatron sets variables of the environment
    assert ranks == [{"there": True, "back": True}] * tp
