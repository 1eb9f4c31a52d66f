"""Experts over NCCL and in bf16, against a plain loop and against megatron-core's."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import commgrid
from commgrid.collectives import all_gather
from commgrid.data_parallel import GradientReducer
from commgrid.expert import GroupedExperts, MoELayer
from commgrid.expert.permutation import arrange, permute, permute_weights, unpermute
from commgrid.parameters import placements
from tests.gpu.on_gpus import on_gpus

# bf16 keeps 8 bits; outputs and gradients are sums of rounded numbers over experts and ranks.
TOLERANCE = {torch.float64: 1e-12, torch.bfloat16: 4e-2}


def close(found: Tensor | None, expected: Tensor, what: str) -> None:
    """Within a share of the largest expected number."""
    assert found is not None, what
    tolerance = TOLERANCE[found.dtype if found.dtype in TOLERANCE else torch.bfloat16]
    worst = (found.double() - expected.double()).abs().max()
    assert worst <= tolerance * expected.double().abs().max(), f"{what}: off by {worst}"


def loop(x: Tensor, full: dict[str, Tensor], top_k: int) -> Tensor:
    """The layer on one process, expert by expert."""
    wide = torch.promote_types(x.dtype, torch.float32)
    logits = x.to(wide) @ full["router.weight"].to(wide).t()
    best = logits.topk(top_k, -1)
    shares = torch.zeros_like(logits).scatter(1, best.indices, torch.softmax(best.values, -1))
    y = torch.zeros_like(x, dtype=wide)
    for e, (up, down) in enumerate(zip(full["experts.up"], full["experts.down"], strict=True)):
        y = y + shares[:, e : e + 1] * (F.gelu(x @ up.t()) @ down.t()).to(wide)
    return y.to(x.dtype)


def parity(device: str) -> int:
    """How many tensors were compared."""
    compared = 0
    for ep, etp, tp in ((4, 1, 1), (2, 2, 1), (2, 1, 2)):
        for dtype in TOLERANCE:
            for capacity in (None, 8.0):
                grid = commgrid.initialize(ep=ep, etp=etp, tp=tp)
                torch.manual_seed(0)
                with torch.device(device):
                    layer = MoELayer(
                        16, 32, 8, 2, capacity_factor=capacity, pad=capacity is not None,
                        sequence_parallel=True, dtype=dtype,
                    )  # fmt: skip
                reducer = GradientReducer(layer)
                full = {}
                for placement in placements(layer):
                    whole = placement.parameter.detach()
                    for dim, group in reversed(placement.shards):
                        whole = all_gather(whole, group, dim=dim)
                    full[placement.name] = whole.clone().requires_grad_()
                generator = torch.Generator().manual_seed(1)
                x, upstream = (
                    torch.randn(32, 16, generator=generator).to(device, dtype) for _ in range(2)
                )
                mine = x.chunk(4)[grid.rank].clone().requires_grad_()
                x.requires_grad_()
                y = layer(mine)
                y.backward(upstream.chunk(4)[grid.rank])
                reducer.finish(count=1 / grid.size("dp"))
                expected = loop(x, full, 2)
                expected.backward(upstream)
                case = f"ep {ep}, etp {etp}, tp {tp}, {dtype}, capacity {capacity}"
                close(y.detach(), expected.detach().chunk(4)[grid.rank], f"{case}: output")
                assert x.grad is not None
                close(mine.grad, x.grad.chunk(4)[grid.rank], f"{case}: input")
                for placement in placements(layer):
                    gradient = full[placement.name].grad
                    assert gradient is not None
                    for dim, group in placement.shards:
                        gradient = gradient.chunk(group.size, dim)[group.rank]
                    close(placement.parameter.grad, gradient, f"{case}: {placement.name}")
                    compared += 1
                commgrid.destroy()
    return compared


def test_layer_equals_a_loop() -> None:
    assert (
        on_gpus(parity, 4, "cuda") == [36] * 4
    )  # 3 parameters, 3 grids, 2 dtypes, dropless and padded


def one_rank(device: str) -> None:
    """Permutation and experts in bf16, against a loop and against Megatron's."""
    from megatron.core.transformer.moe import moe_utils

    from tests import megatron_moe, peers  # noqa: F401  (imports megatron with its warnings off)

    grid = commgrid.initialize(ep=1, etp=1)
    megatron_moe.prepare(grid)
    torch.manual_seed(0)
    x = torch.randn(64, 32).to(device, torch.bfloat16)
    experts = torch.rand(64, 8).topk(2).indices.to(device)
    experts[experts == 3] = 4  # one without any token; a token may then name another twice
    weights = torch.rand(64, 2, device=device)
    made = arrange(experts, 8)
    rows, row_weights = permute(x, made), permute_weights(weights, made)
    order = experts.flatten().argsort(stable=True)
    assert torch.equal(rows, x[order // 2])
    assert torch.equal(row_weights, weights.flatten()[order])
    close(unpermute(rows, made), x * 2, "unpermute")
    table = torch.zeros(64, 8, dtype=torch.bool, device=device).scatter_(1, experts, True)
    once = table.sum(1) == 2  # Megatron's table has every expert of a token once
    theirs, _, _ = moe_utils.permute(x[once], table[once], num_out_tokens=2 * int(once.sum()))
    assert torch.equal(permute(x[once], arrange(experts[once], 8)), theirs)

    counts = torch.bincount(experts.flatten(), minlength=8).tolist()
    with torch.device(device):
        layer = MoELayer(32, 64, 8, 2, dtype=torch.bfloat16)
    other = megatron_moe.layer(grid, layer, moe_router_load_balancing_type="none").to(device)
    upstream = torch.randn(len(rows), 32).to(device, torch.bfloat16)

    def run(compute: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        r, w = rows.clone().requires_grad_(), row_weights.clone().requires_grad_()
        y = compute(r, w)
        y.backward(upstream)
        assert r.grad is not None
        assert w.grad is not None
        return [y.detach(), r.grad, w.grad]

    ours = run(lambda r, w: layer.experts(r, w, counts))
    found = run(lambda r, w: plain(layer.experts, r, w, counts))
    megatrons = run(lambda r, w: other.experts(r, torch.tensor(counts), w)[0])
    for mine, one, two, what in zip(ours, found, megatrons, ("y", "∂x", "∂w"), strict=True):
        close(mine, one, f"{what} of a loop")
        close(mine, two, f"{what} of Megatron's")


def plain(experts: GroupedExperts, x: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    """The same experts, one after the other."""
    parts = zip(
        x.split(counts), weights.split(counts), experts.up.detach(), experts.down.detach(),
        strict=True,
    )  # fmt: skip
    return torch.cat([F.gelu(r @ up.t()) @ down.t() * w[:, None].to(r) for r, w, up, down in parts])


def test_permutation_and_grouped_experts_in_bf16() -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    on_gpus(one_rank, 1, "cuda")


def waits(device: str) -> list[int]:
    """How often the host waits for the device in forward and backward: dropless, and padded."""
    commgrid.initialize(ep=2, etp=1)
    found = []
    for options in ({}, {"capacity_factor": 1.0, "pad": True}):
        with torch.device(device):
            layer = MoELayer(16, 32, 4, 2, dtype=torch.bfloat16, **options)  # type: ignore[arg-type]
        x = torch.randn(8, 16).to(device, torch.bfloat16)
        layer(x).sum().backward()  # connects, and compiles what is compiled once
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            layer(x).sum().backward()
            torch.cuda.set_sync_debug_mode("default")
        found.append(sum("called a synchronizing" in str(one.message) for one in seen))
    return found


def test_the_host_waits_once_or_never() -> None:
    for dropless, padded in on_gpus(waits, 2, "cuda"):
        assert dropless == 1
        assert padded == 0
