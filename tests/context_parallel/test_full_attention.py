"""Attention over shards against plain attention over the whole sequence: outputs and gradients."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import commgrid
from commgrid.context_parallel import SequenceSharding, attention
from commgrid.testing import run_on_ranks
from tests.context_parallel.plain import Case, allowed, inputs, plain
from tests.sizes import full, some

WAYS = ("ring", "allgather", "ulysses", "2d")
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-5}
LENGTHS = [1, 30, 7, 1, 3, 50, 4]


def shardings(parts: int) -> list[SequenceSharding]:
    """One document and several; ours, and positions drawn one by one, some ranks with none."""
    draw = random.Random(parts)
    owners = [draw.randrange(parts) for _ in range(40)]
    held = [[p for p, owner in enumerate(owners) if owner == rank] for rank in range(parts)]
    return [
        SequenceSharding.zigzag(8 * parts, parts),
        SequenceSharding.packed(LENGTHS, parts),
        SequenceSharding.contiguous(8 * parts, parts, [0, 5, 8 * parts]),
        SequenceSharding.from_positions(held, [0, 1, 24, 40]),
        SequenceSharding.packed([2, 1], parts),
        SequenceSharding.packed([2], parts),
    ]


def cases(parts: int) -> list[Case]:
    """Shardings, masks and 1 to 8 query heads for one of keys."""
    heads = 24 if parts % 3 == 0 else 8
    masks = ((True, None), (False, None), (True, 5), (True, 1))
    found = itertools.product(shardings(parts), masks, (1, 2, 4, 8))
    return [
        Case(sharding, heads, heads // group, causal, window, size=4)
        for sharding, (causal, window), group in found
    ]


def ways_for(case: Case) -> Iterator[str]:
    """Those that heads and ranks allow; two levels are for an even number of ranks."""
    parts = case.sharding.parts
    yield from ("ring", "allgather", "auto")
    if case.heads % parts == 0 and (case.kv_heads % parts == 0 or parts % case.kv_heads == 0):
        yield "ulysses"
    if parts % 2 == 0 and (case.kv_heads % 2 == 0 or case.kv_heads == 1):
        yield "2d"


def of_shards(case: Case, way: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """This rank's part of output and gradients."""
    q, k, v, gradient = (case.sharding.shard(x, dim=2).clone() for x in tensors)
    for x in (q, k, v):
        x.requires_grad_()
    out = attention(
        q, k, v, sharding=case.sharding, way=way, causal=case.causal, window=case.window
    )
    out.backward(gradient)
    found = [out.detach(), q.grad, k.grad, v.grad]
    assert all(x is not None and x.dtype == q.dtype for x in found)
    return [x for x in found if x is not None]


def start(parts: int) -> None:
    split = {"of": "cp", "split": {"cp_ring": -1, "cp_a2a": 2}}
    commgrid.initialize(cp=parts, groups={"cp_levels": split} if parts % 2 == 0 else None)


def check(all_cases: Sequence[Case], wanted: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> int:
    """How many comparisons held on this rank."""
    start(all_cases[0].sharding.parts)
    compared = 0
    for case, whole in zip(all_cases, wanted, strict=True):
        # Output and gradients are of one size; but those of q are 0 where a query has one key.
        scale = max(x.abs().max() for x in whole)
        for way in ways_for(case):
            found = of_shards(case, way, inputs(case, dtype))
            for name, ours, theirs in zip(("out", "dq", "dk", "dv"), found, whole, strict=True):
                part = case.sharding.shard(theirs, dim=2)
                off = (ours.double() - part).abs().max() if part.numel() else torch.tensor(0.0)
                assert off <= BOUNDS[dtype] * scale, f"{name} {way} {case}: {off}"
                compared += 1
    return compared


def hold(parts: int, all_cases: Sequence[Case], dtype: torch.dtype = torch.float64) -> None:
    wanted = [plain(case, inputs(case, dtype)) for case in all_cases]
    counts = run_on_ranks(check, parts, all_cases, wanted, dtype, timeout=300)
    assert len(set(counts)) == 1
    assert counts[0] >= 4 * 3 * len(all_cases)


THIRDS = {1: 1, 2: 0, 3: 0, 4: 1, 6: 2, 8: 2}
"""Which third of the cases each number of ranks takes: each has one of every kind, each is taken by
an even number, which all ways are for, and by another."""


@pytest.mark.full("1", "2", "3", "6", "8")
@pytest.mark.parametrize("parts", THIRDS)
def test_shards_attend_like_the_whole(parts: int) -> None:
    hold(parts, some(cases(parts)[THIRDS[parts] :: 3], 5))


@pytest.mark.full
@pytest.mark.parametrize("parts", [2, 4])
def test_in_single_precision(parts: int) -> None:
    hold(parts, some(cases(parts)[::3], 2), torch.float32)


@st.composite
def packings(draw: st.DrawFn) -> list[int]:
    """Lengths of documents: of one token, some, and longer than a rank's share."""
    length = st.one_of(st.just(1), st.integers(2, 9), st.integers(20, 70))
    return draw(st.lists(length, min_size=1, max_size=8))


@settings(max_examples=6 if full() else 1, deadline=None)
@given(st.lists(packings(), min_size=4, max_size=4), st.sampled_from([2, 3, 4]), st.data())
def test_documents_of_any_length(drawn: list[list[int]], parts: int, data: st.DataObject) -> None:
    masks = st.sampled_from([(True, None), (True, None), (False, None), (True, 3), (True, 40)])
    made = []
    for lengths in drawn:
        causal, window = data.draw(masks)
        sharding = SequenceSharding.packed(lengths, parts, causal=causal, window=window)
        made.append(Case(sharding, 12, 4 if parts != 3 else 6, causal, window, batch=1))
    hold(parts, made)


@pytest.mark.full
def test_a_window_of_many_keys_and_long_documents() -> None:
    """As long that windows are cut into blocks with an edge, a middle and a diagonal each."""
    sharding = SequenceSharding.packed([300, 3, 200], 2, window=130)
    made = [Case(sharding, 2, 1, True, window, batch=1) for window in (60, 130, 270, 299)]
    hold(2, some(made, 2))


# -- bf16 ---------------------------------------------------------------------------------


def worst(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


def on_one_rank(case: Case, tensors: Sequence[Tensor]) -> list[Tensor]:
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    mask = torch.zeros(allowed(case).shape, dtype=q.dtype).masked_fill(~allowed(case), -torch.inf)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3])]


def in_bf16(case: Case, wanted: Sequence[Tensor], single: Sequence[float]) -> None:
    start(case.sharding.parts)
    for way in ways_for(case):
        found = of_shards(case, way, inputs(case, torch.bfloat16))
        for name, ours, theirs, alone in zip("oqkv", found, wanted, single, strict=True):
            # The kernel rounds as it does on one rank. Beyond that each partial result is rounded
            # once before it is added, in fp32, and the sum once: an ulp of 2^-8 of the largest
            # for each of the two, of a part that one rectangle and its own ulp make up.
            bound = 2 * alone + 2 * 2**-8
            assert worst(ours, case.sharding.shard(theirs, dim=2)) <= bound, f"{name} {way}"


@pytest.mark.full
def test_in_bf16_as_exact_as_on_one_rank() -> None:
    case = Case(SequenceSharding.packed([40, 1, 90, 25], 4), 8, 4, size=16)
    wanted = plain(case, inputs(case, torch.bfloat16))
    found = on_one_rank(case, inputs(case, torch.bfloat16))
    single = [worst(x, y) for x, y in zip(found, wanted, strict=True)]
    run_on_ranks(in_bf16, 4, case, wanted, single)


# -- as part of a model -------------------------------------------------------------------


def only_some_gradients(case: Case, wanted: Sequence[Tensor]) -> None:
    start(2)
    for way in WAYS:
        q, k, v, gradient = (case.sharding.shard(x, dim=2) for x in inputs(case, torch.float64))
        q = q.clone().requires_grad_()
        made = attention(q, k, v, sharding=case.sharding, way=way)
        made.backward(gradient)
        assert q.grad is not None
        assert worst(q.grad, case.sharding.shard(wanted[1], dim=2)) <= 1e-12
        with torch.no_grad():
            assert torch.equal(attention(q, k, v, sharding=case.sharding, way=way), made)


@pytest.mark.full
def test_keys_that_ask_for_no_gradient() -> None:
    case = Case(SequenceSharding.packed([9, 5], 2))
    run_on_ranks(only_some_gradients, 2, case, plain(case, inputs(case, torch.float64)))


def compiled(case: Case) -> None:
    start(2)
    tensors = [case.sharding.shard(x, dim=2).clone() for x in inputs(case, torch.float64)[:3]]
    for x in tensors:
        x.requires_grad_()
    for way in ("ring", "ulysses"):

        def block(q: Tensor, k: Tensor, v: Tensor, way: str = way) -> Tensor:
            return 2 * attention(q + 1, k, v, sharding=case.sharding, way=way)

        wanted = block(*tensors)
        found = torch.compile(block, backend="eager")(*tensors)
        assert torch.equal(found, wanted)
        both = (torch.autograd.grad(made.sum(), tensors) for made in (found, wanted))
        assert all(torch.equal(x, y) for x, y in zip(*both, strict=True))


@pytest.mark.full
def test_a_compiled_model_leaves_attention_as_it_is() -> None:
    # Spawned: a forked child hangs in what torch.compile has started in the parent.
    case = Case(SequenceSharding.packed([9, 5], 2))
    run_on_ranks(compiled, 2, case, method="spawn", timeout=300)


def test_sequence_first_tensors_and_a_scale_of_the_callers() -> None:
    commgrid.initialize()
    try:
        q, k, v = (
            torch.randn(9, 2, heads, 4, dtype=torch.float64).permute(1, 2, 0, 3)
            for heads in (4, 2, 2)
        )
        made = attention(q, k, v, sharding=SequenceSharding.contiguous(9, 1), scale=0.3)
        whole = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
        torch.testing.assert_close(made, whole, rtol=1e-12, atol=1e-12)
    finally:
        commgrid.shutdown()
