"""vLLM's workers, of a stand-in, get the slices that its own loaders would make."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commgrid
from commgrid.launching.local_ranks import Ranks
from commgrid.launching.process import free_port
from commgrid.transfer import Part
from tests.examples import vllm_stand_in as vllm

SIZES = {"hidden": 6, "head": 2, "heads": 4, "kv_heads": 1, "inner": 8, "vocabulary": 10}
CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 2, "vocab_size": 10}
ROUNDS = 2


def whole_of(number: int) -> dict[str, Tensor]:
    """The whole model under Hugging Face's names, in some round."""
    hidden, inner, kv = SIZES["hidden"], SIZES["inner"], SIZES["kv_heads"] * SIZES["head"]
    q, layer = SIZES["heads"] * SIZES["head"], "model.layers.0"
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (SIZES["vocabulary"], hidden),
        "lm_head.weight": (SIZES["vocabulary"], hidden),
        "model.norm.weight": (hidden,),
        f"{layer}.input_layernorm.weight": (hidden,),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        f"{layer}.self_attn.q_proj.weight": (q, hidden),
        f"{layer}.self_attn.k_proj.weight": (kv, hidden),
        f"{layer}.self_attn.v_proj.weight": (kv, hidden),
        f"{layer}.self_attn.o_proj.weight": (hidden, q),
        f"{layer}.mlp.gate_proj.weight": (inner, hidden),
        f"{layer}.mlp.up_proj.weight": (inner, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, inner),
    }
    generator = torch.Generator().manual_seed(number)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def trains(ports: tuple[int, int], workers: int) -> str:
    """The trainer: each rank has half of the rows of each tensor."""
    backend, _, trainers = vllm.install()
    backend.register()
    grid = commgrid.initialize(tp=2)
    control = dist.TCPStore("127.0.0.1", ports[0], is_master=grid.rank == 0, wait_for_workers=False)

    def half(one: Tensor) -> Part:
        rows = len(one) // 2
        offset = (grid.rank * rows, *[0] * (one.dim() - 1))
        return Part(one[grid.rank * rows :][:rows].clone(), tuple(one.shape), offset)

    model = {name: half(one) for name, one in whole_of(0).items()}
    told = backend.TrainerInfo(
        rank=grid.rank, model=model, grid=grid, host="127.0.0.1", port=ports[1], family="llama",
        config=CONFIG, options={"timeout": 30.0},
    )  # fmt: skip
    client = vllm.Client(control, workers)
    said = ""
    try:
        engine = trainers.known["commgrid"].trainer_init(told, client=client, source=None)
        for number in range(ROUNDS):
            for name, one in whole_of(number).items():
                model[name].tensor.copy_(half(one).tensor)
            engine.send_weights()
        engine.shutdown()
    except Exception as error:
        said = f"{type(error).__name__}: {error}; {error.__cause__}"
    if grid.rank == 0:
        client._call("end")
    commgrid.shutdown()
    return said


def serves(ports: tuple[int, int], workers: int) -> list[str]:
    """A worker of vLLM's, with a world of its own; what it has received wrong."""
    backend, engines, _ = vllm.install()
    backend.register()
    commgrid.join()
    rank = dist.get_rank()
    control = dist.TCPStore("127.0.0.1", ports[0], is_master=False)
    model = vllm.model_of(rank, workers, SIZES)
    sizes = {"pipeline_parallel_size": 1, "prefill_context_parallel_size": 1}
    config = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=workers, **sizes))
    engine = engines.known["commgrid"](None, config, torch.device("cpu"), model)
    vllm.serve(engine, control, rank)
    expected = vllm.slices_of(whole_of(ROUNDS - 1), rank, workers, SIZES)
    held = dict(model.named_parameters())
    assert held.keys() == expected.keys()
    commgrid.shutdown()
    return [name for name, one in expected.items() if not torch.equal(held[name], one)]


@pytest.mark.full
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_get_the_slices_of_vllms_loaders(workers: int) -> None:
    ports = free_port(), free_port()
    how: dict[str, Any] = {"backend": None, "launcher": "torchrun"}
    with (
        Ranks(trains, 2, ports, workers, **how) as trainer,
        Ranks(serves, workers, ports, workers, **how) as served,
    ):
        waiting = threading.Thread(target=trainer.wait)
        waiting.start()
        served.wait()
        waiting.join()
        assert trainer.results() == ["", ""]
        assert served.results() == [[]] * workers


def test_layers_in_another_form_are_refused() -> None:
    live_parts = vllm.install()[0].live_parts
    assert len(live_parts(vllm.model_of(0, 2, SIZES))) == 9
    quantized = vllm.model_of(0, 2, SIZES)
    quantized.model.layers[0].mlp.down_proj.quant_method = vllm.Fp8LinearMethod()
    experts, latent, adapters = (vllm.model_of(0, 2, SIZES) for _ in range(3))
    experts.model.layers[0].mlp = vllm.FusedMoE()
    latent.model.layers[0].self_attn.attn = vllm.MLAAttention()
    adapters.lm_head.num_added_embeddings = 2
    own = vllm.model_of(0, 2, SIZES)
    own.model.layers[0].mlp.down_proj = nn.Linear(4, 6)
    for model, told in (
        (quantized, "model.layers.0.mlp.down_proj.weight of RowParallelLinear is in the form of"),
        (experts, "model.layers.0.mlp.w13_weight is of FusedMoE"),
        (latent, "model.layers.0.self_attn.attn is a MLAAttention"),
        (adapters, "an embedding has 2 tokens of adapters"),
        (own, "model.layers.0.mlp.down_proj.weight is of Linear; expected"),
    ):
        with pytest.raises(TypeError, match=told):
            live_parts(model)
