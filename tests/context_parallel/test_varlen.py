"""Rectangles that one call of a kernel takes: with a stand-in for CUDA's flash attention that is
plain softmax segment by segment, as the kernel's own source defines its arguments."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from commgrid.context_parallel import SequenceSharding, kernels, online_softmax
from commgrid.context_parallel.balance import Mask
from commgrid.context_parallel.online_softmax import OnlineSoftmax, SoftmaxBackward
from commgrid.context_parallel.plans import ring_steps
from commgrid.context_parallel.sharding import take_runs
from commgrid.context_parallel.tiles import Tile, tiles
from commgrid.context_parallel.varlen import varlen_calls
from tests.context_parallel.plain import Case, inputs, plain
from tests.context_parallel.test_kernel import TILES, mask_of

calls = 0


def band(rows: int, columns: int, longest: int, left: int, right: int) -> Tensor:
    """Which keys each query of a segment attends; a side of the longest keys or more is endless."""
    left, right = (-1 if side >= longest else side for side in (left, right))
    # One endless side reaches as far as the longest keys, counted from the diagonal.
    if left < 0 <= right:
        left = longest
    if right < 0 <= left:
        right = longest
    behind = torch.arange(columns) - torch.arange(rows)[:, None] - (columns - rows)
    return (left < 0) | ((-left <= behind) & (behind <= right))


def segments(q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor, options: Any) -> Any:
    """Output (rows, heads, size) and log-sum-exp (heads, rows) of packed rows."""
    global calls
    calls += 1
    max_q, max_k, dropout, causal, scale, left, right = options
    assert dropout == 0
    assert not causal
    assert q_ends.dtype == k_ends.dtype == torch.int32
    group = q.shape[1] // k.shape[1]
    assert max_q > 1 or group == 1  # else it swaps heads and rows
    assert (q_ends[0], k_ends[0], q_ends[-1], k_ends[-1]) == (0, 0, len(q), len(k))
    outs, lses = [], []
    for (a, b), (c, d) in zip(pairwise(q_ends.tolist()), pairwise(k_ends.tolist()), strict=True):
        assert b - a <= max_q
        assert d - c <= max_k
        rows, keys, values = (
            x[start:stop].transpose(0, 1).repeat_interleave(times, 0)
            for x, start, stop, times in ((q, a, b, 1), (k, c, d, group), (v, c, d, group))
        )
        scores = rows @ keys.mT * scale
        scores = scores.masked_fill(~band(b - a, d - c, max_k, left, right), -torch.inf)
        lse = scores.logsumexp(-1) if d > c else scores.new_full(scores.shape[:2], torch.inf)
        outs.append(((scores - lse.unsqueeze(-1)).exp() @ values).transpose(0, 1))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, 1)


def forward(
    q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor, max_q: int, max_k: int,
    dropout: float, causal: bool, _: bool, *, scale: float, window_size_left: int,
    window_size_right: int,
) -> Any:  # fmt: skip
    options = (max_q, max_k, dropout, causal, scale, window_size_left, window_size_right)
    return *segments(q, k, v, q_ends, k_ends, options), None, None, None


def backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, q_ends: Tensor,
    k_ends: Tensor, max_q: int, max_k: int, dropout: float, causal: bool, *_: Tensor,
    scale: float, window_size_left: int, window_size_right: int,
) -> Any:  # fmt: skip
    """From the joint output and log-sum-exp, as the kernel does it."""
    assert lse.is_contiguous()
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta = (gradient * out).sum(-1)
    for (a, b), (c, d) in zip(pairwise(q_ends.tolist()), pairwise(k_ends.tolist()), strict=True):
        for head in range(q.shape[1]):
            keys, values = k[c:d, head // group], v[c:d, head // group]
            scores = q[a:b, head] @ keys.mT * scale
            allowed = band(b - a, d - c, max_k, window_size_left, window_size_right)
            weights = (scores - lse[head, a:b, None]).exp().masked_fill(~allowed, 0)
            of_scores = weights * (gradient[a:b, head] @ values.mT - delta[a:b, head, None]) * scale
            dq[a:b, head] += of_scores @ keys
            dk[c:d, head // group] += of_scores.mT @ q[a:b, head]
            dv[c:d, head // group] += weights.mT @ gradient[a:b, head]
    return dq, dk, dv


@pytest.fixture(autouse=True)
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's kernel, on the CPU."""
    fakes = {"_flash_attention_forward": forward, "_flash_attention_backward": backward}
    monkeypatch.setattr(kernels, "_ops", SimpleNamespace(**fakes))
    monkeypatch.setattr(online_softmax, "kernel_for", lambda _: kernels._Flash)


def ring_on_one_process(case: Case) -> list[Tensor]:
    """What each rank of a ring computes, with the keys it would be sent; put together."""
    sharding = case.sharding
    mask = Mask(case.causal, case.window)
    q, k, v, gradient = inputs(case, torch.float64)
    whole = [torch.zeros_like(x) for x in (q, q, k, v)]  # out, dq, dk, dv
    scale = case.size**-0.5
    shards = [
        [sharding.shard(x, dim=2, rank=rank) for x in (q, k, v, gradient)]
        for rank in range(sharding.parts)
    ]
    plans = [
        ring_steps(sharding.ranges, sharding.documents, rank, mask)
        for rank in range(sharding.parts)
    ]
    for rank, steps in enumerate(plans):
        mine = shards[rank]
        met = []
        for i, step in enumerate(steps):
            theirs = shards[step.source]
            rows = torch.stack([theirs[1], theirs[2]])
            runs = plans[step.source][i].send if i else ((0, rows.shape[3]),)
            met.append((take_runs(rows, runs, 3).unbind(), runs, step))
        partial = OnlineSoftmax(mine[0], scale)
        for keys, _, step in met:
            partial.add(*keys, step.tiles)
        out, lse = partial.result()
        back = SoftmaxBackward(mine[3], mine[0], out, lse, scale)
        put(whole[0], out, sharding, rank)
        for (keys, values), runs, step in met:
            dk, dv = back.add(keys, values, step.tiles)
            for total, part in ((whole[2], dk), (whole[3], dv)):
                rows = torch.cat([torch.arange(*run) for run in runs]) if runs else torch.arange(0)
                positions = torch.arange(sharding.length)[None, None, :, None]
                at = sharding.shard(positions, dim=2, rank=step.source).flatten()[rows]
                total.index_add_(2, at, part)
        put(whole[1], back.dq, sharding, rank)
    return whole


def put(whole: Tensor, part: Tensor, sharding: SequenceSharding, rank: int) -> None:
    positions = torch.arange(sharding.length)[None, None, :, None]
    whole[:, :, sharding.shard(positions, dim=2, rank=rank).flatten()] = part


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    parts=st.integers(1, 3),
    mask=st.sampled_from([(True, None), (False, None), (True, 1), (True, 5), (True, 19)]),
    batch=st.integers(1, 2),
)
def test_a_ring_of_passes_is_the_whole(
    lengths: list[int], parts: int, mask: tuple[bool, int | None], batch: int
) -> None:
    case = Case(SequenceSharding.packed(lengths, parts), 4, 2, *mask, batch=batch)
    for ours, theirs in zip(
        ring_on_one_process(case), plain(case, inputs(case, torch.float64)), strict=True
    ):
        # fp64 through sums of at most 240 terms in another order.
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    parts=st.integers(1, 4),
    window=st.none() | st.integers(1, 70),
)
def test_each_pair_is_in_one_pass(lengths: list[int], parts: int, window: int | None) -> None:
    sharding = SequenceSharding.packed(lengths, parts)
    mask = Mask(window=window)
    for own in sharding.ranges:
        for keys in sharding.ranges:
            cut = tiles(own, keys, sharding.documents, mask)
            shape = (sum(b - a for a, b in own), sum(b - a for a, b in keys))
            wanted, found = torch.zeros(shape), torch.zeros(shape)
            for tile in cut:
                wanted[tile.q_start : tile.q_stop, tile.k_start : tile.k_stop] += mask_of(tile)
            for one in varlen_calls(cut):
                for tile in one.tiles:
                    rows, columns = tile.q_stop - tile.q_start, tile.k_stop - tile.k_start
                    seen = band(rows, columns, one.longest[1], *one.band)
                    found[tile.q_start : tile.q_stop, tile.k_start : tile.k_stop] += seen
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_rectangle_is_one_band(tile: Tile) -> None:
    (one,) = varlen_calls([tile])
    (kept,) = one.tiles
    rows, columns = kept.q_stop - kept.q_start, kept.k_stop - kept.k_start
    wanted = mask_of(tile)
    assert torch.equal(band(rows, columns, one.longest[1], *one.band), wanted[:rows, :columns])
    assert not wanted[rows:].any()
    assert not wanted[:, columns:].any()


def test_more_queries_than_keys_see_no_further_than_they_should() -> None:
    """The kernel takes a side as long as the longest keys for one without end."""
    tile = Tile(0, 139, 0, 20, offset=0, window=120)
    (one,) = varlen_calls([tile])
    assert one.band[1] > 20
    assert torch.equal(band(139, 20, one.longest[1], *one.band), mask_of(tile))


def test_documents_take_no_more_calls_the_more_they_are() -> None:
    global calls
    for many in (3, 60):
        sharding = SequenceSharding.packed([7] * many, 1)
        case = Case(sharding)
        calls = 0
        ring_on_one_process(case)
        assert calls == 1
