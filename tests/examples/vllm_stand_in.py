"""A stand-in for the parts of vLLM 0.33.0 that `examples/refit/vllm_worker.py` uses.

Classes have the attributes and calls that vLLM's have, and no kernels. Workers are ranks of this
test, and a client reaches them through a store.
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.examples.curves import ROOT

One, Other = TypeVar("One"), TypeVar("Other")


class UnquantizedLinearMethod:
    pass


class UnquantizedEmbeddingMethod:
    pass


class Fp8LinearMethod:
    pass


class Linear(nn.Module):
    """A slice of a layer.

    Args:
        rows, columns: of this rank's weight.
        rank, ranks: of tp.
    """

    def __init__(self, rows: int, columns: int, rank: int, ranks: int, **more: Any) -> None:
        super().__init__()
        self.tp_rank, self.tp_size = rank, ranks
        self.quant_method: Any = UnquantizedLinearMethod()
        self.weight = nn.Parameter(torch.zeros(rows, columns), requires_grad=False)
        for key, value in more.items():
            setattr(self, key, value)


class ReplicatedLinear(Linear):
    pass


class ColumnParallelLinear(Linear):
    pass


class MergedColumnParallelLinear(ColumnParallelLinear):
    def __init__(self, columns: int, sizes: list[int], rank: int, ranks: int) -> None:
        super().__init__(sum(sizes) // ranks, columns, rank, ranks, output_sizes=sizes)


class QKVParallelLinear(ColumnParallelLinear):
    def __init__(
        self, hidden: int, head: int, heads: int, kv_heads: int, rank: int, ranks: int
    ) -> None:
        own, kv = heads // ranks, max(kv_heads // ranks, 1)
        super().__init__((own + 2 * kv) * head, hidden, rank, ranks)
        self.head_size = self.v_head_size = head
        self.total_num_heads, self.total_num_kv_heads = heads, kv_heads
        self.num_heads, self.num_kv_heads = own, kv
        self.num_kv_head_replicas = max(ranks // kv_heads, 1)
        self.output_sizes = [own * head * ranks, kv * head * ranks, kv * head * ranks]


class RowParallelLinear(Linear):
    pass


class VocabParallelEmbedding(nn.Module):
    """Rows of a vocabulary that is padded to a multiple of 8."""

    def __init__(self, vocabulary: int, hidden: int, rank: int, ranks: int) -> None:
        super().__init__()
        own = -(-vocabulary // 8) * 8 // ranks
        self.quant_method = UnquantizedEmbeddingMethod()
        self.org_vocab_size, self.num_added_embeddings = vocabulary, 0
        self.shard_indices = SimpleNamespace(
            org_vocab_start_index=min(rank * own, vocabulary),
            org_vocab_end_index=min((rank + 1) * own, vocabulary),
        )
        self.weight = nn.Parameter(torch.zeros(own, hidden), requires_grad=False)


class ParallelLMHead(VocabParallelEmbedding):
    pass


class RMSNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden), requires_grad=False)


class MLAAttention(nn.Module):
    pass


class FusedMoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.zeros(2, 4, 4), requires_grad=False)


class WeightTransferEngine(Generic[One, Other]):
    def __init__(self, config: Any, vllm_config: Any, device: Any, model: nn.Module) -> None:
        self.parallel_config, self.model = vllm_config.parallel_config, model

    def parse_init_info(self, told: dict[str, Any]) -> Any:
        return self.init_info_cls(**told)  # type: ignore[attr-defined]

    def update_weights(self, told: dict[str, Any]) -> None:
        self.receive_weights(self.update_info_cls(**told))  # type: ignore[attr-defined]


class TrainerWeightTransferEngine(Generic[One]):
    def __init__(
        self, *, client: Any, source: Any = None, is_sender: bool = True, rank: int = 0
    ) -> None:
        self.client, self.source, self.is_sender, self.rank = client, source, is_sender, rank


class Factory:
    def __init__(self) -> None:
        self.known: dict[str, Any] = {}

    def register_engine(self, name: str, engine: Any) -> None:
        self.known[name] = engine


class Base:
    pass


@dataclass
class TrainerInitInfo:
    rank: int = field(kw_only=True)

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


def install() -> tuple[ModuleType, Factory, Factory]:
    """Put the stand-in where vLLM is imported from.

    Returns:
        `examples/refit/vllm_worker.py`, and the factories of workers and trainers.
    """
    workers, trainers = Factory(), Factory()
    layers = "vllm.model_executor.layers"
    linear = (
        ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, ReplicatedLinear,
        RowParallelLinear, UnquantizedLinearMethod,
    )  # fmt: skip
    embeddings = ParallelLMHead, UnquantizedEmbeddingMethod, VocabParallelEmbedding
    contents: dict[str, dict[str, Any]] = {
        "vllm.distributed.weight_transfer": {
            "TrainerWeightTransferEngine": TrainerWeightTransferEngine,
            "WeightTransferEngine": WeightTransferEngine,
            "WeightTransferEngineFactory": workers, "WeightTransferTrainerFactory": trainers,
        },
        "vllm.distributed.weight_transfer.base": {
            "TrainerInitInfo": TrainerInitInfo, "WeightTransferInitInfo": Base,
            "WeightTransferUpdateInfo": Base,
        },
        f"{layers}.attention": {"MLAAttention": MLAAttention},
        f"{layers}.layernorm": {"RMSNorm": RMSNorm},
        f"{layers}.linear": {one.__name__: one for one in linear},
        f"{layers}.vocab_parallel_embedding": {one.__name__: one for one in embeddings},
    }  # fmt: skip
    for name, has in contents.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            parent = sys.modules.setdefault(".".join(parts[:end]), ModuleType(name))
            parent.__path__ = []
        for key, value in has.items():
            setattr(sys.modules[name], key, value)
    sys.modules.pop("vllm_worker", None)
    sys.path.insert(0, str(ROOT / "examples" / "refit"))
    try:
        return importlib.import_module("vllm_worker"), workers, trainers
    finally:
        sys.path.pop(0)


class Client:
    """Calls of all workers, which wait for them at a store.

    Args:
        store: of the trainer and the workers.
        workers: how many.
    """

    def __init__(self, store: dist.Store, workers: int) -> None:
        self.store, self.workers, self.calls = store, workers, 0

    def _call(self, name: str, *args: Any) -> None:
        number, self.calls = self.calls, self.calls + 1
        self.store.set(f"call {number}", json.dumps([name, *args]))
        for worker in range(self.workers):
            told = self.store.get(f"answer {number} of {worker}").decode()
            if told:
                raise RuntimeError(told)

    def init_weight_transfer_engine(self, told: dict[str, Any]) -> None:
        self._call("init", told)

    def start_weight_update(self) -> None:
        self._call("start")

    def update_weights(self, told: dict[str, Any]) -> None:
        self._call("update", told)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish")


def serve(engine: Any, store: dist.Store, rank: int) -> None:
    """Carry out the client's calls until it says that it has ended, as a worker does."""
    number = 0
    while True:
        name, *args = json.loads(store.get(f"call {number}").decode())
        error = ""
        try:
            if name == "init":
                engine.init_transfer_engine(engine.parse_init_info(*args))
            elif name == "update":
                engine.update_weights(*args)
            elif name == "end":
                engine.shutdown()
            else:
                getattr(engine, f"{name}_weight_update")()
        except Exception as failed:
            error = f"{type(failed).__name__}: {failed}"
        store.set(f"answer {number} of {rank}", error)
        if name == "end":
            return
        number += 1


def model_of(rank: int, ranks: int, sizes: dict[str, int]) -> nn.Module:
    """A worker's slice of a dense model, under vLLM's names."""
    hidden, head, heads, kv_heads, inner, vocabulary = (
        sizes[key] for key in ("hidden", "head", "heads", "kv_heads", "inner", "vocabulary")
    )
    layer, attention, mlp, inside, model = (nn.Module() for _ in range(5))
    attention.qkv_proj = QKVParallelLinear(hidden, head, heads, kv_heads, rank, ranks)
    attention.o_proj = RowParallelLinear(hidden, heads * head // ranks, rank, ranks)
    mlp.gate_up_proj = MergedColumnParallelLinear(hidden, [inner, inner], rank, ranks)
    mlp.down_proj = RowParallelLinear(hidden, inner // ranks, rank, ranks)
    layer.self_attn, layer.mlp = attention, mlp
    layer.input_layernorm = RMSNorm(hidden)
    layer.post_attention_layernorm = RMSNorm(hidden)
    inside.embed_tokens = VocabParallelEmbedding(vocabulary, hidden, rank, ranks)
    inside.layers, inside.norm = nn.ModuleList([layer]), RMSNorm(hidden)
    model.model, model.lm_head = inside, ParallelLMHead(vocabulary, hidden, rank, ranks)
    return model


def slices_of(
    whole: dict[str, Tensor], rank: int, ranks: int, sizes: dict[str, int]
) -> dict[str, Tensor]:
    """What vLLM's loaders make of Hugging Face's tensors on a rank."""
    layer, kv = "model.layers.0", min(sizes["kv_heads"], ranks)
    shared = rank // (ranks // kv)

    def rows(name: str, number: int = rank, count: int = ranks) -> Tensor:
        return whole[name].chunk(count)[number]

    def columns(name: str) -> Tensor:
        return whole[name].chunk(ranks, 1)[rank]

    def padded(name: str) -> Tensor:
        own = -(-sizes["vocabulary"] // 8) * 8
        return nn.functional.pad(whole[name], (0, 0, 0, own - len(whole[name]))).chunk(ranks)[rank]

    return {
        "model.embed_tokens.weight": padded("model.embed_tokens.weight"),
        "lm_head.weight": padded("lm_head.weight"),
        f"{layer}.self_attn.qkv_proj.weight": torch.cat([
            rows(f"{layer}.self_attn.q_proj.weight"),
            rows(f"{layer}.self_attn.k_proj.weight", shared, kv),
            rows(f"{layer}.self_attn.v_proj.weight", shared, kv),
        ]),
        f"{layer}.self_attn.o_proj.weight":
            columns(f"{layer}.self_attn.o_proj.weight"),
        f"{layer}.mlp.gate_up_proj.weight": torch.cat([
            rows(f"{layer}.mlp.gate_proj.weight"), rows(f"{layer}.mlp.up_proj.weight"),
        ]),
        f"{layer}.mlp.down_proj.weight": columns(f"{layer}.mlp.down_proj.weight"),
        **{name: one for name, one in whole.items() if "norm" in name},
    }  # fmt: skip
