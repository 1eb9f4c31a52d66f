"""FSDP2 with tensor-parallel layers, and checkpoints through several grids, over NCCL in bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import commgrid
from commgrid import checkpoint
from tests.examples.curves import curve, load, run, same_curve
from tests.gpu.on_gpus import on_gpus

TINY = [
    "--layers", "2", "--hidden", "64", "--heads", "4", "--batch-size", "8", "--seq-len", "16",
    "--clip-grad", "1.0",
]  # fmt: skip
CUTS: list[list[str]] = [
    ["--tp", "2", "--fsdp", "--sequence-parallel"],
    ["--tp", "4"],
    ["--zero1"],
    ["--tp", "2", "--zero1", "--sequence-parallel"],
    ["--fsdp", "--dp-replicate", "2"],
    ["--tp", "2", "--fsdp", "--sequence-parallel"],
]


def test_fsdp_with_tensor_parallel_layers_has_the_same_curve(tmp_path: Path) -> None:
    fsdp = ["--fsdp", "--tp", "2", "--sequence-parallel"]
    jobs = {
        "whole": ["--dtype", "fp32"],
        "fp32": ["--dtype", "fp32", *fsdp],
        "hsdp": ["--dtype", "fp32", "--fsdp", "--dp-replicate", "2"],
        "bf16": ["--dtype", "bf16", *fsdp],
    }
    given = [
        [*TINY, *job, "--steps", "20", "--metrics", str(tmp_path / name)]
        for name, job in jobs.items()
    ]
    assert (
        on_gpus(run, 4, *given, timeout=120) == [[0] * len(jobs)] * 4
    )  # no group beyond the grid's
    curves = {name: curve(tmp_path / name) for name in jobs}
    same_curve(curves["fp32"], curves["whole"], "fp32")
    same_curve(curves["hsdp"], curves["whole"], "fp32")
    # Logits of bf16 have 8 bits, so that the mean loss is right to some tenths of a percent.
    losses = [[row["loss"] for row in curves[name]] for name in ("bf16", "whole")]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)


def through_grids(device: str, folder: str) -> list[str]:
    """Trains three steps, then loads and saves on one grid after the other; what they are."""
    train_gpt: Any = load()
    done = []
    for number, cut in enumerate(CUTS):
        args = train_gpt.parse([*TINY, "--dtype", "bf16", *cut, "--save", folder])
        sizes = {"dp_replicate": args.dp_replicate, "dp_shard": -1} if args.fsdp else {"dp": -1}
        grid = commgrid.initialize(
            tp=args.tp, groups={"fsdp": "dp_shard_cp"} if args.fsdp else None, **sizes
        )
        trainer = train_gpt.Trainer(args, grid)
        assert trainer.device.type == device
        args.resume = folder
        if number == 0:
            text = train_gpt.read_text(None, args.seq_len)
            for step in range(1, 4):
                trainer.step(step, train_gpt.global_batch(text, step, args))
        else:
            assert trainer.resume() == number - 1
        trainer.save(number)
        done.append(str(grid.shape))
        commgrid.destroy()
    return done


def equal_everywhere(folder: Path, fp32_weights: set[int]) -> int:
    """How many tensors are bit for bit the same in all checkpoints of a folder."""
    wholes = []
    for step in checkpoint.steps(folder):
        dcp_to_torch_save(folder / f"step_{step:08}", folder / f"{step}.pt")
        wholes.append(torch.load(folder / f"{step}.pt"))
    first, *others = wholes
    compared = 0
    for number, other in enumerate(others, 1):
        for name, tensor in first["optimizer"].items():
            if isinstance(tensor, torch.Tensor) and name in other["optimizer"]:
                assert torch.equal(tensor, other["optimizer"][name]), (number, name)
                compared += 1
        for name, tensor in first["model"].items():
            # FSDP keeps fp32 weights; the others bf16 ones with fp32 copies.
            full = exact = other["model"][name]
            if number not in fp32_weights:
                exact = other["optimizer"][f"state.{name}.master"]
                assert torch.equal(full, exact.bfloat16()), (number, name)
            assert torch.equal(tensor, exact), (number, name)
            compared += 1
    return compared


def test_a_checkpoint_goes_through_many_grids_bit_for_bit(tmp_path: Path) -> None:
    """From fp32 weights under FSDP over bf16 weights with fp32 copies, in and out again."""
    folder = tmp_path / "runs"
    assert len(on_gpus(through_grids, 4, "cuda", str(folder), timeout=120)[0]) == len(CUTS)
    assert equal_everywhere(folder, {4, 5}) > 100
