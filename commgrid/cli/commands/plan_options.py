"""The flags of a model's step, without what reckons it."""

from __future__ import annotations

import argparse

from commgrid.cli.flags import above_zero, one_of, whole

FLAGS = (
    "batch", "sequence", "microbatch", "virtual_stages", "recompute", "zero_stage", "max_memory",
    "top",
)  # fmt: skip
"""Flags of a step, which need a model."""
_SHARD = {"none": 0, "optimizer": 1, "weights": 3}
"""What `--zero-stage` was called, as `--shard`."""


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
        "--virtual-stages", "--chunks", type=count, metavar="N",
        help="of a rank, for the interleaved schedule",
    )  # fmt: skip
    add(
        "--recompute", type=one_of("none", "selective", "full"), metavar="WHAT",
        help="of a layer's forward in the backward: none, selective or full",
    )  # fmt: skip
    add(
        "--zero-stage", "--shard", type=_zero_stage, metavar="N",
        help="what dp shards: 0 nothing, 1 the optimizer's state, 3 weights and gradients as well "
        "(default 1; with dp_shard 3)",
    )  # fmt: skip
    add(
        "--max-memory", type=above_zero("GB above 0"), metavar="GB",
        help="of a device (default: 90%% of it; the rest is for fragments)",
    )  # fmt: skip
    add("--top", type=count, metavar="N", help="grids that --auto shows (default 5)")
    parser.add_argument(
        "--why", action="store_true", help="where each number of time or memory is from"
    )


def _zero_stage(text: str) -> int:
    stage = _SHARD.get(text, text)
    if str(stage) not in map(str, _SHARD.values()):
        raise argparse.ArgumentTypeError(f"{text}: expected 0, 1 or 3")
    return int(stage)
