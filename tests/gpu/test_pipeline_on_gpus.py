"""Messages between stages and every schedule over NCCL in bf16."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import commgrid
from commgrid.collectives import all_gather
from commgrid.pipeline import Pipeline, StageLinks, make_schedule, programs
from commgrid.pipeline_schedules.messages import Exchange
from commgrid.pipeline_schedules.schedule import SCHEDULES, Send, StageMessage
from tests.gpu.on_gpus import on_gpus
from tests.gpu.test_layers import close

STAGES, MICROBATCHES, WIDTH = 4, 8, 64
TOLERANCE = 4e-2  # bf16 keeps 8 bits, and a gradient has passed eight layers


def messages(device: str) -> int:
    """How many messages of three tensors arrived as they were sent, over every exchange."""
    commgrid.initialize(pp=STAGES)
    links = StageLinks("pp", device=torch.device(device))
    schedule = make_schedule("interleaved", STAGES, MICROBATCHES, 2)
    arrived = 0

    def tensors_of(send: Send) -> list[Tensor]:
        return expected(send.message, device)

    for step in programs(schedule)[links.stage]:
        if not isinstance(step, Exchange):
            continue
        links.start(step, tensors_of)
        for recv in step.recvs:
            for found, wanted in zip(
                links.take(recv.message), expected(recv.message, device), strict=True
            ):
                assert found.device.type == torch.device(device).type
                assert torch.equal(found, wanted), recv
            arrived += 1
    links.finish()
    return arrived


def expected(message: StageMessage, device: str) -> list[Tensor]:
    """States in bf16, a mask and positions; a gradient has the first only."""
    number = float(message.boundary * 16 + message.microbatch)
    states = torch.full((33, WIDTH), number, dtype=torch.bfloat16, device=device)
    if message.kind == "gradient":
        return [-states]
    mask = torch.arange(33, device=device) < message.microbatch
    return [states, mask, torch.full((2, 2), message.boundary, device=device)]


def test_messages_arrive() -> None:
    received = 2 * (2 * STAGES - 1) * MICROBATCHES
    assert sum(on_gpus(messages, STAGES, "cuda")) == received


def layer(part: int) -> nn.Module:
    torch.manual_seed(part)
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())


def loss(y: Tensor, target: Tensor) -> Tensor:
    return (y.float() - target).square().mean()


def schedules(device: str) -> int:
    """How many gradients were compared with the unsplit model's in fp32."""
    grid = commgrid.initialize(pp=STAGES)
    compared = 0
    for name in SCHEDULES:
        num_chunks = 2 if name == "interleaved" else 1
        parts = range(grid.get_local_rank("pp"), STAGES * num_chunks, STAGES)
        chunks = [layer(part).to(device, torch.bfloat16) for part in parts]
        whole = nn.Sequential(*(layer(p).bfloat16().float() for p in range(STAGES * num_chunks)))
        pipeline = Pipeline(chunks, name, num_microbatches=MICROBATCHES, loss=loss)
        torch.manual_seed(99)
        x, target = torch.randn(2, MICROBATCHES, 16, WIDTH).to(device)
        losses = pipeline.step(x.bfloat16(), target)
        whole.to(device)
        wanted = torch.stack([loss(whole(a), b) for a, b in zip(x, target, strict=True)])
        wanted.sum().backward()
        if losses is not None:
            close(losses, wanted.detach(), TOLERANCE, f"{name}: losses")
        for part, chunk in zip(parts, chunks, strict=True):
            for (key, mine), theirs in zip(
                chunk.named_parameters(), whole[part].parameters(), strict=True
            ):
                assert theirs.grad is not None
                close(mine.grad, theirs.grad, TOLERANCE, f"{name}: part {part}, {key}")
                compared += 1
    told = all_gather(torch.tensor([compared], device=device), "pp")
    return int(told.sum())


def test_every_schedule_has_the_unsplit_models_gradients() -> None:
    assert on_gpus(schedules, STAGES, "cuda") == [4 * (3 * STAGES + 2 * STAGES)] * STAGES
