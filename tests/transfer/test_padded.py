"""Vocabularies that one side has padded: 16 rows here and 13 there, loaded and transferred."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import commgrid
from commgrid import checkpoint
from commgrid.data_parallel import GradientReducer, ShardedOptimizer
from commgrid.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding
from commgrid.testing import run_on_ranks
from commgrid.transfer import Part, Transfer

TRUE = 13
NAMES = {"embedding.weight": TRUE, "head.weight": TRUE, "head.bias": TRUE}


def made(rows: int, kind: str = "plain", dtype: torch.dtype = torch.float32) -> Any:
    """An embedding and a head of so many rows, with numbers that depend on their place."""
    if kind == "vocabulary":  # which pads itself
        model = nn.ModuleDict({"embedding": VocabParallelEmbedding(rows, 4)})
    elif kind == "columns":  # 8 rows on each of two ranks
        model = nn.ModuleDict({"embedding": ColumnParallelLinear(4, rows, bias=False)})
    else:
        model = nn.ModuleDict({"embedding": nn.Embedding(rows, 4), "head": nn.Linear(4, rows)})
    model = model.to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            numbers = torch.arange(float(parameter.numel())).view_as(parameter)
            parameter.copy_(numbers / 64 + 1)
    return model


def trained(model: nn.Module, optimizer: Any) -> Any:
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return optimizer


def true(rows: Tensor) -> Tensor:
    return rows.detach()[:TRUE]


def wrong(source: nn.Module, target: nn.Module, optimizers: Any = None) -> list[str]:
    """The tensors whose true rows are not the source's, or whose padding is not zero."""
    found = []
    theirs = dict(source.named_parameters())
    for name, parameter in target.named_parameters():
        pairs = [(theirs[name], parameter)]
        if optimizers is not None:
            states = (optimizers[0].state[theirs[name]], optimizers[1].state[parameter])
            pairs += [(states[0][key], states[1][key]) for key in ("exp_avg", "exp_avg_sq")]
        for one, other in pairs:
            if not torch.equal(true(one), true(other)) or other.detach()[TRUE:].any():
                found.append(name)
    return found


@pytest.mark.parametrize(("before", "after"), [(16, 13), (13, 16), (16, 24), (16, 16), (13, 13)])
@pytest.mark.parametrize("way", ["load", "transfer"])
def test_rows_behind_the_true_size_are_padding(
    before: int, after: int, way: str, tmp_path: Path
) -> None:
    commgrid.initialize()
    source, target = made(before), made(after)
    optimizers = [trained(m, torch.optim.AdamW(m.parameters())) for m in (source, target)]
    if way == "load":
        checkpoint.save(tmp_path, 1, source, optimizers[0], progress=False)
        checkpoint.load(tmp_path, target, optimizers[1], padded=NAMES, progress=False)
        assert not wrong(source, target, optimizers)
    else:
        pair = optimizers[0], optimizers[1]
        transfer = Transfer(source, target, optimizer=pair, padded=NAMES)
        for _ in range(2):
            with torch.no_grad():
                source["embedding"].weight.add_(1.0)
                target["embedding"].weight.fill_(9.0)
            transfer.run()
            assert not wrong(source, target, optimizers)
    commgrid.shutdown()


def test_fp32_copies_and_files_of_others_are_padded_too(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    commgrid.initialize()
    source, target = made(16, dtype=torch.bfloat16), made(13)
    reducer = GradientReducer(source, shard=True)
    optimizer = ShardedOptimizer(reducer, torch.optim.AdamW)
    sum(p.float().sum() for p in source.parameters()).backward()
    reducer.finish()
    optimizer.step()
    checkpoint.save(tmp_path / "own", 1, source, optimizer, progress=False)
    checkpoint.load(tmp_path / "own", target, padded=NAMES, progress=False)
    masters = [p for group in optimizer.inner.param_groups for p in group["params"]]
    weight = target["embedding"].weight.detach().flatten()
    assert not torch.equal(weight, weight.bfloat16().float())
    copies = [p.flatten()[: TRUE * 4] for p in masters]
    assert any(torch.equal(weight, each) for each in copies)
    (tmp_path / "hf").mkdir()
    stored = {"model.embed_tokens.weight": torch.rand(16, 4), "lm_head.weight": torch.rand(16, 4)}
    safetensors.save_file(stored, tmp_path / "hf" / "model.safetensors")
    model = nn.ModuleDict({"embedding": nn.Embedding(13, 4), "head": nn.Linear(4, 13, bias=False)})
    names = {"model.embed_tokens.weight": "embedding.weight", "lm_head.weight": "head.weight"}
    padded = {"embedding.weight": TRUE, "head.weight": TRUE}
    checkpoint.load(tmp_path / "hf", model, prefix="", rename=names, padded=padded, progress=False)
    assert torch.equal(model["embedding"].weight, true(stored["model.embed_tokens.weight"]))
    assert torch.equal(model["head"].weight, true(stored["lm_head.weight"]))
    Transfer(stored, model, rename=names, padded=padded).run()
    commgrid.shutdown()


def on_two_ranks(folder: str, kinds: tuple[str, str], way: str) -> bool:
    grid = commgrid.initialize(tp=1 if "fsdp" in kinds else 2)
    rows = {"vocabulary": 13, "columns": 16, "fsdp": 16, "plain": 13}
    models = [made(rows[kind], kind) for kind in kinds]
    for kind, model in zip(kinds, models, strict=True):
        if kind == "plain":
            del model["head"]
        elif kind == "fsdp":
            del model["head"]
            fully_shard(model["embedding"], mesh=grid.device_mesh("dp"))
    source, target = models
    whole = torch.arange(64.0).view(16, 4) / 64 + 1
    padded = {"embedding.weight": TRUE}
    plain = made(16)
    del plain["head"]
    Transfer(plain, source, padded=padded).run()
    if way == "load":
        checkpoint.save(folder, 1, source, progress=False)
        checkpoint.load(folder, target, padded=padded, progress=False)
    else:
        Transfer(source, target, padded=padded).run()
    back = made(16)
    del back["head"]
    Transfer(target, back, padded=padded).run()
    found = torch.equal(true(back["embedding"].weight), true(whole))
    found = found and not back["embedding"].weight[TRUE:].any()
    if kinds[1] == "columns" and grid.rank == 1:  # rows 8 to 15
        found = found and not target["embedding"].weight[TRUE - 8 :].any()
    commgrid.shutdown()
    return found


@pytest.mark.parametrize(
    ("kinds", "way"),
    [
        (("columns", "vocabulary"), "load"),
        pytest.param(("vocabulary", "columns"), "load", marks=pytest.mark.full),
        pytest.param(("plain", "columns"), "transfer", marks=pytest.mark.full),
        pytest.param(("columns", "plain"), "transfer", marks=pytest.mark.full),
        pytest.param(("fsdp", "plain"), "load", marks=pytest.mark.full),
        pytest.param(("plain", "fsdp"), "load", marks=pytest.mark.full),
        pytest.param(("plain", "fsdp"), "transfer", marks=pytest.mark.full),
        pytest.param(("fsdp", "plain"), "transfer", marks=pytest.mark.full),
    ],
)
def test_slices_of_padded_rows_are_moved(kinds: tuple[str, str], way: str, tmp_path: Path) -> None:
    assert run_on_ranks(on_two_ranks, 2, str(tmp_path), kinds, way) == [True] * 2


def test_a_mapping_may_have_padded_parts() -> None:
    commgrid.initialize()
    first, last = torch.full((8, 2), 9.0), torch.full((8, 2), 9.0)
    parts = {"w": [Part(first, (16, 2), (0, 0)), Part(last, (16, 2), (8, 0))]}
    rows = torch.arange(26.0).view(13, 2)
    Transfer({"w": rows}, parts, padded={"w": TRUE}).run()
    assert torch.equal(torch.cat([first, last])[:TRUE], rows)
    assert not last[5:].any()
    commgrid.shutdown()


def test_what_is_no_true_size_is_refused(tmp_path: Path) -> None:
    commgrid.initialize()
    model, larger = made(13), made(16)
    checkpoint.save(tmp_path, 1, model, progress=False)

    def load(padded: Any, into: nn.Module = larger) -> None:
        checkpoint.load(tmp_path, into, padded=padded, progress=False)

    before = {name: p.detach().clone() for name, p in larger.named_parameters()}
    for padded, told in (
        (None, r"embedding.weight is \(13, 4\), here \(16, 4\)"),
        ({**NAMES, "head.bias": 16}, r"head.bias is \(13,\), here \(16,\)"),
        ({**NAMES, "head.bias": 17}, r"padded= has 17 for head.bias, which has shape \(16,\)"),
        ({**NAMES, "haed.bias": 13}, r"padded= has 'haed.bias', which is no tensor .*head.bias"),
        ([13], "expected the model's names, each with how many entries"),
        ({"head.bias": 0}, "expected the model's names, each with how many entries"),
    ):
        with pytest.raises(commgrid.CommGridError, match=told):
            load(padded)
        if isinstance(padded, dict) or padded is None:
            with pytest.raises(commgrid.CommGridError):
                Transfer(model, larger, padded=padded)
    assert all(torch.equal(p, before[name]) for name, p in larger.named_parameters())
    load(NAMES)
    commgrid.shutdown()
