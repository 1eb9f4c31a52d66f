"""What the scripts of this folder share: their flags, and what they say of their losses."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def make_parser(description: str | None, batch_size: int = 32) -> argparse.ArgumentParser:
    """A parser of the flags that all of them have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--plain", action="store_true", help="without commgrid")
    add("--layers", type=int, default=2, help="blocks (default 2)")
    add(
        "--batch-size", type=int, default=batch_size,
        help=f"rows a step, in all (default {batch_size})",
    )  # fmt: skip
    add("--steps", type=int, default=10, help="optimizer steps (default 10)")
    add("--seed", type=int, default=0, help="of weights and data (default 0)")
    add("--metrics", metavar="FILE", help="write a JSON line a step: step, loss")
    return parser


class Losses:
    """Prints the loss of each step, and writes it to `--metrics`; on one rank.

    Args:
        metrics: the file, if any.
        told: whether this rank is the one.
    """

    def __init__(self, metrics: str | None, told: bool) -> None:
        self._step, self._told = 0, told
        self._path = Path(metrics) if metrics and told else None
        if self._path is not None:
            self._path.write_text("")

    def add(self, loss: float) -> None:
        """The next step's."""
        self._step += 1
        if self._told:
            print(f"step {self._step:3}  loss {loss:.5f}", flush=True)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"step": self._step, "loss": loss}) + "\n")
