"""The trainer's model: a transformer with experts, and what both programs say of it.

Its modules have the names that commgrid's `qwen3_moe` table knows, from which the engine's fused
names follow.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from commgrid.expert import MoELayer
from commgrid.tensor_parallel import (
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from commgrid.transfer import mapping

VOCABULARY, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD = 256, 64, 2, 8, 4, 8  # the vocabulary is bytes
EXPERTS, CHOSEN, INNER, EPSILON = 4, 2, 64, 1e-6
BLOCK = (8, 8)  # of fp8 numbers with one scale; 128 x 128 in models of a real size
PROMPT = b"The "

NAMES = mapping(
    "qwen3_moe", source="commgrid", target="vllm",
    config={
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD,
        "vocab_size": VOCABULARY,
    },
)  # fmt: skip


class Attention(nn.Module):
    """Causal attention, whose heads tp shares; x is (batch, sequence, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(WIDTH, HEADS, num_kv_heads=KV_HEADS, bias=False)
        self.o_proj = RowParallelLinear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in self.qkv_proj(x))  # heads first
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(WIDTH, eps=EPSILON)
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(WIDTH, eps=EPSILON)
        self.mlp = MoELayer(WIDTH, INNER, EXPERTS, CHOSEN, activation=F.silu, gated=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Transformer(nn.Module):
    """Tokens (batch, sequence) to this tp rank's part of the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = VocabParallelEmbedding(VOCABULARY, WIDTH)
        self.model.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.model.norm = nn.RMSNorm(WIDTH, eps=EPSILON)
        self.lm_head = VocabParallelHead(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x))
