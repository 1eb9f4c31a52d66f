"""Train a small GPT on one grid, and let another grid generate with its weights every few steps.

    torchrun --standalone --nproc-per-node 4 examples/refit/one_program.py --tp 2 --generate tp=4
    torchrun --standalone --nproc-per-node 4 examples/refit/one_program.py --fsdp --generate pp=2
    torchrun --standalone --nproc-per-node 6 examples/refit/one_program.py --ranks 0-3 --tp 2 \\
        --generate tp=2,ranks=4-5

As in reinforcement learning: the grid that trains is cut for training, the one that generates for
generation, on the same ranks, on others or on some of both. `commgrid.transfer` moves the weights,
any cut to any other, and says what that takes. The first time they go through a checkpoint as well,
to compare. All of train_gpt's flags are of the grid that trains.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch.distributed as dist

import commgrid
from commgrid import GridSpec, checkpoint
from commgrid.collectives.objects import gathered
from commgrid.transfer import Transfer

sys.path.insert(0, str(Path(__file__).parents[1]))  # where gpt_training is
from gpt_training.checks import check_sizes
from gpt_training.data import Text, global_batch, read_text, split_text
from gpt_training.flag_types import positive
from gpt_training.flags import PROMPT, Add, last_words
from gpt_training.flags import parse as parse_flags
from gpt_training.grid import grid_arguments, make_grid
from gpt_training.log import axes_of, duration
from gpt_training.sample import generate
from gpt_training.trainer import Trainer


def own_flags(add: Add) -> None:
    add(
        "--generate",
        metavar="FLAGS",
        default="tp=1",
        help="the grid that generates: sizes as tp=4,pp=2, and ranks=4-7 (default tp=1, and the "
        "ranks that train)",
    )
    add(
        "--every",
        type=positive,
        metavar="N",
        default=10,
        help="steps between two times that weights go there (default 10)",
    )


def main(argv: list[str] | None = None) -> None:
    """The whole job on this rank."""
    args = parse_flags(argv, __doc__, own_flags)
    sides = {"default": args, "generating": args.generate}
    grids = {name: make_grid(flags, name) for name, flags in sides.items()}
    for name, flags in sides.items():  # on all ranks, whichever grid they are in
        spec = GridSpec.build(**grid_arguments(flags)).resolve(dist.get_world_size())
        flags.sample = flags.sample or PROMPT
        if name == "generating":  # which takes one text at a time
            flags.batch_size = spec.shape["dp"] * flags.microbatches
        check_sizes(flags, grids[name], spec)
    trainer, server = (build(flags, grids[name]) for name, flags in sides.items())
    say(f"trains     on {axes_of(trainer.grid)}" if trainer else "", trainer)
    say(f"generates  on {axes_of(server.grid)}" if server else "", server)
    refit(args, trainer, server, split_text(read_text(args.data, args.seq_len), args))
    commgrid.shutdown()


def build(flags: argparse.Namespace, grid: commgrid.HyperCommGrid | None) -> Trainer | None:
    """One side of the program; None on a rank that is not on it."""
    if grid is None:
        return None
    with commgrid.use_grid(grid):
        return Trainer(flags, grid)


def refit(
    args: argparse.Namespace, trainer: Trainer | None, server: Trainer | None, text: Text
) -> None:
    """All steps, and between them weights that go to the other grid, which then generates."""
    transfer: Transfer | None = None
    if trainer or server:
        transfer = Transfer(
            trainer.chunks if trainer else None,
            server.chunks if server else None,
            source_grid=trainer.grid if trainer else None,
            target_grid=server.grid if server else None,
        )
        say(f"{transfer.plan}", trainer)
    for step in range(1, args.steps + 1):
        loss = 0.0
        if trainer:
            loss, _ = trainer.step(step, global_batch(text.training, step, args))
        if step % args.every:
            continue
        say(f"step {step:4}  loss {loss:.4f}", trainer)
        through_disk = ""
        if step == args.every:
            took = timed(lambda: by_checkpoint(trainer, server, args))
            through_disk = f"; through a checkpoint {duration(took)}"
        took = timed(lambda: transfer and transfer.run())
        say(f"step {step:4}  weights moved in {1e3 * took:.0f} ms{through_disk}", trainer)
        if server:
            with commgrid.use_grid(server.grid):
                say(f"step {step:4}  {generate(server)!r}", server)


def timed(function: Callable[[], object]) -> float:
    """Seconds, until the last rank is done."""
    dist.barrier()
    started = time.perf_counter()
    function()
    dist.barrier()
    return time.perf_counter() - started


def by_checkpoint(
    trainer: Trainer | None, server: Trainer | None, args: argparse.Namespace
) -> None:
    """The same through a directory that all ranks see: --save's, or a temporary one."""
    first = dist.get_rank() == 0
    with tempfile.TemporaryDirectory() if first and not args.save else nullcontext("") as made:
        where = Path(gathered(args.save or made, dist.group.WORLD)[0]) / "refit"
        if trainer:
            checkpoint.save(where, 0, trainer.chunks, progress=False, grid=trainer.grid)
        dist.barrier()
        if server:
            checkpoint.load(where, server.chunks, progress=False, grid=server.grid)
        dist.barrier()


def say(text: str, side: Trainer | None) -> None:
    """Prints on the first rank of a side."""
    if side is not None and side.grid.get_local_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    try:
        main()
    except commgrid.CommGridError as error:
        sys.exit(last_words(error))
