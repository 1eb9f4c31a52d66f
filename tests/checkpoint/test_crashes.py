"""Killed at any moment of a save, a job finds its last complete checkpoint."""

import contextlib
import os
import random
import signal
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import commgrid
from commgrid import checkpoint
from commgrid.testing import RanksFailed, run_on_ranks
from tests.sizes import full


class Weights(nn.Module):
    """Enough for some milliseconds of writing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(300_000)) for _ in "ab")


def set_to(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Weights and state that say of which step they are."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for state in optimizer.state.values():
        state["exp_avg"].fill_(step)


def is_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> bool:
    tensors = [*model.parameters(), *(state["exp_avg"] for state in optimizer.state.values())]
    return len(tensors) == 4 and all(bool((tensor == step).all()) for tensor in tensors)


def go_on(folder: str, delay: float | None) -> int:
    """Resumes, checks, and saves one step after the other until it is killed; None: just once."""
    commgrid.initialize()
    model = Weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    step = 0
    if checkpoint.steps(folder):
        step = checkpoint.load(folder, model, optimizer, progress=False).step
        assert is_of(model, optimizer, step), step
    while True:
        step += 1
        set_to(model, optimizer, step)
        # Every third is saved twice, which replaces it.
        for _ in range(2 if step % 3 == 0 else 1):
            checkpoint.save(folder, step, model, optimizer, keep=2, progress=False)
        if delay is None:
            break
        if threading.active_count() == 1 or not hasattr(go_on, "timer"):
            timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
            go_on.timer = timer  # type: ignore[attr-defined]
            timer.daemon = True
            timer.start()
    commgrid.shutdown()
    return step


@pytest.mark.nightly
def test_killed_at_any_moment(tmp_path: Path) -> None:
    moments = random.Random(0)
    halves, last = 0, 0
    for _ in range(20 if full() else 8):
        with contextlib.suppress(RanksFailed):
            run_on_ranks(
                go_on,
                2,
                str(tmp_path),
                moments.uniform(0.0, 0.3),
                backend=None,
                launcher="torchrun",
            )
            pytest.fail("the ranks were to be killed")
        found = checkpoint.steps(tmp_path)
        assert found, "no checkpoint"
        assert found[-1] > last  # each round has saved one more, at least
        last = found[-1]
        halves += any(path.name.startswith(".step") for path in tmp_path.iterdir())
    assert halves  # some moments were in the middle of a save
    (step, _) = run_on_ranks(go_on, 2, str(tmp_path), None, backend=None, launcher="torchrun")
    assert step == last + 1
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [f"step_{n:08}" for n in checkpoint.steps(tmp_path)]  # halves are cleared away
    assert len(left) == 2


def between_renames(folder: str) -> list[int]:
    """The crash that leaves neither name: the replaced one counts, and gets its name back."""
    commgrid.initialize()
    model = nn.Linear(2, 2)
    checkpoint.save(folder, 7, model, progress=False)
    runs = Path(folder)
    (runs / "step_00000007").rename(runs / ".step_00000007.replaced")
    (runs / ".step_00000009.deleted").mkdir()
    found = [*checkpoint.steps(folder), checkpoint.load(folder, model, progress=False).step]
    checkpoint.save(folder, 8, model, progress=False)
    commgrid.shutdown()
    assert sorted(path.name for path in runs.iterdir()) == ["step_00000007", "step_00000008"]
    return found


def test_a_crash_between_two_renames(tmp_path: Path) -> None:
    assert run_on_ranks(between_renames, 1, str(tmp_path), backend=None) == [[7, 7]]
