"""Outputs of layers are no views: FSDP2 warns of those, since a write into one drops its hook."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import commgrid
from commgrid.expert import MoELayer, SharedExpert
from commgrid.tensor_parallel import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)


def layers(sequence_parallel: bool) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    sharded = {"sequence_parallel": sequence_parallel}
    return {
        "moe": MoELayer(8, 8, 4, 2, **sharded),
        "moe with a shared expert": MoELayer(8, 8, 4, 2, shared_ffn_hidden=8, **sharded),
        "shared expert": SharedExpert(8, 8, scaled=True, **sharded),
        "column": ColumnParallelLinear(8, 8, **sharded),
        "column without bias": ColumnParallelLinear(8, 8, bias=False, **sharded),
        "row": RowParallelLinear(8, 8, **sharded),
        "qkv": QKVParallelLinear(8, 2, num_kv_heads=1, **sharded),
        "embedding": VocabParallelEmbedding(8, 8, **sharded),
    }


def outputs(layer: nn.Module, shape: tuple[int, ...], tp: int) -> list[Tensor]:
    x = torch.randn(*shape, 8, generator=torch.Generator().manual_seed(1))
    if isinstance(layer, VocabParallelEmbedding):
        found = layer(torch.arange(x[..., 0].numel()).view(shape) % 8)
    else:
        found = layer(x[..., : 8 // tp] if isinstance(layer, RowParallelLinear) else x)
    return list(found) if isinstance(found, tuple) else [found]


def gradients(layer: nn.Module, shape: tuple[int, ...], tp: int, *, in_place: bool) -> list[Tensor]:
    found = []
    for y in outputs(layer, shape, tp):
        if in_place:
            y += 1
        else:
            y = y + 1
        found.append(y.square().sum())
    torch.stack(found).sum().backward()
    made = [parameter.grad for parameter in layer.parameters()]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in made if g is not None]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("shape", [(4,), (4, 3)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_outputs_under_fsdp_can_be_written_into(
    tp: int, shape: tuple[int, ...], sequence_parallel: bool
) -> None:
    """pytest makes FSDP2's warning of a view an error."""
    grid = commgrid.initialize(tp=tp, ep=1, etp=1)
    for name, layer in layers(sequence_parallel).items():
        wrapped = fully_shard(copy.deepcopy(layer), mesh=grid.device_mesh("dp"))
        wanted = gradients(layer, shape, tp, in_place=False)
        found = gradients(wrapped, shape, tp, in_place=True)
        assert len(found) == len(wanted), name
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")
    commgrid.shutdown()
