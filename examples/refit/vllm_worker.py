"""A backend of vLLM's weight transfer: each worker receives its own slices, in place.

Written against the source of vLLM 0.33.0 (`vllm/distributed/weight_transfer`), and tested with a
stand-in of that interface. It has not been run with vLLM or with a GPU.

On the workers, from a plugin of the group `vllm.general_plugins`, or wherever else each worker
imports it:

    vllm_worker.register()                              # then WeightTransferConfig("commgrid")

On all ranks of the trainer, whose model has names of a convention that `mapping` knows:

    told = TrainerInfo(rank=grid.rank, model=model, grid=grid, host="10.0.0.1", port=29700,
                       family="llama", convention="megatron", config=config)
    engine = WeightTransferTrainerFactory.trainer_init(told, client=client)
    engine.send_weights()                               # as often as the weights change

It is for dense models that are served as they were trained: linear layers, embeddings and norms
without quantization. Experts, fp8 and multi-head latent attention are refused: their kernels keep
weights in other forms, which only vLLM's own loaders make. Pause generation meanwhile, and reset
the prefix cache afterwards, as with vLLM's own backends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn
from vllm.distributed.weight_transfer import (
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

import commgrid
from commgrid.transfer import Part, Transfer, mapping

BACKEND = "commgrid"
PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
WHOLE = (ReplicatedLinear, RMSNorm, nn.LayerNorm)


@dataclass
class WorkerInfo(WeightTransferInitInfo):
    """The trainer's message to each worker, sent once.

    Args:
        host, port: of the store where both programs meet.
        family: of `commgrid.transfer.mapping`.
        config: the model's numbers that the family's table needs.
        timeout: seconds to wait for the trainer.
    """

    host: str
    port: int
    family: str
    config: dict[str, Any] = field(default_factory=dict)
    timeout: float = 600.0


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Nothing: shapes and layouts were told when both sides met."""


class WorkerEngine(WeightTransferEngine[WorkerInfo, UpdateInfo]):
    """A worker's side: the live parameters are the target."""

    init_info_cls = WorkerInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    transfer: Transfer | None = None
    grid: commgrid.HyperCommGrid | None = None

    def init_transfer_engine(self, init_info: WorkerInfo) -> None:
        self.shutdown()
        sizes = self.parallel_config
        target = live_parts(self.model)
        self.grid = commgrid.initialize(
            tp=sizes.tensor_parallel_size, pp=sizes.pipeline_parallel_size,
            cp=sizes.prefill_context_parallel_size, order="tp-cp-ep-pp-dp", name="vllm workers",
        )  # fmt: skip
        store = dist.TCPStore(init_info.host, init_info.port, is_master=False)
        self.transfer = Transfer(
            None, target, target_grid=self.grid, store=store, peer="trainer",
            rename=mapping(init_info.family, target="vllm", config=init_info.config),
            timeout=init_info.timeout,
        )  # fmt: skip

    def start_weight_update(self) -> None:
        """Nothing: weights are written in place."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if self.transfer is None:
            raise RuntimeError("init_weight_transfer_engine has not been called, or has failed")
        self.transfer.run()

    def finish_weight_update(self) -> None:
        """Nothing: all weights are there."""

    def shutdown(self) -> None:
        if self.transfer is not None:
            self.transfer.close()
        if self.grid is not None:
            self.grid.destroy()
        self.transfer = self.grid = None


def live_parts(model: nn.Module) -> dict[str, list[Part]]:
    """This worker's parameters, and where each lies in the full tensor.

    Raises:
        TypeError: a layer of another kind, or one whose weights a kernel keeps in another form.
    """
    found: dict[str, list[Part]] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, MLAAttention):
            raise TypeError(f"{prefix} is a MLAAttention, which keeps products of its weights")
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            method = getattr(module, "quant_method", None)
            kind = type(module).__name__
            if method is not None and type(method) not in PLAIN:
                raise TypeError(f"{full} of {kind} is in the form of {type(method).__name__}")
            parts = _parts(module, name, parameter)
            if parts is None:
                raise TypeError(f"{full} is of {kind}; expected a linear layer, embedding or norm")
            found[full] = parts
    return found


def _parts(module: nn.Module, name: str, parameter: nn.Parameter) -> list[Part] | None:
    """A parameter's parts; None: a layer of another kind."""
    data = parameter.detach()
    if type(module) in WHOLE or (type(module) is RowParallelLinear and name == "bias"):
        return [Part(data, tuple(data.shape), (0,) * data.dim())]
    if type(module) in (VocabParallelEmbedding, ParallelLMHead):
        return _rows(module, data)
    if type(module) is RowParallelLinear:
        rows, columns = data.shape
        return [Part(data, (rows, columns * module.tp_size), (0, module.tp_rank * columns))]
    if type(module) is QKVParallelLinear:
        kv_rank = module.tp_rank // module.num_kv_head_replicas
        return _joined(
            data,
            (module.num_heads * module.head_size, module.total_num_heads * module.head_size,
             module.tp_rank),
            (module.num_kv_heads * module.head_size, module.total_num_kv_heads * module.head_size,
             kv_rank),
            (module.num_kv_heads * module.v_head_size,
             module.total_num_kv_heads * module.v_head_size, kv_rank),
        )  # fmt: skip
    if type(module) in (MergedColumnParallelLinear, ColumnParallelLinear):
        sizes = getattr(module, "output_sizes", None) or [module.output_size]
        return _joined(data, *((size // module.tp_size, size, module.tp_rank) for size in sizes))
    return None


def _rows(module: Any, data: Any) -> list[Part]:
    """An embedding's rows of the vocabulary; those behind them are padding."""
    if module.num_added_embeddings:
        raise TypeError(f"an embedding has {module.num_added_embeddings} tokens of adapters")
    start, end = (
        module.shard_indices.org_vocab_start_index,
        module.shard_indices.org_vocab_end_index,
    )
    shape = (module.org_vocab_size, *data.shape[1:])
    return [Part(data[: end - start], shape, (start, *[0] * (data.dim() - 1)))]


def _joined(data: Any, *pieces: tuple[int, int, int]) -> list[Part]:
    """The parts of tensors that are joined along their rows.

    Args:
        data: this worker's, one piece behind the other.
        pieces: rows here, rows of the full tensor, and which of its pieces this is.
    """
    total = sum(full for _, full, _ in pieces)
    if sum(own for own, _, _ in pieces) != len(data):
        raise TypeError(f"a parameter has {len(data)} rows, and its layer says {pieces}")
    parts, here, start = [], 0, 0
    for own, full, number in pieces:
        offset = (start + number * own, *[0] * (data.dim() - 1))
        parts.append(Part(data[here : here + own], (total, *data.shape[1:]), offset))
        here, start = here + own, start + full
    return parts


@dataclass
class TrainerInfo(TrainerInitInfo):
    """The trainer's side.

    Args:
        model: a module, a stage's chunks, or a mapping of names to tensors.
        grid: where it lies.
        host, port: where rank 0 serves the store.
        family, convention, config: of `commgrid.transfer.mapping`.
        options: of the Transfer, such as `max_bytes`.
    """

    backend: ClassVar[str] = BACKEND

    model: Any
    grid: commgrid.HyperCommGrid
    host: str
    port: int
    family: str
    convention: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


class TrainerEngine(TrainerWeightTransferEngine[TrainerInfo]):
    """The trainer's side: its first rank asks vLLM, and all ranks send."""

    init_info_cls = TrainerInfo
    transfer: Transfer

    @classmethod
    def trainer_init(
        cls, init_info: TrainerInfo, *, client: Any, source: Any = None
    ) -> TrainerEngine:
        engine = cls(client=client, is_sender=init_info.is_sender, rank=init_info.rank)
        store = dist.TCPStore(
            init_info.host, init_info.port, is_master=init_info.is_sender, wait_for_workers=False
        )
        told = {
            "host": init_info.host, "port": init_info.port, "family": init_info.family,
            "config": dict(init_info.config),
        }  # fmt: skip
        names = mapping(
            init_info.family, source=init_info.convention, target="vllm", config=init_info.config
        )
        with engine._asked(lambda: client.init_weight_transfer_engine(told)):
            engine.transfer = Transfer(
                init_info.model, None, source_grid=init_info.grid, store=store, peer="vLLM",
                rename=names, **init_info.options,
            )  # fmt: skip
        return engine

    def send_weights(self) -> None:
        if self.is_sender:
            self.client.start_weight_update()
        with self._asked(lambda: self.client.update_weights({})):
            self.transfer.run()
        if self.is_sender:
            self.client.finish_weight_update()

    def shutdown(self) -> None:
        self.transfer.close()

    @contextmanager
    def _asked(self, call: Callable[[], None]) -> Iterator[None]:
        """A call to vLLM on the first rank, which returns once this rank has sent its part."""
        failed: list[Exception] = []

        def ask() -> None:
            try:
                call()
            except Exception as error:
                failed.append(error)

        if not self.is_sender:
            yield
            return
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        try:
            yield
        except commgrid.CommGridError as error:
            raise error from (failed[0] if failed else None)  # what vLLM said, if it has
        asking.join()
        if failed:
            raise failed[0]


def register() -> None:
    """Make the backend known; in the trainer and in each worker."""
    WeightTransferEngineFactory.register_engine(BACKEND, WorkerEngine)
    WeightTransferTrainerFactory.register_engine(BACKEND, TrainerEngine)
