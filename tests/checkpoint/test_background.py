"""Saves beside training: the state of the step that began them, whole or absent, errors told."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commgrid
from commgrid import CheckpointError, CommGridError, checkpoint
from commgrid.checkpoint import background
from commgrid.checkpoint.items import Item
from commgrid.checkpoint.saving import _items, copies_of
from commgrid.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from commgrid.testing import RanksFailed, run_on_ranks
from tests.flags import hear, tell
from tests.sizes import full


def raised(call: Any, *args: Any, **keywords: Any) -> str:
    try:
        call(*args, **keywords)
    except CommGridError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def block() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(
        ColumnParallelLinear(8, 16), nn.LayerNorm(8), RowParallelLinear(16, 8), nn.Linear(8, 8)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def held(monkeypatched: Any = background) -> threading.Event:
    """Keeps this process's writer from writing until it is set."""
    go, write = threading.Event(), monkeypatched.write

    def late(*given: Any) -> Any:
        assert go.wait(60)
        return write(*given)

    monkeypatched.write = late
    return go


def changed_meanwhile(folder: str) -> list[Tensor]:
    """What is loaded after everything has changed while the save was under way."""
    commgrid.initialize(tp=2)
    model, optimizer = block()
    extra = {"tokens": 5, "state": {"seed": [1, 2]}}
    whole = checkpoint.save(folder + "/now", 7, model, optimizer, extra=extra, progress=False)
    go = held()
    path = checkpoint.save(
        folder + "/later", 7, model, optimizer, extra=extra, background=True, progress=False
    )
    assert path == Path(folder, "later", "step_00000007")
    assert checkpoint.steps(folder + "/later") == []
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(9.0)
        for state in optimizer.state.values():
            state["exp_avg"].fill_(9.0)
    extra["state"]["seed"].append(3)  # type: ignore[index]
    go.set()
    checkpoint.wait()
    assert checkpoint.steps(folder + "/later") == [7]
    assert sorted(os.listdir(path)) == sorted(os.listdir(whole))
    found = []
    for each in ("now", "later"):
        restored = checkpoint.load(f"{folder}/{each}", model, optimizer, progress=False)
        assert restored.extra == {"tokens": 5, "state": {"seed": [1, 2]}}
        tensors = [*model.parameters(), *(s["exp_avg"] for s in optimizer.state.values())]
        found.append([each.detach().clone() for each in tensors])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    commgrid.shutdown()
    return found[1]


def test_it_is_the_state_of_the_step_that_began_it(tmp_path: Path) -> None:
    """Equal to the last bit to what a save that waits has written."""
    run_on_ranks(changed_meanwhile, 4, str(tmp_path), backend=None, launcher="torchrun")


def staged_sizes(folder: str) -> tuple[int, int]:
    grid = commgrid.initialize()  # copies everywhere
    model = nn.Linear(32, 32, bias=False)
    nn.init.ones_(model.weight)
    sizes = []
    for way in ("compare", "first"):
        items = list(_items(grid, 1, model, None, {}))
        copies = copies_of(items, grid) if way == "compare" else []
        staged = background.stage(items, copies)
        tensors = {
            id(chunk.data): chunk.data.nbytes
            for item in staged.items
            if isinstance(item, Item)
            for chunk in item.chunks
        }
        tensors |= {id(each.tensor): each.tensor.nbytes for each, _ in staged.copies}
        sizes.append(sum(tensors.values()))
    commgrid.shutdown()
    return sizes[0], sizes[1]


def test_memory_is_one_copy_or_this_ranks_part(tmp_path: Path) -> None:
    found = run_on_ranks(staged_sizes, 2, str(tmp_path), backend=None, launcher="torchrun")
    assert [one for one, _ in found] == [32 * 32 * 4] * 2
    assert sum(first for _, first in found) == 32 * 32 * 4  # of two ranks one writes it


def copied_again(folder: str) -> tuple[bool, int]:
    """Whether a model's second save took the memory of its first; what is left at the end."""
    commgrid.initialize(tp=2)
    model, optimizer = block()
    used: list[set[int]] = []
    stage = background.stage

    def seen(*given: Any) -> background.Staged:
        staged = stage(*given)
        used.append({each.data_ptr() for each in staged.tensors()})
        return staged

    checkpoint.saving.stage = seen
    for step, wide in enumerate((8, 8, 16, 8)):  # another model lets go what does not fit
        if wide == 8:
            saved = model
        else:
            saved = nn.Sequential(ColumnParallelLinear(8, wide * 4), RowParallelLinear(wide * 4, 8))
        with torch.no_grad():
            for number, parameter in enumerate(saved.parameters()):
                parameter.fill_(step + number)
        state = optimizer if saved is model else None
        checkpoint.save(folder, step, saved, state, background=True, progress=False)
    checkpoint.wait()
    checkpoint.load(folder, model, optimizer, step=0, progress=False)
    for number, parameter in enumerate(model.parameters()):
        assert bool((parameter == number).all())
    commgrid.shutdown()
    return used[0] == used[1], sum(map(len, background.SPARES._free.values()))


def test_the_next_copy_takes_the_memory_of_the_last(tmp_path: Path) -> None:
    for again, left in run_on_ranks(
        copied_again, 2, str(tmp_path), backend=None, launcher="torchrun"
    ):
        assert again
        assert left == 0


def disk_full(folder: str, who: int) -> dict[str, str]:
    grid = commgrid.initialize()
    model = nn.Linear(4, 4)
    nn.init.ones_(model.weight), nn.init.zeros_(model.bias)
    if grid.rank == who:

        def write(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        background.write = write  # type: ignore[assignment]
    told = {}
    for then in ("save", "load", "wait"):
        checkpoint.save(folder, 3, model, background=True, progress=False)
        if then == "save":
            told[then] = raised(checkpoint.save, folder, 4, model, progress=False)
        elif then == "load":
            told[then] = raised(checkpoint.load, folder, model, progress=False)
        else:
            told[then] = raised(checkpoint.wait)
    checkpoint.save(folder, 5, model, progress=False)  # it is told once
    assert checkpoint.steps(folder) == [5]
    assert sorted(os.listdir(folder)) == ["step_00000005"]
    commgrid.shutdown()
    return told


@pytest.mark.parametrize("who", [0, 2])
def test_a_full_disk_is_told_on_all_ranks_at_the_next_call(who: int, tmp_path: Path) -> None:
    for told in run_on_ranks(disk_full, 3, str(tmp_path), who, backend=None, launcher="torchrun"):
        for text in told.values():
            assert text.startswith("CheckpointError: ")
            assert f"rank {who}: step 3 was not saved to {tmp_path} in the background: " in text
            assert "OSError: [Errno 28] No space left on device" in text
        assert told["save"].startswith(f"CheckpointError: step 4 was not saved to {tmp_path}: ")
        assert told["load"].startswith("CheckpointError: nothing was loaded: ")


def copies_differ(folder: str) -> tuple[str, list[int]]:
    grid = commgrid.initialize()
    model = nn.Linear(4, 4)
    nn.init.ones_(model.weight), nn.init.zeros_(model.bias)
    with torch.no_grad():
        model.weight[0, 0] += grid.rank == 2
    checkpoint.save(folder, 1, model, copies="first", background=True, progress=False)
    checkpoint.save(folder, 2, model, background=True, progress=False)
    return raised(checkpoint.wait), checkpoint.steps(folder)


def test_copies_that_differ_are_refused_in_the_background_too(tmp_path: Path) -> None:
    for told, steps in run_on_ranks(
        copies_differ, 3, str(tmp_path), backend=None, launcher="torchrun"
    ):
        assert "model.weight differs between rank 0 and rank 2" in told
        assert steps == [1]


def one_after_the_other(folder: str) -> list[int]:
    """Each call waits for the one before; the last is finished by the end of the process."""
    commgrid.initialize()
    model = nn.Linear(4, 4)
    nn.init.ones_(model.weight), nn.init.zeros_(model.bias)
    for step in range(1, 6):
        checkpoint.save(folder, step, model, background=True, keep=3, progress=False)
        names = [each.name for each in threading.enumerate()]
        assert sum(name.startswith("commgrid-save") for name in names) <= 1
    commgrid.shutdown()
    return checkpoint.steps(folder)


def test_at_most_one_is_under_way_and_the_last_is_not_lost(tmp_path: Path) -> None:
    for steps in run_on_ranks(
        one_after_the_other, 2, str(tmp_path), backend=None, launcher="torchrun"
    ):
        assert steps[:3] in ([2, 3, 4], [3, 4, 5])
    assert checkpoint.steps(tmp_path) == [3, 4, 5]


def lonely(folder: str) -> str:
    grid = commgrid.initialize(timeout=2.0)
    model = nn.Linear(4, 4)
    nn.init.ones_(model.weight), nn.init.zeros_(model.bias)
    if grid.rank == 1:
        held()  # for a minute
    checkpoint.save(folder, 1, model, background=True, progress=False)
    if grid.rank == 1:
        hear("rank 0 was told")
        os._exit(0)
    with pytest.raises(CheckpointError) as told:
        background.finish()
    tell("rank 0 was told")
    return str(told.value)


@pytest.mark.full
def test_a_rank_that_never_writes_is_named_within_the_grids_timeout(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_on_ranks(lonely, 2, str(tmp_path), backend=None, launcher="torchrun")
    assert "1 of 2 ranks failed" in str(failed.value)  # that one, which ended
    assert checkpoint.steps(tmp_path) == []


def saves_until_killed(folder: str, delay: float) -> None:
    commgrid.initialize()
    model = nn.Linear(300, 1000, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = 0
    if checkpoint.steps(folder):
        step = checkpoint.load(folder, model, optimizer, progress=False).step
        assert bool((model.weight == step).all())
    killer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
    killer.daemon = True
    killer.start()
    while True:
        step += 1
        with torch.no_grad():
            model.weight.fill_(step)
        checkpoint.save(folder, step, model, optimizer, keep=2, background=True, progress=False)
        with torch.no_grad():
            model.weight.fill_(-1.0)


def test_killed_at_any_moment_the_last_complete_one_loads(tmp_path: Path) -> None:
    moments = random.Random(0)
    last = 0
    for _ in range(20 if full() else 4):
        delay = moments.uniform(0.05, 0.3)
        with contextlib.suppress(RanksFailed):
            run_on_ranks(
                saves_until_killed, 2, str(tmp_path), delay, backend=None, launcher="torchrun"
            )
            pytest.fail("the ranks were to be killed")
        found = checkpoint.steps(tmp_path)
        assert not found or found[-1] >= last
        last = found[-1] if found else last
    assert last > 0
