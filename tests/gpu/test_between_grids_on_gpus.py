"""Weights and activations between two grids over NCCL: the pairs and sums that gloo is held to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import commgrid
from commgrid import TransferError
from commgrid.bridge import Bridge
from commgrid.resharding import transport
from commgrid.transfer import Transfer
from tests.gpu.on_gpus import programs_on_gpus
from tests.transfer.pairs import BF16, HSDP, move, on

PAIRS = [
    (on(4, tp=2, pp=2), on(4, tp=4)),
    (on(2, pp=2, chunks=2), on(2, 2, tp=2)),
    (on(4, **HSDP), on(3, tp=3, dtype=BF16)),
    (on(4, dp=4), on(2, 2, pp=2)),
]


def moved(rank: int) -> list[Any]:
    torch.set_default_device("cuda")
    return move(PAIRS, False, "")


def test_weights_go_from_cut_to_cut() -> None:
    ranks = programs_on_gpus(moved, 4)
    for number, (source, target) in enumerate(PAIRS):
        assert [bad for bad, *_ in (rank[number] for rank in ranks) if bad] == [], (source, target)
        assert any(rank[number][2] for rank in ranks)  # something was sent


def large(equal: bool, rank: int) -> list[int] | str:
    """Moves 64 MiB in boxes that travel where they lie and in parts; how many numbers are wrong."""
    torch.set_default_device("cuda")
    commgrid.join()
    one, other = (
        commgrid.initialize(name=name, ranks=range(first, first + 2))
        for name, first in (("one", 0), ("other", 2))
    )
    torch.manual_seed(0 if equal else rank)
    model, wrong = torch.nn.Linear(4096, 4096), []
    transfer = Transfer(
        model if one else None, model if other else None, source_grid=one, target_grid=other,
        max_bytes=2**22,
    )  # fmt: skip
    for number in range(3):
        with torch.no_grad():
            drawn = torch.Generator("cuda").manual_seed(number)
            wanted = torch.randn(4096, 4096, generator=drawn)
            model.weight.copy_(wanted if one else torch.zeros_like(wanted))
            if one:  # what the stream has still to do when the transfer begins is waited for
                torch.cuda._sleep(20_000_000)
                model.weight.add_(1)
        try:
            transfer.run()
        except TransferError as error:
            return str(error)
        wrong.append(int((model.weight != wanted + 1).sum()))
    transfer.close()
    commgrid.shutdown()
    return wrong


def run_large(equal: bool) -> list[Any]:
    return programs_on_gpus(large, 4, equal)


def test_large_boxes_arrive_as_they_were_when_run_was_called() -> None:
    assert run_large(True) == [[0, 0, 0]] * 4


def test_copies_that_differ_are_an_error_on_every_rank() -> None:
    """Rank 0 ended the group while NCCL still sent the error, and the others waited for ever."""
    for said in run_large(False):
        assert "model.bias differs between rank 0 and rank 1 of group 'dp_cp'" in said


def through_one_gpu(rank: int) -> tuple[list[int], int]:
    """How many numbers are wrong after each run, and how many messages went through memory."""
    torch.cuda.set_device(0)
    torch.set_default_device("cuda")
    near, start = 0, transport.start_copies

    def started(group: Any, sends: Any, recvs: Any, refused: Any) -> Any:
        nonlocal near
        near += len(sends) + len(recvs)
        return start(group, sends, recvs, refused)

    transport.start_copies = started
    commgrid.join()
    one, other = (commgrid.initialize(name=f"{first}", ranks=[first]) for first in (0, 1))
    held, wrong = torch.zeros(1024, 1024), []
    transfer = Transfer(
        {"w": held} if one else None, {"w": held[:, :]} if other else None,
        source_grid=one, target_grid=other, max_bytes=2**20,
    )  # fmt: skip
    for number in range(3):
        wanted = torch.arange(1024.0**2).view(1024, 1024) + number
        if one:  # what the stream has still to do when the transfer begins is waited for
            torch.cuda._sleep(20_000_000)
            held.copy_(wanted)
        transfer.run(verify=True)
        wrong.append(int((held != wanted).sum()))
    transfer.close()
    commgrid.shutdown()
    return wrong, near


def test_two_ranks_of_one_gpu_move_weights_through_its_memory() -> None:
    """As NCCL does not: it knows that both are on one host."""
    found = programs_on_gpus(through_one_gpu, 2, environ={"NCCL_SOCKET_IFNAME": "lo"})
    for wrong, near in found:
        assert wrong == [0, 0, 0]
        assert near > 0


def bridged(rank: int) -> float:
    """How far the encoder's gradient is from that of one process."""
    torch.set_default_device("cuda")
    encoder = commgrid.initialize(name="encoder", ranks=range(2))
    model = commgrid.initialize(name="model", ranks=range(1, 4))
    bridge = Bridge(encoder, model, dim=0, startup_timeout=60.0)
    drawn = torch.Generator("cuda").manual_seed(0)
    images, scale = (torch.randn(7, n, generator=drawn, dtype=torch.float64) for n in (4, 8))
    start = torch.randn(4, 8, generator=drawn, dtype=torch.float64)

    weight = start.clone().requires_grad_()
    (torch.tanh(images @ weight) * scale).sum().backward()
    assert weight.grad is not None
    wanted = weight.grad.clone()

    mine = start.clone().requires_grad_()
    part = images.tensor_split(2)[rank] if encoder else None
    crossed: Tensor | None = bridge(None if part is None else torch.tanh(part @ mine))
    assert crossed is not None
    if model:
        own = scale.tensor_split(3)[rank - 1]
        assert crossed.shape == own.shape
        loss = (crossed * own).sum()
    else:
        loss = crossed
    loss.backward()
    off = 0.0
    if encoder:
        assert mine.grad is not None
        torch.distributed.all_reduce(mine.grad, group=encoder.get_group("dp"))
        off = float((mine.grad - wanted).abs().max())
    commgrid.shutdown()
    return off


def test_gradients_go_back_over_a_bridge() -> None:
    assert max(programs_on_gpus(bridged, 4)) <= 1e-12
