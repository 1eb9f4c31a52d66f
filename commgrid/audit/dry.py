"""The collectives of one step of a large job, recorded without the job: a rank after the other.

Each rank is a process of its own, in a fake world of as many ranks as are asked for, in
which every other is taken to have the same data. So calls that depend on other ranks' data differ
from those of the job: how many tokens a rank's experts get, and decisions from received data.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules import module as torch_modules
from torch.optim import optimizer as torch_optimizers

from commgrid.errors import CommGridError, SpecError
from commgrid.launching.local_ranks import Ranks
from commgrid.launching.script import may_exit
from commgrid.planning.audited import VARIABLE, AuditedGrid
from commgrid.recording import recorder
from commgrid.torch_compat import fake as torch_fake
from commgrid.torch_compat import world as torch_world


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
    run: Callable[[], object],
    name: str,
    grid: AuditedGrid,
    folder: Path,
    *,
    ranks: Sequence[int] | None = None,
    timeout: float = 600.0,
) -> Dry:
    """Record what ranks issue until they have taken one step or have ended, each by itself.

    Args:
        run: the program, which each rank calls in a process of its own.
        name: of it, for messages.
        grid: of the job.
        folder: where `rank_00003.ring` of each is left, for `commgrid verify` and `commgrid trace`.
        ranks: which are recorded; None: all.
        timeout: seconds for all of them.

    Raises:
        SpecError: there is no such rank, or the folder cannot be made.
        CommGridError: the program failed on a rank, before its first step was over.
    """
    chosen = list(range(grid.world_size)) if ranks is None else list(ranks)
    if wrong := [rank for rank in chosen if not 0 <= rank < grid.world_size]:
        raise SpecError(
            f"rank {wrong[0]}: the job has ranks 0-{grid.world_size - 1}; name some of these"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(f"-o {folder}: cannot be made: {error.strerror or error}") from error
    absent = {*range(grid.world_size)} - {*chosen}
    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", VARIABLE: grid.variable}
    with tempfile.TemporaryDirectory(prefix="commgrid-dry-") as temporary:
        beside = Path(temporary)
        with Ranks(
            _rank, grid.world_size, grid.world_size, chosen, run, folder, beside,
            backend=None, launcher="torchrun", environ=alone, absent=absent, timeout=timeout,
            at_once=os.cpu_count(), output=beside,
        ) as processes:  # fmt: skip
            processes.wait()
        for end in processes.failures():
            if end.late:
                raise CommGridError(
                    f"rank {end.rank} of {grid.text!r} has not done a step in {timeout:g} s, and "
                    "was killed; give it a smaller one, fewer ranks, or a longer --timeout; it "
                    f"printed{end.last_lines}"
                )
            raise CommGridError(
                f"rank {end.rank} ended with {end.end} before its first step was over; it "
                f"printed{end.last_lines}"
            )
        noted = {rank: beside / f"calls_{rank}" for rank in chosen}
        if left := [rank for rank, path in noted.items() if not path.exists()]:
            raise CommGridError(
                f"rank {left[0]} of {grid.text!r} ended by os._exit(0) before its first step was "
                "over, and its calls are lost; end the program by a return or sys.exit"
            )
        counts = [int(path.read_text()) for path in noted.values()]
    return Dry(name, grid.text, grid.world_size, len(chosen), sum(counts), str(folder))


def _rank(
    world_size: int, chosen: Sequence[int], run: Callable[[], object], folder: Path, beside: Path
) -> None:
    """One rank's process: the program, until it begins a second step or ends."""
    rank = int(os.environ["RANK"])
    torch_world.start_fake_world(rank, world_size)
    torch_fake.pretend(beside, {other for other in chosen if other < rank})
    records = recorder.start()
    records.set_job(f"dry {beside.name}")
    records.set_rank(rank)
    noted = beside / f"calls_{rank}"

    def note() -> None:
        records.save(folder)
        noted.write_text(str(records.ring.calls))

    _after_updates(note)
    try:
        with may_exit():
            run()
    except BaseException:
        if not noted.exists():
            raise
    if not noted.exists():
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
