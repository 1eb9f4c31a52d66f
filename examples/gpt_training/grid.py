"""train_gpt's grid: what its flags make of commgrid.initialize, and the move to another one."""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from typing import Any

import torch

import commgrid
from commgrid.transfer import Transfer
from gpt_training.log import Log
from gpt_training.sequences import split_of_cp
from gpt_training.trainer import Trainer


def grid_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """What --tp, --pp, … are of a grid, with the names that the model asks for."""
    groups: dict[str, Any] = split_of_cp(args)
    data = {"dp": args.dp}
    if args.tie_embeddings:
        groups["embedding"] = {"of": "pp", "pick": ["first", "last"]}
    if args.fsdp:
        groups["fsdp"] = "dp_shard_cp"
        shards = args.dp // args.dp_replicate if args.dp > 0 else -1
        data = {"dp_replicate": args.dp_replicate, "dp_shard": shards}
    # Over gloo, groups that all ranks have connected are those whose failures all hear of at once.
    connect = "all" if args.survive and not torch.cuda.is_available() else "axes"
    sizes = {"tp": args.tp, "cp": args.cp, "pp": args.pp, "ep": args.ep, "etp": args.etp}
    order = {"order": args.order} if args.order else {}
    return {
        **sizes, **data, **order, "groups": groups, "ranks": args.ranks, "connect": connect
    }  # fmt: skip


def make_grid(args: argparse.Namespace, name: str = "default") -> commgrid.HyperCommGrid | None:
    """The grid that trains; None on a spare rank."""
    watch = True if args.survive else None  # who is seen to end is not waited for
    return commgrid.initialize(**grid_arguments(args), name=name, timeout=args.timeout, watch=watch)


def switch(
    before: Trainer, args: argparse.Namespace, step: int, log: Log, in_use: ExitStack
) -> Trainer:
    """Goes on on another grid of the same processes; weights and optimizer state go there.

    Args:
        before: the trainer so far, which is not to be used any more.
        args: the flags of the steps that follow.
        step: the last one before.
        log: which is told.
        in_use: keeps the new grid the default one.
    """
    started = time.perf_counter()
    grid = make_grid(args, f"after step {step}")
    assert grid is not None  # on the ranks of the one before
    in_use.enter_context(commgrid.use_grid(grid))
    after = Trainer(args, grid)
    transfer = Transfer(
        before.chunks, after.chunks, source_grid=before.grid, target_grid=grid,
        optimizer=(before.optimizer, after.optimizer),
    )  # fmt: skip
    transfer.run()
    after.go_on_from(step)
    log.switched(step, grid, transfer.plan, time.perf_counter() - started)
    commgrid.destroy(before.grid.name)
    return after
