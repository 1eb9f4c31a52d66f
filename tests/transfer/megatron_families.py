"""Megatron-core's GPTModel of the tiny models of `test_model_families`, on commgrid's groups."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

import commgrid
import megatron_adapter
from examples import megatron_gpt
from tests.peers import parallel_state


def megatron_model(config: Any, tp: int) -> tuple[Any, Any]:
    """A model that computes what Transformers' does, and its grid.

    Args:
        config: Transformers'.
        tp: ranks that its layers are cut over.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    warnings.simplefilter("ignore")
    if not torch.cuda.is_available():
        norm = WrappedTorchNorm.__new__
        megatron_gpt.run_without_cuda()
        WrappedTorchNorm.__new__ = norm  # which makes RMS norms too
    commgrid.join()
    grid = megatron_adapter.initialize_model_parallel(tp, create_gloo_process_groups=False)
    parallel_state._set_global_memory_buffer()  # its attention takes no other
    collection = megatron_adapter.process_group_collection(grid)
    places = {"tp_rank": collection.tp.rank(), "ep_rank": 0, "etp_rank": collection.expt_tp.rank()}
    model_parallel_cuda_manual_seed(1, **places)
    made = _config(config, tp)
    if made.multi_latent_attention:
        _take_channels()
    spec = get_gpt_decoder_block_spec(
        made, use_transformer_engine=False, normalization="RMSNorm", pp_rank=0
    )
    model = GPTModel(
        config=made, transformer_layer_spec=spec, vocab_size=24, max_sequence_length=32,
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        position_embedding_type="rope", rotary_base=10000, pg_collection=collection,
    )  # fmt: skip
    return model.double().eval(), grid


def _take_channels() -> None:
    """Have Megatron's own layers take what it gives Transformer Engine's."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    for name in ("TELinear", "TEColumnParallelLinear"):  # no types without Transformer Engine
        if not isinstance(getattr(multi_latent_attention, name), type):
            setattr(multi_latent_attention, name, type(None))
    init = DotProductAttention.__init__

    def with_channels(
        self: Any, *args: Any, k_channels: int = 0, v_channels: int = 0, **more: Any
    ) -> None:
        init(self, *args, **more)

    DotProductAttention.__init__ = with_channels


def _config(config: Any, tp: int) -> Any:
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    kind: Any = TransformerConfig
    more: dict[str, Any] = {"kv_channels": config.head_dim}
    own = config.to_dict()
    if "kv_lora_rank" in own:
        kind = MLATransformerConfig
        more = {
            "multi_latent_attention": True, "q_lora_rank": config.q_lora_rank,
            "kv_lora_rank": config.kv_lora_rank, "qk_head_dim": config.qk_nope_head_dim,
            "qk_pos_emb_head_dim": config.qk_rope_head_dim, "v_head_dim": config.v_head_dim,
            "rope_type": "rope", "rotary_base": 10000,
            "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
            "moe_router_num_groups": config.n_group, "moe_router_group_topk": config.topk_group,
            "moe_router_topk_scaling_factor": config.routed_scaling_factor,
            "moe_shared_expert_intermediate_size": config.moe_intermediate_size,
            "moe_layer_freq": [0, 1], "kv_channels": config.v_head_dim,
        }  # fmt: skip
    experts = own.get("n_routed_experts") or own.get("num_local_experts")
    if experts:
        more |= {
            "num_moe_experts": experts, "moe_router_topk": config.num_experts_per_tok,
            "moe_ffn_hidden_size": config.moe_intermediate_size,
            "moe_router_dtype": "fp64", "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
        }  # fmt: skip
    return kind(
        num_layers=config.num_hidden_layers, hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads, ffn_hidden_size=config.intermediate_size,
        gated_linear_unit=True, activation_func=silu, bias_activation_fusion=False,
        add_bias_linear=False, add_qkv_bias=bool(own.get("attention_bias")),
        normalization="RMSNorm", layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=config.model_type.startswith(("qwen3", "deepseek")),
        tensor_model_parallel_size=tp, use_cpu_initialization=True,
        params_dtype=torch.float64, hidden_dropout=0.0, attention_dropout=0.0,
        gradient_accumulation_fusion=False, persist_layer_norm=False, apply_rope_fusion=False,
        masked_softmax_fusion=False, **more,
    )  # fmt: skip


def megatron_logits(model: Any, tokens: Tensor) -> Tensor:
    """Of all ranks of tp together, without the padding of the vocabulary."""
    batch, length = tokens.shape
    positions = torch.arange(length).expand(batch, -1)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    with torch.no_grad():
        mine = model(tokens, positions, mask)
    parts = [torch.empty_like(mine) for _ in range(model.pg_collection.tp.size())]
    torch.distributed.all_gather(parts, mine.contiguous(), group=model.pg_collection.tp)
    return torch.cat(parts, -1)[..., :22]
