"""Tensors of any strides and dtypes, taken as `F.scaled_dot_product_attention` takes them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import commgrid
from commgrid import ShapeError
from commgrid.context_parallel import WAYS, SequenceSharding, attention
from commgrid.context_parallel.kernels import _Products

LEVELS = {"cp_levels": {"of": "cp", "split": {"cp_ring": -1, "cp_a2a": 2}}}


def wider(x: Tensor) -> Tensor:
    """Every other number of rows twice as long; the others are huge."""
    padded = torch.full((*x.shape, 2), 1e30, dtype=x.dtype)
    padded[..., 0] = x
    return padded.flatten(-2)[..., ::2]


def turned(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def repeated(x: Tensor) -> Tensor:
    return x[..., :1].expand_as(x)


def drawn(length: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    return [torch.randn(2, h, length, 8, generator=made).double() for h in (4, 2, 2, 4)]


def whole(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> list[Tensor]:
    q, k, v = (x.detach().contiguous().requires_grad_() for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), gradient.contiguous())]


@pytest.mark.ranks(2)
def test_a_last_dim_of_any_stride_is_read_as_it_lies() -> None:
    commgrid.initialize(cp=2, groups=LEVELS)
    sharding = SequenceSharding.zigzag(16, 2)
    given = drawn(16)
    for lay in (wider, turned, repeated):
        tensors = [lay(x) for x in given]
        wanted = [sharding.shard(x, dim=2) for x in whole(*tensors)]
        q, k, v, gradient = (lay(sharding.shard(x, dim=2)) for x in tensors)
        assert {x.stride(-1) for x in (q, k, v, gradient)} != {1}
        taken = [x.detach().requires_grad_() for x in (q, k, v)]
        for way in WAYS:
            out = attention(*taken, sharding=sharding, way=way)
            found = [out, *torch.autograd.grad(out, taken, gradient)]
            for ours, theirs in zip(found, wanted, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12, msg=f"{lay} {way}")
    commgrid.shutdown()


@pytest.mark.ranks(2)
def test_autocast_casts_what_sdpa_casts() -> None:
    commgrid.initialize(cp=2, groups=LEVELS)
    sharding = SequenceSharding.zigzag(16, 2)
    single, half, double = torch.float32, torch.bfloat16, torch.float64
    for dtypes in ((single,) * 3, (single, half, single), (half,) * 3, (double,) * 3):
        given = [x.to(dtype) for x, dtype in zip(drawn(16), dtypes, strict=False)]
        q, k, v = (x.requires_grad_() for x in given)
        with torch.autocast("cpu", half):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out.backward(drawn(16)[3].to(out.dtype))
        exact = whole(*(x.to(out.dtype).double() for x in (q, k, v)), drawn(16)[3])
        for way in WAYS:
            taken = [sharding.shard(x.detach(), dim=2).requires_grad_() for x in given]
            with torch.autocast("cpu", half):
                made = attention(*taken, sharding=sharding, way=way)
                assert made.dtype == out.dtype == (double if dtypes[0] == double else half)
                # Backward under autocast, too: what is added up in fp32 stays there.
                made.backward(sharding.shard(drawn(16)[3], dim=2).to(made.dtype))
            for ours, theirs in zip([made, *[x.grad for x in taken]], exact, strict=True):
                assert ours is not None
                bound = 1e-12 if out.dtype == double else 3 * 2**-8  # three roundings to bf16
                off = (ours.double() - sharding.shard(theirs, dim=2)).abs().max()
                assert off <= bound * theirs.abs().max(), f"{way} {dtypes}: {off}"
            for ours, theirs in zip(taken, given, strict=True):
                assert ours.grad is not None
                assert theirs.grad is not None
                assert ours.grad.dtype == theirs.grad.dtype
    mixed = [sharding.shard(x.detach(), dim=2) for x in (q.float(), k.float(), v.bfloat16())]
    with pytest.raises(ShapeError, match=r"v torch.bfloat16: expected one floating point dtype"):
        attention(*mixed, sharding=sharding)
    commgrid.shutdown()


def test_products_in_full_precision_stay_so_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has no kernel, as for fp64 on CUDA, attention is matrix products."""
    monkeypatch.setattr("commgrid.context_parallel.online_softmax.kernel_for", lambda q: _Products)
    commgrid.initialize()
    q, k, v, gradient = (x.bfloat16() for x in drawn(16))
    sharding = SequenceSharding.contiguous(16, 1)
    found = []
    for enabled in (False, True):
        taken = [x.clone().requires_grad_() for x in (q, k, v)]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = attention(*taken, sharding=sharding)
            found.append([out, *torch.autograd.grad(out, taken, gradient)])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    commgrid.shutdown()
