"""The collectives of one step of a large job, recorded without the job: a rank after the other.

Each rank is a process forked from this one, in a fake world of as many ranks as are asked for, in
which every other is taken to have the same data. So calls that depend on other ranks' data differ
from those of the job: how many tokens a rank's experts get, and decisions from received data.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules import module as torch_modules
from torch.optim import optimizer as torch_optimizers

from commgrid.errors import CommGridError, SpecError
from commgrid.planning.audited import VARIABLE, AuditedGrid
from commgrid.recording import recorder
from commgrid.torch_compat import fake as torch_fake
from commgrid.torch_compat import world as torch_world

_LINES = 12


@dataclass(frozen=True)
class Dry:
    """A summary of the records.

    Args:
        script: the program.
        grid: its sizes.
        world_size: ranks of the job.
        ranks: that were recorded.
        calls: collectives and halves of transfers, of all of them.
        folder: where their records are.
    """

    script: str
    grid: str
    world_size: int
    ranks: int
    calls: int
    folder: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def dry(
    script: Path,
    grid: AuditedGrid,
    flags: Sequence[str],
    folder: Path,
    *,
    ranks: Sequence[int] | None = None,
    timeout: float = 600.0,
) -> Dry:
    """Records what ranks issue until they have taken one step or have ended, each by itself.

    Args:
        script: the program.
        grid: of the job; its program's flags follow `flags`.
        flags: of the program.
        folder: where `rank_00003.json` of each is left, for `commgrid verify` and `commgrid trace`.
        ranks: which are recorded; None: all.
        timeout: seconds for all of them.

    Raises:
        SpecError: there is no such program, or rank.
        CommGridError: the program failed on a rank, before its first step was over.
    """
    if not script.is_file():
        raise SpecError(f"{script}: there is no such program")

    def run() -> None:
        sys.argv = [str(script), *flags, *grid.flags]
        sys.path.insert(0, str(script.resolve().parent))
        runpy.run_path(str(script), run_name="__main__")

    return record(run, script.name, grid, folder, ranks=ranks, timeout=timeout)


def record(
    run: Callable[[], object],
    name: str,
    grid: AuditedGrid,
    folder: Path,
    *,
    ranks: Sequence[int] | None,
    timeout: float,
) -> Dry:
    """As `dry`, of a function.

    Args:
        run: what each rank does, in a process of its own.
        name: of it, for messages.
        grid, folder, ranks, timeout: as there.
    """
    chosen = list(range(grid.world_size)) if ranks is None else list(ranks)
    if wrong := [rank for rank in chosen if not 0 <= rank < grid.world_size]:
        raise SpecError(f"rank {wrong[0]}: the job has ranks 0-{grid.world_size - 1}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(f"-o {folder}: cannot be made: {error.strerror or error}") from error
    context = multiprocessing.get_context("fork")
    waiting = chosen[::-1]
    running: dict[int, Any] = {}
    until = time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="commgrid-dry-") as beside:
        try:
            while waiting or running:
                while waiting and len(running) < max(os.cpu_count() or 1, 1):
                    rank = waiting.pop()
                    earlier = chosen[: len(chosen) - len(waiting) - 1]
                    job = (rank, earlier, grid, run, folder, Path(beside))
                    running[rank] = context.Process(target=_rank, args=job)
                    running[rank].start()
                for rank, process in list(running.items()):
                    if process.exitcode is not None:
                        del running[rank]
                        _check(rank, process.exitcode, folder, Path(beside))
                if running and time.monotonic() > until:
                    late = min(running)
                    os.kill(running[late].pid, signal.SIGABRT)  # faulthandler writes its stack
                    running[late].join(5)
                    raise CommGridError(
                        f"rank {late} of {grid.text!r} has not done a step in {timeout:g} s, and "
                        "was killed; give it a smaller one, fewer ranks, or a longer --timeout; it "
                        f"printed{_printed(late, Path(beside))}"
                    )
                time.sleep(0.005)
        finally:
            for process in running.values():
                process.kill()
                process.join()
        counts = [int((Path(beside) / f"calls_{rank}").read_text()) for rank in chosen]
    return Dry(name, grid.text, grid.world_size, len(chosen), sum(counts), str(folder))


def _check(rank: int, code: int, folder: Path, beside: Path) -> None:
    """Refuses a rank that has left no record."""
    if (beside / f"calls_{rank}").exists():
        return
    raise CommGridError(
        f"rank {rank} ended with exit code {code} before its first step was over; it "
        f"printed{_printed(rank, beside)}"
    )


def _printed(rank: int, beside: Path) -> str:
    """The last lines of a rank's output; or the inmost of the stack that it wrote at a signal."""
    lines = (beside / f"output_{rank}.txt").read_text(errors="replace").splitlines()
    stacks = [at for at, line in enumerate(lines) if line.startswith("Fatal Python error")]
    shown = lines[stacks[-1] :][:_LINES] if stacks else lines[-_LINES:]
    return "".join(f"\n    {line}" for line in shown)


def _rank(
    rank: int,
    earlier: list[int],
    grid: AuditedGrid,
    run: Callable[[], object],
    folder: Path,
    beside: Path,
) -> None:
    """One rank's process: the program, until it begins a second step or ends."""
    gc.freeze()  # what the parent has dropped, such as a store, cannot be destroyed without threads
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the command's own handler is not the program's
    torch.set_num_threads(1)  # a forked child hangs in its parent's OpenMP threads otherwise
    output = os.open(beside / f"output_{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    os.environ.update(
        {
            VARIABLE: grid.variable, "RANK": str(rank), "WORLD_SIZE": str(grid.world_size),
            "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost",
            "MASTER_PORT": "1",
        }
    )  # fmt: skip
    faulthandler.enable(sys.stderr, all_threads=False)
    torch_world.start_fake_world(rank, grid.world_size)
    torch_fake.pretend(beside, earlier)
    records = recorder.start()
    records.job = f"dry {beside.name}"
    records.set_rank(rank)

    def note() -> None:
        records.save(folder)
        (beside / f"calls_{rank}").write_text(str(records.ring.calls))

    _after_updates(note)
    try:
        run()
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    if not (beside / f"calls_{rank}").exists():
        note()  # a program without an optimizer: all of it


def _after_updates(note: Callable[[], object]) -> None:
    """Calls it after each update of the first step, and ends the process when the next begins.

    Up to there all ranks are alike: the start of the next step, such as the receives of a stage,
    would be without the sends of the stage before it.
    """
    depth = [0, 0]  # of optimizers within each other, and updates

    def before(*_: Any) -> None:
        depth[0] += 1

    def after(*_: Any) -> None:
        depth[0] -= 1
        if not depth[0]:
            depth[1] += 1
            note()

    def forward(*_: Any) -> None:
        if depth[1] and torch.is_grad_enabled():
            sys.stdout.flush()
            os._exit(0)

    torch_optimizers.register_optimizer_step_pre_hook(before)
    torch_optimizers.register_optimizer_step_post_hook(after)
    hook: Any = forward
    torch_modules.register_module_forward_pre_hook(hook)
