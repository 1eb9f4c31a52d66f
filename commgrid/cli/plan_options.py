"""The flags of a model's step, without what reckons it."""

from __future__ import annotations

import argparse

from commgrid.advisor.config import HEADROOM, RECOMPUTE, SHARD

FLAGS = ("batch", "sequence", "microbatch", "chunks", "recompute", "shard", "max_memory", "top")
"""Flags of a step, which need a model."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The flags of a model's step."""
    step = parser.add_argument_group("training step", "what a step of a model takes on the grid")
    step.add_argument("--model", metavar="NAME", help="such as gpt-175b, or a YAML file")
    step.add_argument(
        "--auto", action="store_true",
        help="find the best grids; sizes, --order and the flags below are kept where given",
    )  # fmt: skip
    step.add_argument("--batch", metavar="N", help="sequences of a step (default: the model's)")
    step.add_argument("--sequence", metavar="N", help="tokens of one (default: the model's)")
    step.add_argument("--microbatch", metavar="N", help="sequences that go through a stage at once")
    step.add_argument("--chunks", metavar="N", help="of a stage's layers, for interleaving")
    step.add_argument("--recompute", help=", ".join(RECOMPUTE))
    step.add_argument(
        "--shard",
        help=f"what dp shares out: {', '.join(SHARD)} (default optimizer; with dp_shard weights)",
    )
    step.add_argument(
        "--max-memory", metavar="GB",
        help=f"of a device (default: {HEADROOM:.0%}% of it; the rest is for fragments)",
    )  # fmt: skip
    step.add_argument("--top", metavar="N", help="grids that --auto shows (default 5)")
    parser.add_argument(
        "--why", action="store_true", help="where each number of time or memory is from"
    )
