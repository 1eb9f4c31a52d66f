"""Attention over shards with CUDA's kernels over NCCL, in bf16 and fp32, and its overlap."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import commgrid
from commgrid.context_parallel import SequenceSharding, attention
from tests.context_parallel.plain import Case, inputs, plain
from tests.gpu.on_gpus import on_gpus

LEVELS = {"cp_levels": {"of": "cp", "split": {"cp_ring": 2, "cp_a2a": 2}}}
# bf16 keeps 8 bits; weights, partial outputs and gradients are each rounded once. fp32 on CUDA
# multiplies in TF32 where that is allowed, which keeps 11.
BOUNDS = {torch.bfloat16: 4e-2, torch.float32: 2e-3, torch.float64: 1e-12}


def parity() -> int:
    """How many tensors were compared."""
    commgrid.initialize(cp=4, groups=LEVELS)
    compared, wrong = 0, []
    for sharding in (SequenceSharding.zigzag(256, 4), SequenceSharding.packed([1, 90, 7, 300], 4)):
        for causal, window in ((True, None), (False, None), (True, 40)):
            case = Case(sharding, 8, 2, causal, window, size=16)
            for dtype, bound in BOUNDS.items():
                tensors = inputs(case, dtype)
                wanted = plain(case, tensors)
                for way in ("ring", "allgather", "ulysses", "2d"):
                    found = of_shards(case, way, tensors)
                    for ours, theirs in zip(found, wanted, strict=True):
                        part = sharding.shard(theirs, dim=2)
                        off = (ours.double().cpu() - part).abs().max() / theirs.abs().max()
                        if not off <= bound:
                            wrong.append(f"{way} {dtype} {case}: off by {off}")
                        compared += 1
    assert not wrong, "\n".join(wrong)
    return compared


def of_shards(case: Case, way: str, tensors: list[Tensor]) -> list[Tensor]:
    sharding = case.sharding
    q, k, v, gradient = (sharding.shard(x, dim=2).cuda() for x in tensors)
    for x in (q, k, v):
        x.requires_grad_()
    out = attention(q, k, v, sharding=sharding, way=way, causal=case.causal, window=case.window)
    out.backward(gradient)
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    return [out.detach(), q.grad, k.grad, v.grad]


def test_shards_attend_like_the_whole() -> None:
    assert set(on_gpus(parity, 4)) == {2 * 3 * 3 * 4 * 4}


def kernels() -> list[tuple[str, int, int]]:
    """What ran on the device in a step of a ring, with start and end."""
    commgrid.initialize(cp=2)
    sharding = SequenceSharding.zigzag(32_768, 2)
    q, k, v = (
        torch.randn(1, heads, 16_384, 128, device="cuda", dtype=torch.bfloat16)
        for heads in (16, 4, 4)
    )
    attention(q, k, v, sharding=sharding, way="ring")
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        attention(q, k, v, sharding=sharding, way="ring")
        torch.cuda.synchronize()
    assert profiled.profiler is not None
    events = profiled.profiler.kineto_results.events()
    return [(e.name(), e.start_ns(), e.start_ns() + e.duration_ns()) for e in events]


def test_keys_travel_beside_compute() -> None:
    for events in on_gpus(kernels, 2):
        flash = [e for e in events if "flash" in e[0].lower()]
        moved = [e for e in events if "nccl" in e[0].lower()]
        assert flash
        assert moved
        assert any(a[1] < b[2] and b[1] < a[2] for a in flash for b in moved)


def torchs() -> float:
    """How far torch's context parallel on the grid's mesh is from ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.tensor.experimental import context_parallel

    grid = commgrid.initialize(cp=2)
    sharding = SequenceSharding.zigzag(256, 2)
    whole = [x.cuda() for x in inputs(Case(sharding, 8, 8, size=64), torch.bfloat16)[:3]]
    buffers = [x.clone() for x in whole]
    with (
        context_parallel(grid.device_mesh("cp"), buffers=buffers, buffer_seq_dims=[2, 2, 2]),
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION),
    ):
        theirs = F.scaled_dot_product_attention(*buffers, is_causal=True)
        theirs = getattr(theirs, "_local_tensor", theirs)
    q, k, v = (sharding.shard(x, dim=2) for x in whole)
    return float((attention(q, k, v, sharding=sharding) - theirs).abs().max())


def test_torchs_context_parallel_runs_on_a_grids_mesh() -> None:
    assert max(on_gpus(torchs, 2)) <= 4e-2
