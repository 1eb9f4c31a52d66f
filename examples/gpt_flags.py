"""train_gpt's flags: how they are typed or read from a file, and whether they fit the grid."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import yaml

import commgrid
from commgrid.pipeline.schedule import SCHEDULES
from commgrid.planning.names import nearest

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def parse(argv: list[str] | None, description: str | None) -> argparse.Namespace:
    """The flags of a list, or the command line's; what does not go together ends the program.

    Args:
        argv: None: the command line.
        description: what --help begins with.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--config", metavar="FILE", help="YAML with any of these flags, as batch_size: 32")
    add("--tp", type=positive, default=1, help="tensor-parallel size (default 1)")
    add("--dp", type=int, default=-1, help="data-parallel size (default: what the ranks leave)")
    add("--pp", type=positive, default=1, help="pipeline stages (default 1)")
    add(
        "--ranks",
        metavar="LIST",
        help="the ranks that train, in the grid's order, as 0-2,4,5,7 (default: all); the others "
        "end at once",
    )
    add("--chunks", type=positive, default=1, help="parts of the model per stage (default 1)")
    add(
        "--schedule",
        choices=list(SCHEDULES),
        help="of the pipeline (default 1f1b, with chunks interleaved)",
    )
    add(
        "--microbatches",
        "--grad-accum",
        type=positive,
        help="parts that each dp rank's share of a step is cut into (default: as many as --pp)",
    )
    add("--tie-embeddings", action="store_true", help="one table for embedding and head")
    add("--experts", type=positive, help="experts in each block, for an MLP (default: an MLP)")
    add("--top-k", type=positive, default=2, help="experts that a token goes to (default 2)")
    add("--ep", type=positive, default=1, help="ranks that share the experts out (default 1)")
    add("--etp", type=positive, help="ranks that share each expert (default: as --tp)")
    add(
        "--capacity-factor",
        type=above_zero,
        help="tokens an expert takes, over its even share (default: as many as choose it)",
    )
    add(
        "--aux-loss-coef",
        type=not_negative,
        default=0.0,
        help="weight of the loss that balances the experts' load (default 0)",
    )
    add("--sequence-parallel", action="store_true", help="shard activations over tp as well")
    add("--zero1", action="store_true", help="shard the optimizer over dp")
    add("--fsdp", action="store_true", help="shard weights too, by torch's FSDP2")
    add(
        "--dp-replicate",
        type=positive,
        default=1,
        help="copies of the weights that --fsdp shards (HSDP; default 1)",
    )
    add("--steps", type=positive, default=200, help="optimizer steps (default 200)")
    add("--seed", type=int, default=0, help="of weights, batches and the sample (default 0)")
    add(
        "--batch-size",
        type=positive,
        default=16,
        help="sequences a step, in all (default 16)",
    )
    add("--seq-len", type=positive, default=64, help="bytes a sequence (default 64)")
    add("--layers", type=positive, default=4, help="transformer blocks (default 4)")
    add("--hidden", type=positive, default=128, help="model width (default 128)")
    add("--heads", type=positive, default=8, help="attention heads (default 8)")
    add("--kv-heads", type=positive, help="key/value heads (default: as --heads)")
    add("--dropout", type=probability, default=0.0, help="of activations (default 0)")
    add("--clip-grad", type=not_negative, default=0.0, help="largest gradient norm (default: any)")
    add("--lr", type=float, default=2e-3, help="AdamW's learning rate (default 2e-3)")
    add("--warmup", type=positive, default=20, help="steps over which it rises (default 20)")
    add("--dtype", choices=list(DTYPES), default="fp32", help="of weights (default fp32)")
    add("--save", metavar="DIR", help="write checkpoints to, at the end and as --save-every says")
    add("--save-every", type=positive, help="steps between checkpoints")
    add("--keep", type=positive, help="checkpoints that stay, the last ones (default: all)")
    add(
        "--resume",
        metavar="DIR",
        help="go on from the last checkpoint there, cut in any way; with --save's DIR from the "
        "start where there is none yet, so that one command serves every restart",
    )
    add("--data", metavar="FILE", help="text to train on (default: Python's documentation)")
    add("--metrics", metavar="FILE", help="write a JSON line a step: step, loss, grad_norm, …")
    args = parser.parse_args(argv)
    if args.config:
        parser.set_defaults(**read_config(args.config, parser))
        args = parser.parse_args(argv)
    if args.experts:
        args.etp = args.etp or args.tp  # so that there is an expert region
    elif args.ep > 1 or args.etp or args.capacity_factor or args.aux_loss_coef:
        parser.error("--ep, --etp, --capacity-factor and --aux-loss-coef are about --experts N")
    if args.fsdp and (args.zero1 or args.pp > 1):
        parser.error("--fsdp shards the optimizer too, and is without --zero1 and --pp")
    if args.dp_replicate > 1 and not args.fsdp:
        parser.error("--dp-replicate is about --fsdp")
    if args.dp > 0 and args.dp % args.dp_replicate:
        parser.error(f"--dp-replicate {args.dp_replicate} does not divide --dp {args.dp}")
    if (args.save_every or args.keep) and not args.save:
        parser.error("--save-every and --keep are about --save DIR")
    args.kv_heads = args.kv_heads or args.heads
    args.save_every = args.save_every or args.steps
    # FSDP computes in bf16 with weights that stay in fp32.
    args.weights = torch.float32 if args.fsdp and args.dtype == "bf16" else DTYPES[args.dtype]
    args.schedule = args.schedule or ("interleaved" if args.chunks > 1 else "1f1b")
    args.microbatches = args.microbatches or args.pp
    return args


def read_config(path: str, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The flags that a YAML file sets, checked as if they had been typed."""
    try:
        given = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        parser.error(f"--config {path}: {error}")
    if not isinstance(given, dict):
        parser.error(f"--config {path}: expected a mapping of flags such as tp: 2")
    known = {action.dest: action for action in parser._actions}
    if "grad_accum" in given:
        given.setdefault("microbatches", given.pop("grad_accum"))
    for key, value in given.items():
        if key not in known or key in ("config", "help"):
            parser.error(f"--config {path}: unknown key {key!r}{nearest(str(key), known)}")
        action = known[key]
        if action.nargs == 0:  # a switch
            if not isinstance(value, bool):
                parser.error(f"--config {path}: {key}: {value!r}: expected true or false")
            continue
        try:
            # As if it had been typed; YAML reads 2e-3 as a string, and so does the command line.
            given[key] = parser._get_values(action, [str(value)])
        except argparse.ArgumentError as error:
            parser.error(f"--config {path}: {key}: {value!r}: {error.message}")
    return given


def check(args: argparse.Namespace, grid: commgrid.HyperCommGrid) -> None:
    """Refuses sizes that the grid cannot share out, naming the flag."""
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
        if value % grid.size(by):
            raise SystemExit(
                f"{flag} {value} cannot be shared equally by the {grid.size(by)} ranks of {by}; "
                f"expected a multiple of {grid.size(by)}"
            )
    share = args.batch_size // grid.size("dp")
    if share % args.microbatches:
        raise SystemExit(
            f"--microbatches (--grad-accum) {args.microbatches} does not divide the {share} "
            f"sequences a step that each of the {grid.size('dp')} ranks of dp has of --batch-size "
            f"{args.batch_size}"
        )
    if args.layers < args.pp * args.chunks:
        raise SystemExit(
            f"--layers {args.layers} are fewer than --pp {args.pp} × --chunks {args.chunks} = "
            f"{args.pp * args.chunks} parts; expected a layer for each, or more"
        )
    if args.experts and args.top_k > args.experts:
        raise SystemExit(f"--top-k {args.top_k} is more than --experts {args.experts}")
    if args.hidden % args.heads:
        raise SystemExit(f"--hidden {args.hidden} is not a multiple of --heads {args.heads}")


def positive(text: str) -> int:
    """argparse's type of a count or size."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or more")
    return int(text)


def probability(text: str) -> float:
    """argparse's type of a share, from 0 to below 1."""
    if not 0 <= float(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 0 or more, and less than 1")
    return float(text)


def not_negative(text: str) -> float:
    """argparse's type of a bound that 0 switches off."""
    if not float(text) >= 0:
        raise argparse.ArgumentTypeError(f"{text}: expected 0 or more")
    return float(text)


def above_zero(text: str) -> float:
    """argparse's type of a factor."""
    if not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: expected above 0, such as 1.25")
    return float(text)
