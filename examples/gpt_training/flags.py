"""train_gpt's flags: what they are, as they are typed or as a YAML file sets them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml

import commgrid
from commgrid.context_parallel import WAYS
from commgrid.layout.axis_names import nearest
from commgrid.pipeline_schedules.schedule import SCHEDULES
from gpt_training.flag_types import (
    above_zero,
    count,
    inner_share,
    not_negative,
    positive,
    probability,
)
from gpt_training.switches import cut_anew, read_switches

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
PROMPT = "The "
AXES = ("tp", "dp", "pp", "cp", "ep", "etp")
"""The flags that are sizes of the grid, which `commgrid audit` gives in their place."""
Add = Callable[..., Any]
"""argparse's add_argument."""


class Parser(argparse.ArgumentParser):
    """Reports what is wrong in one line, without the usage."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> argparse.Namespace:
        found, unknown = self.parse_known_args(args, namespace)
        for word in unknown:
            meant = nearest(word.partition("=")[0], self._option_string_actions)
            self.error(f"unknown flag {word}{meant or '; --help lists all flags'}")
        return found

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(2)


def refuse(message: str) -> NoReturn:
    """End the program, on all ranks alike."""
    raise SystemExit(message)


def last_words(error: commgrid.CommGridError) -> str:
    """Return what a program that an error ends exits with: one line."""
    return f"{type(error).__name__}: {error}"


def parse(
    argv: list[str] | None, description: str | None, own: Callable[[Add], None] | None = None
) -> argparse.Namespace:
    """The flags of a list, or the command line's; what does not go together ends the program.

    Args:
        argv: None: the command line.
        description: what --help begins with.
        own: adds a program's own flags; of these `generate` is another grid's.
    """
    parser = Parser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [FLAG]…",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML with any of these flags, as batch_size: 32"
    )
    for title, add_flags in {**GROUPS, **({"its own": own} if own else {})}.items():
        add_flags(parser.add_argument_group(title).add_argument)
    args = parser.parse_args(argv)
    if args.config:
        parser.set_defaults(**read_config(args.config, parser))
        args = parser.parse_args(argv)
    if args.grid:
        parser.set_defaults(**read_grid(args.grid, parser))
        args = parser.parse_args(argv)

    def finish(flags: argparse.Namespace, begin: str = "") -> None:
        check_together(flags, parser, begin)
        fill_in(flags)

    vars(args).update(commgrid.audit_sizes(**{axis: getattr(args, axis) for axis in AXES}))
    args.switches = read_switches(args, parser, finish)
    if own:
        begin = f"--generate {args.generate}: "
        args.generate = cut_anew(args, args.generate, parser, finish, begin, also=("ranks",))
    finish(args)
    return args


# -- the flags, by what they are about -----------------------------------------------------


def add_grid(add: Add) -> None:
    add("--tp", type=positive, metavar="N", default=1, help="tensor-parallel size (default 1)")
    add(
        "--dp",
        type=int,
        metavar="N",
        default=-1,
        help="data-parallel size (default: what the ranks leave)",
    )
    add("--pp", type=positive, metavar="N", default=1, help="pipeline stages (default 1)")
    add(
        "--cp",
        type=positive,
        metavar="N",
        default=1,
        help="ranks that share a sequence (default 1)",
    )
    add(
        "--cp-comm",
        choices=["auto", *WAYS],
        default="auto",
        help="how attention talks over cp (default auto: what suits the lengths, as the run says)",
    )
    add("--order", metavar="AXES", help="the axes, fastest first (default tp-cp-ep-dp-pp)")
    add(
        "--grid",
        metavar="FILE",
        help="sizes and order from a grid's YAML, as `commgrid plan -o grid.yaml` writes it",
    )
    add("--sequence-parallel", action="store_true", help="shard activations over tp as well")
    add("--zero1", action="store_true", help="shard the optimizer over dp")
    add("--fsdp", action="store_true", help="shard weights too, by torch's FSDP2")
    add(
        "--dp-replicate",
        type=positive,
        default=1,
        metavar="N",
        help="copies of the weights that --fsdp shards (HSDP; default 1)",
    )
    add(
        "--ranks",
        metavar="LIST",
        help="the ranks that train, in the grid's order, as 0-2,4,5,7 (default: all); the others "
        "end at once, or with --survive wait for a place",
    )
    add(
        "--survive",
        type=positive,
        nargs="?",
        const=10,
        metavar="N",
        help="when ranks fail, go on without them, in the same processes, from the state that is "
        "kept in memory every N steps (default 10) or the last checkpoint; for launchers that "
        "leave the others alone. A rank with an error of its own takes part again, once a step",
    )
    add(
        "--switch",
        action="append",
        metavar="step=N:FLAGS",
        help="after step N go on on another grid, in the same processes: any of this group's flags "
        "and the next one's, ep and etp, as step=10:tp=4,dp=2,zero1; may be given several times",
    )
    add(
        "--timeout",
        type=positive,
        metavar="S",
        help="seconds after which a rank that does not answer is an error (default: torch's)",
    )


def add_pipeline(add: Add) -> None:
    add(
        "--schedule",
        choices=list(SCHEDULES),
        help="what each stage does when (default 1f1b, with chunks interleaved)",
    )
    add(
        "--chunks",
        type=positive,
        metavar="N",
        default=1,
        help="parts of the model per stage (default 1)",
    )
    add(
        "--microbatches",
        "--grad-accum",
        type=positive,
        metavar="N",
        help="parts that each dp rank's share of a step is cut into (default: as many as --pp)",
    )


def add_model(add: Add) -> None:
    add("--layers", type=positive, metavar="N", default=4, help="transformer blocks (default 4)")
    add("--hidden", type=positive, metavar="N", default=128, help="model width (default 128)")
    add("--heads", type=positive, metavar="N", default=8, help="attention heads (default 8)")
    add("--kv-heads", type=positive, metavar="N", help="key/value heads (default: as --heads)")
    add("--seq-len", type=positive, default=64, metavar="N", help="bytes a sequence (default 64)")
    add("--tie-embeddings", action="store_true", help="one table for embedding and head")
    add("--dropout", type=probability, metavar="X", default=0.0, help="of activations (default 0)")
    add("--dtype", choices=list(DTYPES), default="fp32", help="of weights (default fp32)")


def add_experts(add: Add) -> None:
    add(
        "--experts",
        type=positive,
        metavar="N",
        help="experts in each block, for an MLP (default: an MLP)",
    )
    add(
        "--top-k",
        type=positive,
        metavar="N",
        default=2,
        help="experts that a token goes to (default 2)",
    )
    add(
        "--ep",
        type=positive,
        metavar="N",
        default=1,
        help="ranks that share the experts out (default 1)",
    )
    add("--etp", type=positive, metavar="N", help="ranks that share each expert (default: as --tp)")
    add(
        "--capacity-factor",
        type=above_zero,
        metavar="X",
        help="tokens an expert takes, over its even share (default: as many as choose it)",
    )
    add(
        "--aux-loss-coef",
        type=not_negative,
        default=0.0,
        metavar="X",
        help="weight of the loss that balances the experts' load (default 0)",
    )


def add_training(add: Add) -> None:
    add(
        "--steps",
        type=count,
        metavar="N",
        default=200,
        help="optimizer steps, in all (default 200)",
    )
    add(
        "--batch-size",
        type=positive,
        default=16,
        metavar="N",
        help="sequences a step, in all (default 16)",
    )
    add("--data", metavar="FILE", help="text to train on (default: Python's documentation)")
    add(
        "--packed",
        action="store_true",
        help="a new document at each heading (a line underlined with ===, *** or such): attention "
        "stays within documents, and their positions begin anew",
    )
    add(
        "--seed",
        type=int,
        metavar="N",
        default=0,
        help="of weights, batches and the sample (default 0)",
    )
    add(
        "--clip-grad",
        type=not_negative,
        default=0.0,
        metavar="X",
        help="largest gradient norm (default: any)",
    )


def add_learning_rate(add: Add) -> None:
    add("--lr", type=not_negative, default=2e-3, help="AdamW's, at its highest (default 2e-3)")
    add(
        "--warmup",
        type=count,
        metavar="N",
        default=20,
        help="steps over which it rises (default 20)",
    )
    add(
        "--lr-decay",
        choices=["constant", "linear", "cosine"],
        default="constant",
        help="what it does from then on (default constant)",
    )
    add("--min-lr", type=not_negative, metavar="LR", help="what it falls to (default 0)")
    add(
        "--lr-decay-steps",
        type=positive,
        metavar="N",
        help="the step at which it is there (default: the last one); to go on as a longer run "
        "would, give the longer run's",
    )


def add_evaluation(add: Add) -> None:
    add(
        "--eval-every",
        type=positive,
        metavar="N",
        help="steps between two looks at the loss on text held out, and at the end (default: none)",
    )
    add(
        "--eval-batches",
        type=positive,
        default=8,
        metavar="N",
        help="of --batch-size sequences, the same every time (default 8)",
    )
    add(
        "--held-out",
        type=inner_share,
        default=0.1,
        metavar="SHARE",
        help="of the text, its end, which --eval-every keeps from training (default 0.1)",
    )
    add(
        "--sample",
        nargs="?",
        const=PROMPT,
        metavar="PROMPT",
        help=f"after training, print how the model goes on (default prompt {PROMPT!r}); with "
        "--resume DIR --steps 0 it does only that",
    )
    add("--sample-tokens", type=positive, default=120, metavar="N", help="bytes (default 120)")
    add(
        "--temperature",
        type=not_negative,
        default=0.8,
        metavar="X",
        help="of the sample; 0 takes the likeliest byte each time (default 0.8)",
    )


def add_checkpoints(add: Add) -> None:
    add("--save", metavar="DIR", help="write checkpoints to, at the end and as --save-every says")
    add("--save-every", type=positive, metavar="N", help="steps between checkpoints")
    add(
        "--save-in-background", action="store_true",
        help="write them beside the next steps, but for the last",
    )  # fmt: skip
    add("--keep", type=positive, metavar="N", help="checkpoints that stay, the last (default: all)")
    add(
        "--resume",
        metavar="DIR",
        help="go on from the last checkpoint there, cut in any way; with --save's DIR from the "
        "start where there is none yet, so that one command serves every restart",
    )


def add_logging(add: Add) -> None:
    add(
        "--log-every",
        type=positive,
        default=10,
        metavar="N",
        help="steps between printed lines; the first and the last are printed too (default 10)",
    )
    add("--metrics", metavar="FILE", help="write a JSON line a step: step, loss, grad_norm, …")
    add(
        "--tensorboard",
        metavar="DIR",
        help="write loss, evaluation loss, learning rate, gradient norm and speed for TensorBoard",
    )


GROUPS: dict[str, Callable[[Add], None]] = {
    "the grid": add_grid,
    "pipeline and microbatches": add_pipeline,
    "model": add_model,
    "experts": add_experts,
    "training": add_training,
    "learning rate": add_learning_rate,
    "evaluation and sample": add_evaluation,
    "checkpoints": add_checkpoints,
    "what it says and writes": add_logging,
}
"""What --help is cut into."""


# -- what goes together, and what follows --------------------------------------------------


def check_together(
    args: argparse.Namespace, parser: argparse.ArgumentParser, begin: str = ""
) -> None:
    """Refuses flags that contradict each other, on any grid; messages begin as given."""
    about_experts = args.ep > 1 or args.etp or args.capacity_factor or args.aux_loss_coef
    decays = args.lr_decay != "constant"
    for wrong, message in (
        (
            about_experts and not args.experts,
            "--ep, --etp, --capacity-factor and --aux-loss-coef are about --experts N",
        ),
        (
            args.fsdp and (args.zero1 or args.pp > 1),
            "--fsdp shards the optimizer too, and is without --zero1 and --pp",
        ),
        (args.dp_replicate > 1 and not args.fsdp, "--dp-replicate is about --fsdp"),
        (
            args.survive and args.switch,
            "--survive goes on on a smaller grid of its own, and is without --switch",
        ),
        (args.cp_comm != "auto" and args.cp == 1, "--cp-comm is about --cp N"),
        (
            args.dropout and (args.cp > 1 or args.packed),
            f"--dropout {args.dropout} is of attention too, which has none with --cp and --packed; "
            "leave it out",
        ),
        (
            args.dp > 0 and args.dp % args.dp_replicate,
            f"--dp-replicate {args.dp_replicate} does not divide --dp {args.dp}",
        ),
        (
            (args.save_every or args.keep or args.save_in_background) and not args.save,
            "--save-every, --keep and --save-in-background are about --save DIR",
        ),
        (
            (args.min_lr is not None or args.lr_decay_steps) and not decays,
            "--min-lr and --lr-decay-steps are about --lr-decay linear or cosine",
        ),
        (
            (args.min_lr or 0) > args.lr,
            f"--min-lr {args.min_lr} is above --lr {args.lr}; give one up to it",
        ),
        (
            decays and 0 < (args.lr_decay_steps or args.steps) <= args.warmup,
            f"--warmup {args.warmup} leaves no step of {args.lr_decay_steps or args.steps} to "
            f"--lr-decay {args.lr_decay}; give fewer, or more --lr-decay-steps (--steps)",
        ),
        (args.sample == "", "--sample '': give a prompt of a character or more"),
    ):
        if wrong:
            parser.error(f"{begin}{message}")


def fill_in(args: argparse.Namespace) -> None:
    """What follows from the other flags where it is not given."""
    if args.experts:
        args.etp = args.etp or args.tp  # so that there is an expert region
    args.kv_heads = args.kv_heads or args.heads
    args.min_lr = args.min_lr or 0.0
    if args.lr_decay != "constant":
        args.lr_decay_steps = args.lr_decay_steps or args.steps
    if not args.eval_every:
        args.held_out = 0.0
    args.save_every = args.save_every or max(args.steps, 1)
    # FSDP computes in bf16 with weights that stay in fp32.
    args.weights = torch.float32 if args.fsdp and args.dtype == "bf16" else DTYPES[args.dtype]
    args.schedule = args.schedule or ("interleaved" if args.chunks > 1 else "1f1b")
    args.microbatches = args.microbatches or args.pp


def read_grid(path: str, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The flags that make the grid of a YAML file."""
    try:
        spec = commgrid.GridSpec.from_yaml(path)
    except commgrid.SpecError as error:
        parser.error(f"--grid {error}")
    shape = spec.shape
    given = {axis: shape[axis] for axis in (*AXES, "dp_replicate") if axis in shape}
    order = spec.order.replace("cp", "cp-ep", 1) if "ep" in shape else spec.order
    given["order"] = order
    data = {"dp": given.get("dp")}
    if "dp_shard" in shape:
        copies, shards = shape["dp_replicate"], shape["dp_shard"]
        given |= {"fsdp": True, "dp": copies * shards if min(copies, shards) > 0 else -1}
        data = {"dp_replicate": copies, "dp_shard": shards}
    sizes = {axis: given[axis] for axis in ("tp", "cp", "pp", "ep", "etp") if axis in given}
    if commgrid.GridSpec.build(**sizes, **data, order=order) != spec:
        parser.error(
            f"--grid {path}: describes more than sizes and an order, as `commgrid plan -o` writes "
            "them; groups and other options are this program's own"
        )
    return given


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
        if key == "switch":
            given[key] = [str(one) for one in (value if isinstance(value, list) else [value])]
            continue
        if action.nargs == "?" and isinstance(value, bool):
            given[key] = action.const if value else None
            continue
        try:
            # As if it had been typed; YAML reads 2e-3 as a string, and so does the command line.
            given[key] = parser._get_values(action, [str(value)])
        except argparse.ArgumentError as error:
            parser.error(f"--config {path}: {key}: {error.message}")
    return given
