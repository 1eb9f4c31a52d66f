"""train_gpt --survive: when ranks fail, the others go on, in the same processes."""

from __future__ import annotations

import argparse
import copy
import gc
import time
from collections.abc import Mapping
from functools import partial

import commgrid
from commgrid.runtime.named_failures import named_failures
from gpt_training.log import Log
from gpt_training.trainer import Trainer, own_device

FAILURES = (commgrid.PeerFailedError, commgrid.PeerTimeoutError)
"""What others' failures are on this rank; its own are other errors, and end it."""


def survive(args: argparse.Namespace, log: Log | None = None) -> tuple[Trainer, Log, int] | None:
    """Takes part in the next grid over the ranks that are left.

    Args:
        args: the flags.
        log: None on a rank that has had no part in a grid.

    Returns:
        The trainer, the log, and the step that is done; None: there is no place, or no job any
        more.
    """
    started = time.perf_counter()
    gc.collect()  # the trainer before
    while True:
        grid = rebuilt(args)
        if grid is None:
            return None
        try:
            with named_failures(grid, lambda: "recovering"):
                trainer = Trainer(cut_as(grid, args), grid)
                found = commgrid.recover(
                    args.save, trainer.chunks, trainer.optimizer, progress=False
                )
        except FAILURES:  # one more
            continue
        trainer.go_on_from(found.step)
        log = log or Log(args, grid, own_device())
        log.survived(grid, found, time.perf_counter() - started)
        return trainer, log, found.step


def rebuilt(args: argparse.Namespace) -> commgrid.HyperCommGrid | None:
    """The next grid; a rank that comes too late waits for a place in the one after it."""
    try:
        return commgrid.rebuild(fits=partial(can_train, args))
    except commgrid.PeerTimeoutError:
        return commgrid.rebuild(fits=partial(can_train, args))


def can_train(args: argparse.Namespace, sizes: Mapping[str, int]) -> bool:
    """Whether batch and layers can be shared out over a grid of these sizes."""
    data = sizes.get("dp", 1) * sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1)
    share, rest = divmod(args.batch_size, data)
    turns = args.microbatches % sizes["pp"] == 0 if args.chunks > 1 else True
    return (
        rest == 0
        and share % args.microbatches == 0
        and args.layers >= sizes["pp"] * args.chunks
        and turns
    )


def cut_as(grid: commgrid.HyperCommGrid, args: argparse.Namespace) -> argparse.Namespace:
    """The flags of the same job on a grid that has shrunk."""
    flags = copy.copy(args)
    flags.pp, flags.dp = grid.size("pp"), grid.size("dp")
    flags.dp_replicate = grid.shape.get("dp_replicate", 1)
    return flags
