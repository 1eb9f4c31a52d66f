"""What train_gpt refuses before it trains: sizes that do not fit, and files it cannot write."""

from __future__ import annotations

import argparse
import importlib
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import commgrid
from commgrid.collectives import all_reduce
from gpt_training.flags import refuse
from gpt_training.grid import grid_arguments
from gpt_training.sequences import check_context


def check_switches(args: argparse.Namespace, grid: commgrid.HyperCommGrid) -> None:
    """Refuses grids of --switch that do not fit, before the first step."""
    for step, after in args.switches.items():
        try:
            spec = commgrid.GridSpec.build(**grid_arguments(after)).resolve(dist.get_world_size())
        except commgrid.SpecError as error:
            raise commgrid.SpecError(f"--switch after step {step}: {error}") from error
        check_sizes(after, grid, spec)


def check_sizes(
    args: argparse.Namespace, grid: commgrid.HyperCommGrid | None, spec: commgrid.GridSpec
) -> None:
    """Refuses sizes that a grid cannot share out, naming the flag.

    Args:
        args: of that grid.
        grid: whose first rank says it.
        spec: of the grid.
    """
    groups = commgrid.GroupPlan.for_rank(spec, spec.grid_ranks[0]).groups
    for flag, value, by in (
        ("--heads", args.heads, "tp"),
        ("--batch-size", args.batch_size, "dp"),
        ("--seq-len", args.seq_len if args.sequence_parallel else 0, "tp"),
        *(
            (("--experts", args.experts, "ep"), ("4 × --hidden =", 4 * args.hidden, "etp"))
            if args.experts
            else ()
        ),
    ):
        if value % len(groups[by]):
            refuse(
                f"{flag} {value} cannot be shared equally by the {len(groups[by])} ranks of {by}; "
                f"expected a multiple of {len(groups[by])}",
            )
    data = len(groups["dp"])
    share = args.batch_size // data
    if share % args.microbatches:
        refuse(
            f"--microbatches (--grad-accum) {args.microbatches} does not divide the {share} "
            f"sequences a step that each of the {data} ranks of dp has of --batch-size "
            f"{args.batch_size}; expected a divisor of {share}",
        )
    if args.layers < args.pp * args.chunks:
        refuse(
            f"--layers {args.layers} are fewer than --pp {args.pp} × --chunks {args.chunks} = "
            f"{args.pp * args.chunks} parts; expected a layer for each, or more",
        )
    check_context(args, grid)
    if args.experts and args.top_k > args.experts:
        refuse(f"--top-k {args.top_k} is more than --experts {args.experts}; give fewer")
    if args.hidden % args.heads:
        refuse(
            f"--hidden {args.hidden} is not a multiple of --heads {args.heads}; expected heads of "
            "one whole width",
        )


def check_files(
    args: argparse.Namespace, grid: commgrid.HyperCommGrid, device: torch.device
) -> None:
    """Refuses what the first rank could not write later; it says so, and all ranks end."""
    if not (args.metrics or args.save or args.tensorboard):
        return
    wrong = unwritable(args) if grid.get_local_rank() == 0 else None
    found = torch.tensor(float(wrong is not None), device=device)
    for group in ("tp", "dp_cp", "pp"):  # which training talks over as well
        found = all_reduce(found, group, op="max")
    if found.item():
        raise SystemExit(wrong or 1)


def unwritable(args: argparse.Namespace) -> str | None:
    """What is wrong with the files that this process is to write, in one line."""
    if args.tensorboard:
        try:
            importlib.import_module("torch.utils.tensorboard")
        except ImportError as error:
            return (
                f"--tensorboard {args.tensorboard}: TensorBoard is not installed here ({error}); "
                "pip install tensorboard, or leave the flag out"
            )
    for flag, folder in (("--save", args.save), ("--tensorboard", args.tensorboard)):
        if folder:
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder):
                    pass
            except OSError as error:
                return f"{flag} {folder}: cannot be written ({why(error)}); give another folder"
    if args.metrics:
        try:
            Path(args.metrics).parent.mkdir(parents=True, exist_ok=True)
            with Path(args.metrics).open("a"):
                pass
        except OSError as error:
            return f"--metrics {args.metrics}: cannot be written ({why(error)}); give another file"
    return None


def why(error: OSError) -> str:
    """What the system says; of a file where a folder is to be, that."""
    is_file = isinstance(error, FileExistsError | NotADirectoryError)
    return f"{error.filename} is no folder" if is_file else f"{error.strerror}"
