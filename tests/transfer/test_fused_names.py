"""Fused, tied and padded tensors through Transfers, against torch's own cat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import commgrid
from commgrid import CommGridError
from commgrid.testing import run_on_ranks
from commgrid.transfer import Part, Transfer, mapping

HEADS, KV, SIZE, WIDTH, FFN = 8, 2, 2, 6, 8
CONFIG = {
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": SIZE, "vocab_size": 10,
}  # fmt: skip
LAYER = "decoder.layers.0."
QKV, FC1 = f"{LAYER}self_attention.linear_qkv.weight", f"{LAYER}mlp.linear_fc1.weight"
ATTN, MLP = "model.layers.0.self_attn.", "model.layers.0.mlp."


def numbers(*shape: int, first: int = 0) -> Tensor:
    return torch.arange(first, first + torch.Size(shape).numel()).view(shape).double()


def parts(step: int) -> tuple[Tensor, ...]:
    """Queries, keys, values, gate and up of a step."""
    q, k, v = ((HEADS, KV, KV)[i] * SIZE for i in range(3))
    sizes = (q, k, v, FFN, FFN)
    return tuple(numbers(n, WIDTH, first=1000 * i + step) for i, n in enumerate(sizes))


def megatron_slices(step: int, tp: int, rank: int) -> dict[str, Tensor]:
    """A rank's queries, keys and values, group by group, and its gate above its up."""
    q, k, v, gate, up = parts(step)
    groups = [torch.cat(g) for g in zip(q.chunk(KV), k.chunk(KV), v.chunk(KV), strict=True)]
    own = torch.cat(groups).chunk(tp)[rank]
    return {QKV: own, FC1: torch.cat([gate.chunk(tp)[rank], up.chunk(tp)[rank]])}


def engine_slices(step: int, tp: int, rank: int) -> dict[str, Tensor]:
    """A rank's queries above its keys and values, of which several ranks have the same."""
    q, k, v, gate, up = parts(step)
    head = slice(rank * KV // tp * SIZE, (rank * KV // tp + max(KV // tp, 1)) * SIZE)
    return {
        f"{ATTN}qkv_proj.weight": torch.cat([q.chunk(tp)[rank], k[head], v[head]]),
        f"{MLP}gate_up_proj.weight": torch.cat([gate.chunk(tp)[rank], up.chunk(tp)[rank]]),
    }


def as_megatron(held: dict[str, Tensor], tp: int, rank: int) -> dict[str, Any]:
    rows = held[QKV].shape[0]
    half = FFN // tp
    return {
        QKV: Part(held[QKV], (rows * tp, WIDTH), (rows * rank, 0)),
        FC1: [
            Part(held[FC1][:half], (2 * FFN, WIDTH), (half * rank, 0)),
            Part(held[FC1][half:], (2 * FFN, WIDTH), (FFN + half * rank, 0)),
        ],
    }


def as_engine(held: dict[str, Tensor], tp: int, rank: int) -> dict[str, Any]:
    qkv, fused = held[f"{ATTN}qkv_proj.weight"], held[f"{MLP}gate_up_proj.weight"]
    q, kv, half = HEADS * SIZE // tp, max(KV // tp, 1) * SIZE, FFN // tp
    head = rank * KV // tp * SIZE
    full = (HEADS + 2 * KV) * SIZE, WIDTH
    return {
        f"{ATTN}qkv_proj.weight": [
            Part(qkv[:q], full, (q * rank, 0)),
            Part(qkv[q : q + kv], full, (HEADS * SIZE + head, 0)),
            Part(qkv[q + kv :], full, ((HEADS + KV) * SIZE + head, 0)),
        ],
        f"{MLP}gate_up_proj.weight": [
            Part(fused[:half], (2 * FFN, WIDTH), (half * rank, 0)),
            Part(fused[half:], (2 * FFN, WIDTH), (FFN + half * rank, 0)),
        ],
    }


def refit(dtype: torch.dtype) -> list[bool]:
    """From tp 2 · dp 2 to an engine's tp 4, and back to tp 1, twice each."""
    grid = commgrid.initialize(tp=2, dp=2)
    other = commgrid.initialize(tp=4, name="engine")
    alone = commgrid.initialize(ranks=[1], dp=1, name="alone") if grid.rank == 1 else None
    rank = grid.get_local_rank("tp")
    trained = megatron_slices(0, 2, rank)
    served = {
        n: torch.zeros_like(t, dtype=dtype) for n, t in engine_slices(0, 4, grid.rank).items()
    }
    last = {n: torch.zeros_like(t) for n, t in megatron_slices(0, 1, 0).items()} if alone else None
    names = mapping("llama", source="megatron", target="vllm", config=CONFIG)
    there = Transfer(
        as_megatron(trained, 2, rank), as_engine(served, 4, grid.rank), rename=names,
        source_grid=grid, target_grid=other, max_bytes=500,
    )  # fmt: skip
    names = mapping("llama", source="vllm", target="megatron", config=CONFIG)
    back = Transfer(
        as_engine(served, 4, grid.rank), last, rename=names, source_grid=other, target_grid=alone,
        name="back",
    )  # fmt: skip
    found = []
    for step in (3, 5):
        for name, tensor in megatron_slices(step, 2, rank).items():
            trained[name].copy_(tensor)
        there.run()
        back.run()
        expected = engine_slices(step, 4, grid.rank)
        found += [torch.equal(served[name], expected[name].to(dtype)) for name in served]
        if last is not None:
            whole = megatron_slices(step, 1, 0)
            found += [torch.equal(last[n], whole[n].to(dtype).double()) for n in last]
    received = there.plan.received[grid.rank]
    least = sum(tensor.nbytes for tensor in served.values())
    found.append(received <= least)  # as ever, not a byte more
    commgrid.shutdown()
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
@pytest.mark.full("bf16")
def test_a_trainers_groups_go_into_an_engines_slices_and_back(dtype: torch.dtype) -> None:
    for found in run_on_ranks(refit, 4, dtype):
        assert len(found) >= 5
        assert all(found), found


TABLE = {
    "fused": {
        "qkv.weight": {"parts": ["q.weight", "k.weight", "v.weight"], "sizes": [4, 1, 1]},
        "{rest}": "{rest}",
    }
}


def sharded_again() -> list[str]:
    """FSDP2 cuts a fused weight wherever its rows fall, 5, 5, 5 and 3."""
    grid = commgrid.initialize()
    model = nn.ModuleDict({"qkv": nn.Linear(3, 18, bias=False)}).double()
    with torch.no_grad():
        model["qkv"].weight.copy_(numbers(18, 3))
    fully_shard(model["qkv"], mesh=grid.device_mesh("dp"))
    plain = nn.ModuleDict(
        {name: nn.Linear(3, n * 3, bias=False) for name, n in (("q", 4), ("k", 1), ("v", 1))}
    ).double()
    Transfer(model, plain, rename=mapping(TABLE, source="fused")).run()
    whole = torch.cat([plain[name].weight for name in "qkv"])
    wrong = [] if torch.equal(whole, numbers(18, 3)) else ["there"]
    with torch.no_grad():
        for parameter in (*plain.parameters(), *model.parameters()):
            parameter.mul_(2)
        model["qkv"].weight.zero_()
    Transfer(plain, model, rename=mapping(TABLE, target="fused"), name="back").run()
    if not torch.equal(model["qkv"].weight.full_tensor(), numbers(18, 3) * 2):  # type: ignore[operator]
        wrong.append("back")
    if grid.rank == 1:
        with torch.no_grad():
            plain["k"].weight[0, 0] += 1
    try:
        Transfer(plain, model, rename=mapping(TABLE, target="fused"), name="odd").run()
    except CommGridError as error:
        wrong.append(str(error))
    dist.barrier()
    commgrid.shutdown()
    return wrong


def test_fsdp_shards_of_a_fused_weight() -> None:
    for found in run_on_ranks(sharded_again, 4, check=False):
        (told,) = found
        assert "k.weight, of which ranks 0-3 hold [3, 3] at [0, 0], differs between" in told


def own_side_alone(pattern: str) -> str:
    """Each rank knows one side's names: rank 0 the trainer's, rank 1 the engine's."""
    commgrid.join()
    if dist.get_rank() == 0:
        grid = commgrid.initialize(ranks=[0], dp=1, name="trainer")
        held = {QKV: megatron_slices(0, 1, 0)[QKV], f"{LAYER}input_layernorm.weight": numbers(6)}
        names = mapping("llama", source="megatron", config=CONFIG)
        sides: dict[str, Any] = {"source": held, "target": None, "source_grid": grid}
    else:
        grid = commgrid.initialize(ranks=[1], dp=1, name="engine")
        name = f"{ATTN}qkv_proj.weight"
        served = {name: torch.zeros_like(engine_slices(0, 1, 0)[name])}
        names = mapping("llama", target="vllm", config=CONFIG)
        sides = {"source": None, "target": served, "target_grid": grid}
    told = ""
    try:
        Transfer(**sides, rename=names, only=[pattern]).run()
        if dist.get_rank() == 1:
            assert torch.equal(served[name], engine_slices(0, 1, 0)[name])
    except CommGridError as error:
        told = str(error)
    commgrid.shutdown()
    return told


@pytest.mark.full("of a part")
@pytest.mark.parametrize(
    "pattern", ["*.qkv_proj.*", "*.q_proj.*"], ids=["of the target", "of a part"]
)
def test_each_side_may_know_its_own_names_alone(pattern: str) -> None:
    for told in run_on_ranks(own_side_alone, 2, pattern, check=False):
        if "qkv" in pattern:
            assert told == ""
        else:
            assert "the target has no tensors" in told


def legacy_experts() -> list[Any]:
    """Megatron's stacked experts, whose last dims are exchanged, from copies to halves."""
    grid = commgrid.initialize(tp=2)
    mine = slice(None) if grid.rank else slice(0, 1)
    stacked = numbers(2, 3, 8)  # experts, hidden, gate and up of 4
    up = torch.zeros(2, 8, 3)[mine].float().clone()
    names = mapping("qwen3_moe", source="megatron", target="vllm")
    served = {"model.layers.0.mlp.experts.w13_weight": Part(up, (2, 8, 3), (0, 0, 0))}
    source = {"decoder.layers.0.mlp.experts.weight1": stacked}
    Transfer(source, served, rename=names).run()
    found: list[Any] = [torch.equal(up, stacked.mT[mine].float())]
    stacked[1, 2, 5] += grid.rank
    try:
        Transfer(source, served, rename=names, name="odd").run()
    except CommGridError as error:
        found.append(str(error))
    commgrid.shutdown()
    return found


def test_transposed_experts_are_compared_and_moved() -> None:
    for right, told in run_on_ranks(legacy_experts, 2, check=False):
        assert right
        assert "model.layers.0.mlp.experts.1.up_proj.weight, of which ranks 0-1 hold" in told


@pytest.fixture
def grid() -> Iterator[Any]:
    yield commgrid.initialize()
    commgrid.shutdown()


def test_one_source_fills_several_targets(grid: Any) -> None:
    embed = numbers(4, 2)
    served = {name: torch.zeros(4, 2).double() for name in ("tokens", "head")}
    Transfer({"embed": embed}, served, rename={"embed": ["tokens", "head"]}).run()
    assert all(torch.equal(one, embed) for one in served.values())


def test_a_tied_source_may_have_both_names_and_copies_that_are_not_tied_may_not(grid: Any) -> None:
    embed = numbers(10, 2)
    tied = {**CONFIG, "tie_word_embeddings": True}
    names = mapping("llama", source="hf", target="megatron", config=tied)
    target = {"embedding.word_embeddings.weight": torch.full((12, 2), 7.0).double()}
    source = {"model.embed_tokens.weight": embed, "lm_head.weight": embed}
    Transfer(source, target, rename=names).run()
    (found,) = target.values()
    assert torch.equal(found[:10], embed)
    assert found[10:].eq(7).all()  # padding keeps its numbers
    with pytest.raises(
        CommGridError, match=r"rename= calls both model\.embed_tokens\.weight and lm_"
    ):
        Transfer({**source, "lm_head.weight": embed.clone()}, target, rename=names, name="other")


@pytest.mark.parametrize("same", [True, False])
def test_copies_of_a_tied_target_that_are_cut_otherwise_are_refused(same: bool, grid: Any) -> None:
    embed, head = torch.zeros(10, 2).double(), torch.zeros(10 if same else 5, 2).double()
    target = {"model.embed_tokens.weight": embed, "lm_head.weight": Part(head, (10, 2), (0, 0))}
    tied = {**CONFIG, "tie_word_embeddings": True}
    names = mapping("llama", target="vllm", config=tied)
    source = {"model.embed_tokens.weight": numbers(10, 2)}
    if same:
        Transfer(source, target, rename=names).run()
        assert torch.equal(embed, numbers(10, 2))
        assert torch.equal(head, numbers(10, 2))
        return
    with pytest.raises(CommGridError, match=r"has parts on this rank that overlap, \[10, 2\]"):
        Transfer(source, target, rename=names)


def fused_pair() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    source = {"q.weight": numbers(4, 2), "k.weight": numbers(1, 2), "v.weight": numbers(1, 2),
              "norm": numbers(3)}  # fmt: skip
    return source, {"qkv.weight": torch.zeros(6, 2).double(), "norm": torch.zeros(3).double()}


def test_only_takes_the_targets_names(grid: Any) -> None:
    source, target = fused_pair()
    names = mapping(TABLE, target="fused")
    Transfer(source, target, rename=names, only=["qkv.*"]).run()
    assert torch.equal(target["qkv.weight"], torch.cat([*source.values()][:3]))
    assert not target["norm"].any()
    with pytest.raises(CommGridError, match=r"'qvk\.\*' is the name of no tensor of the target"):
        Transfer(source, target, rename=names, only=["norm", "qvk.*"], name="wrong")


def test_a_part_that_the_source_has_not_is_named(grid: Any) -> None:
    source, target = fused_pair()
    del source["v.weight"]
    with pytest.raises(
        CommGridError, match=r"v\.weight is on rank 0 of the target, and the source"
    ):
        Transfer(source, target, rename=mapping(TABLE, target="fused"))


def test_a_name_that_no_row_takes_is_an_error(grid: Any) -> None:
    source, target = fused_pair()
    strict = {"fused": {"qkv.weight": TABLE["fused"]["qkv.weight"]}}
    with pytest.raises(CommGridError, match="norm: rename=fused has no row for this name"):
        Transfer(source, target, rename=mapping(strict, target="fused"))
    strict["fused"]["norm"] = []  # type: ignore[assignment]
    del source["norm"]
    Transfer(source, target, rename=mapping(strict, target="fused"), name="left out").run()
    assert torch.equal(target["qkv.weight"], torch.cat([*source.values()][:3]))
