"""Files that other programs write and read, each by the other program's own reader or writer."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_state
from torch.nn.functional import scaled_dot_product_attention, silu

import commgrid
from commgrid import checkpoint
from commgrid.errors import CheckpointError
from commgrid.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from commgrid.testing import run_on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trained(seed: int, cut: bool = False) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    if cut:
        model = nn.Sequential(ColumnParallelLinear(4, 8), nn.ReLU(), RowParallelLinear(8, 4))
    else:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    groups = [
        {"params": part.parameters(), "lr": lr}
        for part, lr in zip(model[::2], (0.1, 0.2), strict=True)
    ]
    optimizer = torch.optim.AdamW(groups)
    model(torch.rand(3, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def write(folder: Path, how: str) -> None:
    """One process saves as torch's documentation shows."""
    model, optimizer = trained(0)
    named, by_name = torch_state.get_state_dict(model, optimizer)
    states: dict[str, Any] = {
        "model alone": named,
        "nested": {"model": named, "optimizer": by_name},
        "flattened": {
            "model": named,
            "optimizer": torch_state.get_optimizer_state_dict(
                model, optimizer, options=torch_state.StateDictOptions(
                    flatten_optimizer_state_dict=True
                ),
            ),
        },
        "other names": {"net": {f"body.{key}": value for key, value in named.items()}, "step": 7},
        "by number": {"model": named, "optimizer": optimizer.state_dict()},
    }  # fmt: skip
    dcp.save(states[how], checkpoint_id=folder)


def reads(folder: str, how: str) -> tuple[bool, Any]:
    """Whether two ranks with slices have what one process has saved."""
    commgrid.initialize(tp=2)
    model, optimizer = trained(1, cut=True)
    options: dict[str, Any] = {
        "model alone": {"prefix": ""},
        "other names": {"prefix": "net.", "rename": lambda name: name.removeprefix("body.")},
    }.get(how, {"optimizer": optimizer})
    found = checkpoint.load(folder, model, progress=False, **options)
    checkpoint.save(f"{folder} again", 1, model, optimizer, copies="first", progress=False)
    commgrid.shutdown()
    return found.step, found.extra


@pytest.mark.parametrize("how", ["model alone", "nested", "flattened", "other names"])
def test_what_torch_has_written_loads(how: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    write(folder, how)
    step = 7 if how == "other names" else None
    assert run_on_ranks(reads, 2, str(folder), how) == [(step, {})] * 2
    expected, its = trained(0)
    found, optimizer = trained(2)
    commgrid.initialize()
    checkpoint.load(f"{folder} again", found, optimizer, progress=False)
    commgrid.shutdown()
    for key, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[key], value), key
    if how in ("nested", "flattened"):
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
        for one, other in zip(found.parameters(), expected.parameters(), strict=True):
            for key, value in its.state[other].items():
                assert torch.equal(optimizer.state[one][key], value), key


def said(*given: Any, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(*given, progress=False, **options)
    return str(caught.value)


def test_what_does_not_fit_is_told_with_the_way_out(tmp_path: Path) -> None:
    for how in ("model alone", "by number", "nested"):
        write(tmp_path / how, how)
    commgrid.initialize()
    model, optimizer = trained(1)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    told = said(tmp_path / "model alone", model)
    assert "no name in it begins with prefix='model.': it has 0.weight" in told
    assert "'' if they have none, and rename=" in told
    told = said(tmp_path / "by number", model, optimizer)
    assert "is by numbers of parameters" in told
    alone = trained(1)[0]
    checkpoint.load(tmp_path / "by number", alone, progress=False)
    assert torch.equal(alone[0].weight, trained(0)[0][0].weight)
    told = said(tmp_path / "nested", model, rename=lambda name: "0.weight")
    assert "model.0.weight and model.0.bias are both model.0.weight after prefix=" in told
    with pytest.raises(commgrid.SpecError, match="rename=5: expected a mapping"):
        checkpoint.load(tmp_path / "nested", model, rename=5)  # type: ignore[arg-type]
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    commgrid.shutdown()


def test_parts_of_a_model_load_if_asked(tmp_path: Path) -> None:
    write(tmp_path, "model alone")
    commgrid.initialize()
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Identity(), nn.Linear(8, 2))
    head = model[3].weight.clone()
    assert "it has no model.3.weight" in said(tmp_path, model, prefix="")
    found = checkpoint.load(tmp_path, model, prefix="", strict=False, progress=False)
    assert found.missing == ("3.weight", "3.bias")
    assert found.unexpected == ("2.weight", "2.bias")
    expected = trained(0)[0]
    assert torch.equal(model[0].weight, expected[0].weight)
    assert torch.equal(model[3].weight, head)
    other = nn.Sequential(nn.Identity(), nn.Linear(1, 1))
    assert "it has none of 1.weight, 1.bias, but 0.weight" in said(
        tmp_path, other, prefix="", strict=False
    )
    commgrid.shutdown()


def test_a_tensor_among_others_own_values_loads(tmp_path: Path) -> None:
    model = trained(0)[0]
    states = {"model": model.state_dict(), "extra": {"ema": torch.arange(3.0), "epoch": 4}}
    dcp.save(states, checkpoint_id=tmp_path)
    commgrid.initialize()
    found = checkpoint.load(tmp_path, trained(1)[0], prefix="model", progress=False)
    commgrid.shutdown()
    assert found.extra.pop("ema").tolist() == [0.0, 1.0, 2.0]
    assert found.extra == {"epoch": 4}


def test_torch_reads_ours_into_flattened_optimizer_state(tmp_path: Path) -> None:
    commgrid.initialize()
    model, optimizer = trained(0)
    saved = checkpoint.save(tmp_path, 3, model, optimizer, progress=False)
    commgrid.shutdown()
    other, its = trained(1)
    flat = torch_state.StateDictOptions(flatten_optimizer_state_dict=True)
    states = {
        "model": torch_state.get_model_state_dict(other),
        "optimizer": torch_state.get_optimizer_state_dict(other, its, options=flat),
    }
    dcp.load(states, checkpoint_id=saved)
    torch_state.set_optimizer_state_dict(other, its, states["optimizer"], options=flat)
    for one, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, theirs)
        assert torch.equal(optimizer.state[one]["exp_avg"], its.state[theirs]["exp_avg"])


# -- Megatron-core ------------------------------------------------------------------------


def with_megatron(folder: str, writes: bool) -> list[float]:
    """Megatron's own functions, which ask for a GPU that they do not need."""
    warnings.simplefilter("ignore")  # about optional packages
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    from megatron.core import dist_checkpointing, parallel_state

    parallel_state.initialize_model_parallel()
    numbers = torch.arange(6.0).view(2, 3) if writes else torch.zeros(2, 3)
    name = "decoder.out.weight" if writes else "model.out.weight"
    tensor = dist_checkpointing.ShardedTensor.from_rank_offsets(name, numbers, replica_id=0)
    if writes:
        Path(folder).mkdir()
        dist_checkpointing.save({"weight": tensor, "iteration": 7}, folder)
    else:
        numbers = dist_checkpointing.load({"weight": tensor}, folder)["weight"]
    return numbers.flatten().tolist()


class Out(nn.Module):
    """A model with one layer, cut by rows where there are ranks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.out = ColumnParallelLinear(3, 2, bias=False)


def load_megatrons(folder: str) -> tuple[list[float], str]:
    grid = commgrid.initialize(tp=2)
    model = Out()
    told = said(folder, model)
    checkpoint.load(folder, model, prefix="decoder.", progress=False)
    rows = model.out.weight.flatten().tolist()
    assert len(rows) == 3
    assert rows == [3.0 * grid.rank + i for i in range(3)]
    commgrid.shutdown()
    return rows, told


def test_what_megatron_has_written_loads(tmp_path: Path) -> None:
    folder = str(tmp_path / "iter_0000007")
    run_on_ranks(with_megatron, 1, folder, True, check=False)
    for _, told in run_on_ranks(load_megatrons, 2, folder):
        assert "it has decoder.out.weight; give the prefix= of the model's names" in told


def test_megatron_reads_ours(tmp_path: Path) -> None:
    commgrid.initialize()
    model = Out()
    nn.init.constant_(model.out.weight, 2.5)
    saved = checkpoint.save(tmp_path, 1, model, progress=False)
    commgrid.shutdown()
    assert run_on_ranks(with_megatron, 1, str(saved), False, check=False) == [[2.5] * 6]


# -- Hugging Face -------------------------------------------------------------------------

LLAMA = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; its heads are shared out over tp."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = ColumnParallelLinear(16, 16, bias=False)
        self.k_proj = ColumnParallelLinear(16, 8, bias=False)
        self.v_proj = ColumnParallelLinear(16, 8, bias=False)
        self.o_proj = RowParallelLinear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, 4)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        angles = torch.outer(torch.arange(x.shape[1]), 10_000 ** -torch.arange(0, 1, 0.5))
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

        def turned(part: Tensor) -> Tensor:
            one, other = part.chunk(2, -1)
            return part * cos + torch.cat((-other, one), -1) * sin

        mixed = scaled_dot_product_attention(
            turned(q), turned(k), v, is_causal=True, enable_gqa=True
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = ColumnParallelLinear(16, 24, bias=False)
        self.up_proj = ColumnParallelLinear(16, 24, bias=False)
        self.down_proj = RowParallelLinear(24, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(16, eps=1e-6)
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(16, eps=1e-6)
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """A stage of a Llama: the first one embeds, the last one has the head."""

    def __init__(self, stages: list[int]) -> None:
        super().__init__()
        if 0 in stages:
            self.embed_tokens = VocabParallelEmbedding(32, 16)
        self.layers = nn.ModuleDict({str(stage): Block() for stage in stages})
        if 1 in stages:
            self.norm = nn.RMSNorm(16, eps=1e-6)
            self.lm_head = ColumnParallelLinear(16, 32, bias=False, gather_output=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed_tokens(x) if hasattr(self, "embed_tokens") else x
        for block in self.layers.values():
            x = block(x)
        return self.lm_head(self.norm(x)) if hasattr(self, "norm") else x


def of_llama(name: str) -> str:
    return name.removeprefix("model.")


def from_llama(name: str) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"


def start_a_run(folder: str, saved: str, tokens: Tensor) -> Tensor | None:
    grid = commgrid.initialize(tp=2, pp=2)
    model = Llama([grid.get_local_rank("pp")])
    found = checkpoint.load(folder, model, prefix="", rename=of_llama, progress=False)
    assert found.step is None
    checkpoint.save(saved, 1, model, progress=False)
    pipe = grid.get_group("pp")
    after, result = torch.empty(*tokens.shape, 16), None
    with torch.no_grad():
        if grid.get_local_rank("pp") == 0:
            torch.distributed.send(model(tokens), group=pipe, group_dst=1)
        else:
            torch.distributed.recv(after, group=pipe, group_src=0)
            result = model(after)
    commgrid.shutdown()
    return result


@pytest.fixture
def llama(tmp_path: Path) -> tuple[str, Any]:
    """A folder of several safetensors files, and the model in it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**LLAMA, tie_word_embeddings=False, rms_norm_eps=1e-6)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "llama", max_shard_size="8KB")
    assert len(list((tmp_path / "llama").glob("*.safetensors"))) > 1
    return str(tmp_path / "llama"), model


def test_a_folder_of_safetensors_starts_a_run(llama: tuple[str, Any], tmp_path: Path) -> None:
    folder, model = llama
    tokens = torch.randint(32, (2, 10), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = model(tokens).logits
    results = run_on_ranks(start_a_run, 4, folder, str(tmp_path / "runs"), tokens)
    got = [result for result in results if result is not None]
    assert len(got) == 2
    for logits in got:  # sums over tp are in another order
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)

    back = tmp_path / "back"
    files = checkpoint.export(tmp_path / "runs", back, rename=from_llama, file_bytes=8_000)
    assert len(files) > 1
    shutil.copy(Path(folder) / "config.json", back)
    again = type(model).from_pretrained(back)
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name

    (half,) = checkpoint.export(tmp_path / "runs", tmp_path / "half", dtype=torch.bfloat16)
    assert half.stat().st_size < sum(path.stat().st_size for path in files) * 0.6
    with pytest.raises(CheckpointError, match="has safetensors files; give a new folder"):
        checkpoint.export(tmp_path / "runs", back)


def test_what_is_not_in_safetensors_files_is_told(llama: tuple[str, Any], tmp_path: Path) -> None:
    folder, _ = llama
    commgrid.initialize()
    model, optimizer = trained(0)
    assert "it has no optimizer state" in said(
        folder, model, optimizer, prefix="", strict=False
    ) or "it has none of" in said(folder, model, prefix="", strict=False)
    assert "it has no model.0.weight" in said(folder, model, prefix="")
    assert "is a checkpoint, and not of step 5" in said(folder, model, prefix="", step=5)
    next(Path(folder).glob("*.safetensors")).write_bytes(b"cut off")
    assert "cannot be read" in said(folder, model, prefix="")
    commgrid.shutdown()
