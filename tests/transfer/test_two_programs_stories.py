"""Stories of two programs: optimizers, parts of each world, names and numbers of the engine."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import commgrid
from commgrid.transfer import Fp8Blocks, Part, Transfer, mapping
from tests.transfer.programs import PEERS, World, both
from tests.waiting import until

SIDES = {"trainer": ("source", 0), "engine": ("target", 1)}


def meets(
    world: World, side: Any, grid: commgrid.HyperCommGrid | None = None, **how: Any
) -> Transfer:
    """The transfer of this program's model."""
    what, place = SIDES[world.name]
    sides: list[Any] = [None, None]
    sides[place] = side
    optimizers: list[Any] = [None, None]
    if "optimizer" in how:
        optimizers[place] = how.pop("optimizer")
        how["optimizer"] = tuple(optimizers)
    grids: Any = {f"{what}_grid": grid or world.grid}
    given = {"store": world.store, "peer": PEERS[world.name], "timeout": 60.0, **how}
    return Transfer(*sides, **grids, **given)


def waits(world: World, ranks: int) -> None:
    """Stay until all ranks of both programs are done, and the store's server longest."""
    if world.store.add("done", 1) == ranks:
        world.store.set("all done", "")
    world.store.wait(["all done"])
    world.store.add("left", 1)
    if world.name == "trainer" and world.rank == 0:
        until(lambda: world.store.add("left", 0) == ranks, "the end of the others")


def layers() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))
    return model.to(torch.float64)


def step(model: nn.Module, optimizer: Any, number: int) -> float:
    """Train on a batch that all ranks of both programs have."""
    generator = torch.Generator().manual_seed(number)
    loss = model(torch.randn(4, 8, generator=generator, dtype=torch.float64)).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def trains(world: World) -> list[float]:
    """FSDP2 on the trainer; a copy of it on the engine, which trains on with its state."""
    grid = commgrid.initialize(name="data")
    model = layers()
    if world.name == "trainer":
        fully_shard(model, mesh=grid.device_mesh("dp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 if world.name == "trainer" else 0.5)
    if world.name == "trainer":
        for number in range(3):
            step(model, optimizer, number)
    meets(world, model, grid, optimizer=optimizer).run()
    losses = [step(model, optimizer, number) for number in range(3, 6)]
    waits(world, 5)
    return losses


@pytest.mark.full
def test_another_program_continues_the_curve() -> None:
    trainers, engines = both(trains, trains, (2, 3))
    for losses in (*trainers, *engines):
        assert losses == pytest.approx(trainers[0], rel=1e-9)


def in_part(world: World) -> list[float]:
    """A grid of rank 1 of two, and one of ranks 2 and 0 of three, in that order."""
    ranks = [1] if world.name == "trainer" else [2, 0]
    found: list[float] = []
    if dist.get_rank() in ranks:
        grid = commgrid.initialize(name="part", ranks=ranks)
        if world.name == "trainer":
            meets(world, {"w": torch.arange(8.0)}, grid).run(verify=True)
        else:
            half = torch.zeros(4)
            place = 4 * grid.get_local_rank("dp")
            meets(world, {"w": Part(half, (8,), (place,))}, grid).run(verify=True)
            found = half.tolist()
    waits(world, 5)
    return found


@pytest.mark.full
def test_grids_of_some_ranks_of_each_program() -> None:
    _, engines = both(in_part, in_part, (2, 3))
    assert engines == [[4.0, 5.0, 6.0, 7.0], [], [0.0, 1.0, 2.0, 3.0]]


CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
HELD = "decoder.layers.0.self_attention.linear_qkv.weight"
SERVED = "model.layers.0.self_attn.qkv_proj.weight"
ROWS = [*range(8), *range(16, 24), *range(8, 12), *range(24, 28), *range(12, 16), *range(28, 32)]
"""The engine's rows of the trainer's: queries of both groups, then keys, then values."""


def quantizes(world: World) -> float:
    """Megatron-core's fused rows to vLLM's, in fp8 of blocks; the largest error, by its bound."""
    commgrid.initialize(name="data")
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(32, 130, generator=generator)
    how: dict[str, Any] = {"rename": mapping("llama", source="megatron", target="vllm",
                                             config=CONFIG)}  # fmt: skip
    worst = 0.0
    if world.name == "trainer":
        how["convert"] = Fp8Blocks(block=(4, 64))
        rows = full.chunk(2)[world.rank]
        meets(world, {HELD: Part(rows, (32, 130), (16 * world.rank, 0))}, **how).run()
    else:
        numbers, scales = torch.zeros(32, 130).to(torch.float8_e4m3fn), torch.zeros(8, 3)
        meets(world, {SERVED: numbers, f"{SERVED}_scale_inv": scales}, **how).run()
        right = full[ROWS]
        blocks = scales.repeat_interleave(4, 0).repeat_interleave(64, 1)[:, :130]
        # A float8_e4m3fn has three digits behind the first; the smallest ones are 2 ** -9 apart.
        bound = torch.maximum(right.abs() / 16, blocks * 2.0**-10)
        worst = ((numbers.float() * blocks - right).abs() / bound).max().item()
        assert _largest(right).allclose(scales * 448)
    waits(world, 4)
    return worst


def _largest(weight: Tensor) -> Tensor:
    """The largest number of each block of 4 x 64."""
    padded = nn.functional.pad(weight.abs(), (0, 192 - weight.shape[1]))
    return padded.view(8, 4, 3, 64).amax((1, 3))


@pytest.mark.full
def test_fused_names_and_fp8_of_the_engine() -> None:
    _, engines = both(quantizes, quantizes)
    assert all(0 < worst <= 1.001 for worst in engines)


def names(world: World, path: str) -> list[float]:
    """Names that the trainer changes, and a part that the engine wants, at a file of both."""
    commgrid.initialize(name="data")
    file = copy.copy(world)
    file.store = dist.FileStore(path, -1)
    if world.name == "trainer":
        held = {"a": torch.ones(2), "more": torch.ones(3)}
        transfers = [meets(file, held, rename={"a": "b"}, name=name) for name in ("1", "2")]
    else:
        got = {"b": torch.zeros(2), "more": torch.full((3,), 9.0)}
        transfers = [
            meets(file, got, name="1", only=["b"]),
            meets(file, got, name="2", only=["m*"]),
        ]
    transfers[0].run()
    found = [] if world.name == "trainer" else [*got["b"].tolist(), *got["more"].tolist()]
    transfers[1].run(verify=world.name == "engine")
    if found:
        found += got["more"].tolist()
    for transfer in transfers:
        transfer.close()
    waits(world, 4)
    return found


@pytest.mark.full
def test_each_side_says_its_part_of_the_names_at_a_file(tmp_path: Path) -> None:
    _, engines = both(names, names, (2, 2), str(tmp_path / "store"))
    assert engines == [[1.0, 1.0, 9.0, 9.0, 9.0, 1.0, 1.0, 1.0]] * 2
