"""Saves beside training: the state of the step that began them, whole or absent, errors told."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import warnings
import zlib
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.planner import SavePlan

import commgrid
from commgrid import CommGridError, checkpoint
from commgrid.checkpoint import background, saving
from commgrid.checkpoint.background import SPARES, tensors_of
from commgrid.checkpoint.writer import Written
from commgrid.collectives.objects import gathered
from commgrid.layout.rank_text import describe_ranks
from commgrid.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from commgrid.testing import RanksFailed, run_on_ranks
from tests.killing import KILLED, kill_me, run_killable
from tests.sizes import full
from tests.waiting import until


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
    """Return what is loaded after the model changed while the save was under way."""
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
    """Equal to the last bit to a save that waits."""
    run_on_ranks(changed_meanwhile, 4, str(tmp_path), backend=None, launcher="torchrun")


def staged_sizes(folder: str, way: str) -> int:
    """Bytes that a save in the background copies of a model that all ranks have."""
    commgrid.initialize()
    model = nn.Linear(32, 32, bias=False)
    nn.init.ones_(model.weight)
    sizes: list[int] = []
    stage = saving.stage

    def seen(*given: Any) -> Any:
        staged = stage(*given)
        sizes.append(sum(each.nbytes for each in tensors_of(staged)))
        return staged

    saving.stage = seen
    checkpoint.save(folder, 1, model, copies=way, background=True, progress=False)
    commgrid.shutdown()
    return sizes[0]


@pytest.mark.parametrize("way", ["compare", "first"])
def test_memory_is_this_ranks_part(way: str, tmp_path: Path) -> None:
    """Of two ranks one writes the weight."""
    found = run_on_ranks(staged_sizes, 2, str(tmp_path), way, backend=None, launcher="torchrun")
    assert sorted(found) == [0, 32 * 32 * 4]


def copied_again(folder: str) -> tuple[bool, int]:
    """Whether a model's second save took the memory of its first; what is left at the end."""
    commgrid.initialize(tp=2)
    model, optimizer = block()
    used: list[set[int]] = []
    stage = saving.stage

    def seen(*given: Any) -> Any:
        staged = stage(*given)
        used.append({each.data_ptr() for each in tensors_of(staged)})
        return staged

    saving.stage = seen
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
    return used[0] == used[1], sum(map(len, SPARES._free.values()))


def test_the_next_copy_takes_the_memory_of_the_last(tmp_path: Path) -> None:
    for again, left in run_on_ranks(
        copied_again, 2, str(tmp_path), backend=None, launcher="torchrun"
    ):
        assert again
        assert left == 0


def disk_full(folder: str, who: list[int]) -> dict[str, str]:
    grid = commgrid.initialize()
    model = nn.Linear(4, 4)
    nn.init.ones_(model.weight), nn.init.zeros_(model.bias)
    if grid.rank in who:

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
        assert os.listdir(folder) == []
        torch.distributed.barrier()
    checkpoint.save(folder, 5, model, progress=False)  # it is told once
    assert checkpoint.steps(folder) == [5]
    assert sorted(os.listdir(folder)) == ["step_00000005"]
    commgrid.shutdown()
    return told


@pytest.mark.parametrize("who", [[0], [2], [0, 1, 2]], ids=describe_ranks)
@pytest.mark.full("ranks 0-2")
def test_a_full_disk_is_told_on_all_ranks_at_the_next_call(who: list[int], tmp_path: Path) -> None:
    for told in run_on_ranks(disk_full, 3, str(tmp_path), who, backend=None, launcher="torchrun"):
        for text in told.values():
            assert text.startswith("CheckpointError: ")
            said = f"step 3 was not saved to {tmp_path} in the background: "
            assert f"{describe_ranks(who)}: {said}" in text
            assert "OSError: [Errno 28] No space left on device" in text
        assert told["save"].startswith(f"CheckpointError: step 4 was not saved to {tmp_path}: ")
        assert told["load"].startswith("CheckpointError: nothing was loaded: ")


def beside_another_grid(folder: str) -> list[list[int]]:
    """An actor on two ranks saves; the first then saves a reward model, before the other ends."""
    actor = commgrid.initialize(name="actor")
    reward = commgrid.initialize(name="reward", ranks=[0]) if actor.rank == 0 else None
    model, flags = nn.Linear(4, 4), torch.distributed.FileStore(f"{folder}/flags", 2)
    nn.init.ones_(model.weight), nn.init.zeros_(model.bias)
    if reward is None:
        write = background.write

        def late(*given: Any) -> Any:
            flags.wait(["reward saved"], timedelta(seconds=60))
            return write(*given)

        background.write = late  # type: ignore[assignment]
    checkpoint.save(f"{folder}/actor", 1, model, background=True, progress=False, grid=actor)
    if reward is not None:
        checkpoint.save(f"{folder}/reward", 2, model, progress=False, grid=reward)
        checkpoint.save(f"{folder}/reward", 3, model, background=True, progress=False, grid=reward)
        checkpoint.wait(grid=reward)
        assert checkpoint.load(f"{folder}/reward", model, progress=False, grid=reward).step == 3
        assert checkpoint.steps(f"{folder}/actor") == []
        flags.set("reward saved", "yes")
    checkpoint.wait(grid=actor)
    found = [checkpoint.steps(f"{folder}/{name}") for name in ("actor", "reward")]
    commgrid.shutdown()
    return found


def test_a_save_of_another_grid_is_not_taken_for_a_failed_one(tmp_path: Path) -> None:
    assert run_on_ranks(beside_another_grid, 2, str(tmp_path)) == [[[1], [2, 3]]] * 2


def files_too_long(folder: str, in_background: bool) -> str:
    """A file system takes no more bytes while torch writes, which then finds another position."""
    grid = commgrid.initialize()
    model = nn.Linear(200, 200)
    nn.init.ones_(model.weight), nn.init.zeros_(model.bias)
    if grid.rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, most[1]))

    def save() -> None:
        checkpoint.save(folder, 1, model, background=in_background, progress=False)
        checkpoint.wait()

    told = raised(save)
    if grid.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    commgrid.shutdown()
    return told


@pytest.mark.parametrize("in_background", [False, True], ids=["at once", "in background"])
def test_what_the_file_system_says_comes_first(in_background: bool, tmp_path: Path) -> None:
    given = files_too_long, 2, str(tmp_path), in_background
    for told in run_on_ranks(*given, backend=None, launcher="torchrun"):
        assert "rank 1: " in told
        assert f"OSError: [Errno 27] File too large: '{tmp_path}" in told
        assert "unexpected pos" not in told
    assert os.listdir(tmp_path) == []


def copies_differ(folder: str) -> str:
    grid = commgrid.initialize()
    model = nn.Linear(4, 4)
    nn.init.ones_(model.weight), nn.init.zeros_(model.bias)
    with torch.no_grad():
        model.weight[0, 0] += grid.rank == 2
    checkpoint.save(folder, 1, model, copies="first", background=True, progress=False)
    return raised(checkpoint.save, folder, 2, model, background=True, progress=False)


def test_copies_that_differ_are_refused_by_the_call(tmp_path: Path) -> None:
    for told in run_on_ranks(copies_differ, 3, str(tmp_path), backend=None, launcher="torchrun"):
        assert "model.weight differs between rank 2 and ranks 0-1 of group" in told
    assert os.listdir(tmp_path) == ["step_00000001"]


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


def threads_left(folder: str) -> list[str]:
    commgrid.initialize()
    for step in range(1, 4):
        checkpoint.save(folder, step, nn.Linear(4, 4), background=True, progress=False)
    checkpoint.wait()
    commgrid.shutdown()
    return [each.name for each in threading.enumerate() if each.name.startswith("commgrid-")]


def test_no_thread_is_left(tmp_path: Path) -> None:
    assert run_on_ranks(threads_left, 1, str(tmp_path), backend=None, launcher="torchrun") == [[]]


def ends_early(folder: str) -> None:
    """Rank 0's program is over before rank 1 has begun to write."""
    grid = commgrid.initialize()
    model = nn.Linear(4, 4)
    nn.init.ones_(model.weight), nn.init.zeros_(model.bias)
    go = held() if grid.rank == 1 else None
    checkpoint.save(folder, 1, model, background=True, progress=False)
    pids = gathered(os.getpid(), grid.get_group("dp"))
    commgrid.shutdown()
    if go is not None:
        until(lambda: not Path(f"/proc/{pids[0]}").exists(), "the end of rank 0")
        go.set()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="processes are looked up in /proc")
def test_the_last_rank_completes_it_whichever_it_is(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    code = f"from tests.checkpoint.test_background import ends_early; ends_early({str(tmp_path)!r})"
    subprocess.run([*command, "--no-python", sys.executable, "-c", code], check=True, timeout=120)
    assert os.listdir(tmp_path) == ["step_00000001"]


def dies_while_writing(folder: str) -> tuple[list[int], str]:
    """Rank 1 dies in a save in the background; the others rebuild, and save again."""
    grid = commgrid.initialize(timeout=60.0)
    assert grid is not None
    model = nn.Linear(4, 4)
    nn.init.ones_(model.weight), nn.init.zeros_(model.bias)
    checkpoint.save(folder, 1, model, progress=False)
    if grid.rank == 1:
        background.write = lambda *_: kill_me()  # type: ignore[assignment]
    checkpoint.save(folder, 2, model, background=True, progress=False)
    with contextlib.suppress(RuntimeError):
        while True:
            dist.barrier(grid.get_group("dp"))
    assert commgrid.rebuild() is not None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert commgrid.recover(folder, model, progress=False).step == 1
        checkpoint.save(folder, 2, model, progress=False)
    commgrid.shutdown()
    return checkpoint.steps(folder), " ".join(str(each.message) for each in told)


def test_a_rank_that_died_keeps_nobody_waiting(tmp_path: Path) -> None:
    first, gone, last = run_killable(dies_while_writing, 3, str(tmp_path))
    assert (gone, first[0], last[0]) == (KILLED, [1, 2], [1, 2])
    assert f"step 2 was not saved to {tmp_path} in the background: rank 1 ended" in first[1]
    assert sorted(os.listdir(tmp_path)) == ["step_00000001", "step_00000002"]


def writes_elsewhere(folder: str) -> list[str]:
    """Rank 1 writes to a disk of its own, as where nodes do not share the folder."""
    grid = commgrid.initialize()
    model = nn.Linear(4, 4)
    nn.init.ones_(model.weight), nn.init.zeros_(model.bias)
    if grid.rank == 1:
        init = background.BackgroundSave.__init__

        def elsewhere(self: Any, partial: Path, *more: Any) -> None:
            own = Path(folder, "of rank 1", partial.name)
            own.mkdir(parents=True)
            init(self, own, *more)

        background.BackgroundSave.__init__ = elsewhere  # type: ignore[method-assign]
    checkpoint.save(folder, 1, model, background=True, progress=False)
    told = [raised(checkpoint.wait), raised(checkpoint.wait)]
    commgrid.shutdown()
    return told


def test_a_folder_that_is_not_shared_is_told(tmp_path: Path) -> None:
    for once, twice in run_on_ranks(
        writes_elsewhere, 2, str(tmp_path), backend=None, launcher="torchrun"
    ):
        assert "rank 1 wrote, but not where this rank looks; save to a folder on a file" in once
        assert twice == "nothing"


def seen_late(folder: str) -> tuple[list[int], list[int]]:
    """No rank sees the others' files in time, as on some network file systems."""
    commgrid.initialize()
    model = nn.Linear(4, 4)
    nn.init.ones_(model.weight), nn.init.zeros_(model.bias)
    missing = background.BackgroundSave._missing
    background.BackgroundSave._missing = lambda self: [0]  # type: ignore[method-assign]
    checkpoint.save(folder, 1, model, background=True, progress=False)
    background._under_way[0]._thread.join()
    before = checkpoint.steps(folder)
    background.BackgroundSave._missing = missing  # type: ignore[method-assign]
    checkpoint.wait()
    after = checkpoint.steps(folder)
    commgrid.shutdown()
    return before, after


def test_files_that_are_seen_late_make_a_checkpoint_at_the_next_call(tmp_path: Path) -> None:
    found = run_on_ranks(seen_late, 2, str(tmp_path), backend=None, launcher="torchrun")
    assert found == [([], [1])] * 2


def two_ends(folder: Path, failed: bool) -> list[background.BackgroundSave]:
    """Two ranks that have written to a folder, or failed to, and are both about to end it."""
    partial = folder / ".step_00000001.ab12.partial"
    partial.mkdir()
    grid = SimpleNamespace(spec=SimpleNamespace(grid_ranks=(0, 1)), rank=0)
    ends = [
        background.BackgroundSave(partial, 1, None, [], cast(Any, grid), print, None, True)
        for _ in range(2)
    ]
    for number, each in enumerate(ends):
        each._told(number, failed).touch()
    return ends


@pytest.mark.parametrize("failed", [True, False])
def test_one_rank_ends_it(failed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one deletes or completes the folder, the other finds nothing to do."""
    one, other = two_ends(tmp_path, failed)
    other._missing = lambda: []  # type: ignore[method-assign]
    found = dict.fromkeys((0, 1), Written(SavePlan([]), [], {}, zlib.compress(b""), {}))
    monkeypatch.setattr(background, "read_written", lambda path: found[0])

    def meanwhile(first: Any) -> Any:
        def both(at: Path, *given: Any, **options: Any) -> Any:
            for path in at.iterdir():  # as far as the first has come
                if path.name != ".metadata":
                    path.unlink() if path.is_file() else path.rmdir()
            other._end()
            return first(at, *given, **options)

        return both

    monkeypatch.setattr(background, "remove_tree", meanwhile(shutil.rmtree))
    monkeypatch.setattr(background.folders, "end", meanwhile(background.folders.end))
    one._end()
    assert os.listdir(tmp_path) == ([] if failed else ["step_00000001"])
    assert failed or os.listdir(tmp_path / "step_00000001") == [".metadata"]


@pytest.mark.parametrize("failed", [True, False])
def test_a_rank_that_looks_while_another_ends_it(
    failed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder has another name by the time that its files are listed."""
    one, other = two_ends(tmp_path, failed)
    partial, ways = one._partial, (os.listdir, os.scandir)

    def late(lists: Any) -> Any:
        def listed(at: Any) -> Any:
            if Path(at) == partial:
                assert one._claim()
            return lists(at)

        return listed

    for lists in ways:
        monkeypatch.setattr(os, lists.__name__, late(lists))
    other._end()
    assert os.listdir(tmp_path) == [one._ending.name]


def saves_until_killed(folder: str, delay: float) -> None:
    commgrid.initialize()
    model = nn.Linear(300, 1000, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = 0
    if checkpoint.steps(folder):
        step = checkpoint.load(folder, model, optimizer, progress=False).step
        assert bool((model.weight == step).all())
    else:  # however busy the machine is
        step = 1
        nn.init.constant_(model.weight, step)
        checkpoint.save(folder, step, model, optimizer, progress=False)
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
