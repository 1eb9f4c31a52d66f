"""Shared-out heads against one process that has them all."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import commgrid
from commgrid import ShapeError
from commgrid.collectives import all_gather
from commgrid.parameters import placements
from commgrid.tensor_parallel import QKVParallelLinear, RowParallelLinear, initialize_parameters
from commgrid.testing import run_on_ranks


def attention(tp: int, kv_heads: int, sequence_parallel: bool) -> dict[str, Tensor]:
    """Output and every gradient, whole, of causal attention with 8 heads in fp64."""
    grid = commgrid.get_grid()
    options = {"sequence_parallel": sequence_parallel, "dtype": torch.float64}
    qkv = QKVParallelLinear(16, 8, num_kv_heads=kv_heads, head_size=4, **options)
    out = RowParallelLinear(32, 16, bias=False, **options)
    model = nn.ModuleList([qkv, out])
    initialize_parameters(model, seed=1)
    x = torch.randn(8, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    if sequence_parallel:
        x = x.chunk(tp)[grid.get_local_rank("tp")].clone()
    x.requires_grad_()
    q, k, v = (part.permute(1, 2, 0, 3) for part in qkv(x))
    assert q.shape == (3, 8 // tp, 8, 4)
    assert k.shape == v.shape == (3, max(kv_heads // tp, 1), 8, 4)
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    y = out(heads.permute(2, 0, 1, 3).flatten(2))
    y.square().sum().backward()
    found = {"y": y.detach(), "x": x.grad}
    if sequence_parallel:
        found = {name: all_gather(part, "tp") for name, part in found.items()}
    for placement in placements(model):
        ((dim, group),) = placement.shards
        found[placement.name] = all_gather(placement.parameter.grad, group, dim=dim)
    return found


def every(tp: int) -> list[dict[str, Tensor]]:
    commgrid.initialize(tp=tp)
    return [attention(tp, kv, sp) for kv in (8, 4, 2, 1) for sp in (False, True)]


@pytest.mark.full
def test_heads_equal_the_unsharded_ones() -> None:
    reference = run_on_ranks(every, 1, 1)[0]
    for tp in (2, 4, 8):
        for found in run_on_ranks(every, tp, tp):
            for ours, theirs in zip(found, reference, strict=True):
                assert set(ours) == set(theirs)
                for name, tensor in theirs.items():
                    scale = float(tensor.abs().max())
                    # fp64, sums of some hundred terms in another order.
                    torch.testing.assert_close(
                        ours[name],
                        tensor,
                        rtol=1e-12,
                        atol=1e-12 * scale,
                        msg=lambda m, n=name: n + m,
                    )


def wrong() -> None:
    commgrid.initialize(tp=4)
    for arguments, said in (
        ({"num_heads": 6}, "num_heads=6 cannot be shared equally among the 4 ranks of group 'tp'"),
        ({"num_heads": 8, "num_kv_heads": 3}, "num_kv_heads=3 does not divide num_heads=8"),
        ({"num_heads": 12, "num_kv_heads": 6}, "num_kv_heads=6 neither is a multiple of the 4"),
        ({"num_heads": 12}, "hidden=16 is no multiple of num_heads=12; give head_size"),
    ):
        with pytest.raises(ShapeError, match=said):
            QKVParallelLinear(16, **arguments)
    with pytest.raises(ShapeError, match=r"QKVParallelLinear\(16, 8, num_kv_heads=8\): input of"):
        QKVParallelLinear(16, 8)(torch.ones(2, 3))


def test_heads_that_cannot_be_shared_are_named() -> None:
    run_on_ranks(wrong, 4)
