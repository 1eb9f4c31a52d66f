"""The flags of a model's step, without what reckons it."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from commgrid.cli.flags import above_zero, one_of, whole

OF_A_STEP = (
    "microbatch", "virtual_stages", "recompute", "recompute_layers", "zero_stage", "dtype",
    "kernels", "dispatch", "imbalance", "schedule", "sequence_parallel", "tp_overlap", "overlap",
    "gradient_bytes",
)  # fmt: skip
"""Flags that are fields of `ParallelConfig`."""
FLAGS = ("batch", "sequence", *OF_A_STEP, "max_memory", "top")
"""Flags of a step, which need a model."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The flags of a model's step."""
    step = parser.add_argument_group("training step", "what a step of a model takes on the grid")
    step.add_argument("--model", metavar="NAME", help="such as gpt-175b, or a YAML file")
    step.add_argument(
        "--auto", action="store_true",
        help="find the best grids; sizes, --order and the flags below are kept where given",
    )  # fmt: skip
    add = step.add_argument
    count = whole(1)
    add("--batch", type=count, metavar="N", help="sequences of a step (default: the model's)")
    add("--sequence", type=count, metavar="N", help="tokens of one (default: the model's)")
    add("--microbatch", type=count, metavar="N", help="sequences that go through a stage at once")
    add(
        "--virtual-stages", type=count, metavar="N",
        help="of a rank, for the interleaved schedule",
    )  # fmt: skip
    add(
        "--recompute", type=one_of("none", "selective", "full"), metavar="WHAT",
        help="of a layer's forward in the backward: none, selective or full",
    )  # fmt: skip
    add(
        "--recompute-layers", type=count, metavar="N",
        help="of a stage, for which --recompute holds (default: all)",
    )  # fmt: skip
    add(
        "--zero-stage", type=lambda text: int(one_of("0", "1", "3")(text)), metavar="N",
        help="what dp shards: 0 nothing, 1 the optimizer's state, 3 weights and gradients as well "
        "(default 1; with dp_shard 3; --auto tries 1 and 3)",
    )  # fmt: skip
    _add_program(add)
    add(
        "--max-memory", type=above_zero("GB above 0"), metavar="GB",
        help="of a device (default: 90%% of it; the rest is for fragments)",
    )  # fmt: skip
    add("--top", type=count, metavar="N", help="grids that --auto shows (default 5)")
    parser.add_argument(
        "--why", action="store_true", help="where each number of time or memory is from"
    )


def _add_program(add: Callable[..., object]) -> None:
    """Flags that say which program a step is of."""
    add(
        "--dtype", type=one_of("bf16", "fp8", "mxfp8"), metavar="WHAT",
        help="of the layers' matrix products: bf16 (default), fp8 with a scale a tensor, or mxfp8",
    )  # fmt: skip
    add(
        "--kernels", type=one_of("eager", "compiled", "fused"), metavar="WHOSE",
        help="around the products: PyTorch's (eager), torch.compile's, or a library's as "
        "TransformerEngine (fused, the default)",
    )  # fmt: skip
    add(
        "--dispatch", type=one_of("rows", "deepep"), metavar="HOW",
        help="to experts: a row for each choice, as commgrid sends them (rows, the default), or a "
        "token once to a node (deepep)",
    )  # fmt: skip
    add(
        "--imbalance", type=above_zero("a number from 1 on", 1), metavar="X",
        help="tokens of the fullest rank's experts over the mean (default 1)",
    )  # fmt: skip
    add(
        "--schedule", type=one_of("1f1b", "zb-h1"), metavar="NAME",
        help="of a pipeline: 1f1b (default) or zb-h1",
    )  # fmt: skip
    for flag, what in (
        ("--sequence-parallel", "activations between tp's layers are split over tp (default: yes)"),
        ("--tp-overlap", "tp's collectives run behind the products beside them (default: no)"),
        ("--overlap", "dp's collectives run behind forward and backward (default: yes)"),
    ):
        add(flag, action=argparse.BooleanOptionalAction, help=what)
    add(
        "--gradient-bytes", type=int, choices=(2, 4), metavar="N",
        help="of one gradient as dp sums it: 2 or 4 (default 4)",
    )  # fmt: skip
